package service

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// quiet is a trial in which nothing happens by chance.
func quiet(t *testing.T, c Capacities) *trial {
	r := newTrial(t, c, func(int) int { return 0 })
	r.roomy = c == roomy
	r.model.Apply(Update{Complete: true})
	return r
}

// update returns what has been written.
func (r *trial) update(u Update) Writes {
	r.Helper()
	was := r.kernel.copy()
	r.plan(r.model.Apply(u))
	return r.state.Repair(was)
}

func (r *trial) wait(d time.Duration) {
	r.Helper()
	r.now = r.now.Add(d)
	r.plan(nil)
}

// web is a Service of one TCP port, 80, at an address, and its slice with endpoints that listen on port 8080.
func web(t testing.TB, name, address string, endpoints ...string) (Service, Slice) {
	t.Helper()
	s := slice(t, 8080, endpoints...)
	s.Name, s.Service = Name{"ns", name}, name
	return Service{
		Name: s.Name, Created: time.Unix(100, 0), ClusterIPs: []netip.Addr{netip.MustParseAddr(address)},
		Ports: []Port{{Protocol: wire.TCP, Port: 80}},
	}, *s
}

func (r *trial) put(name, address string, endpoints ...string) Writes {
	r.Helper()
	service, slice := web(r, name, address, endpoints...)
	return r.update(Update{Services: []Service{service}, Slices: []Slice{slice}})
}

func (r *trial) delete(name string) Writes {
	r.Helper()
	n := []Name{{"ns", name}}
	return r.update(Update{GoneServices: n, GoneSlices: n})
}

// find returns where a frontend on port 80 leads; nil: there is none.
func (r *trial) find(address string) []string {
	r.Helper()
	key := services.Key{Address: wire.AddrFrom(netip.MustParseAddr(address)), Port: wire.PortFrom(80), Proto: wire.TCP}
	v, there := r.kernel.Services[key]
	if !there {
		return nil
	}
	found := []string{}
	for _, target := range r.kernel.set(v.Set).cluster {
		found = append(found, target.Address.String())
	}
	slices.Sort(found)
	return slices.Compact(found)
}

func (r *trial) want(address string, endpoints ...string) {
	r.Helper()
	if found := r.find(address); (found == nil) != (endpoints == nil) || !slices.Equal(found, endpoints) {
		r.Errorf("%s leads to %v, want %v", address, found, endpoints)
	}
}

// wantProblem checks that the only problem is of a Service and has all the words; no name: there is none.
func (r *trial) wantProblem(name string, reason Reason, words ...string) {
	r.Helper()
	all := r.state.Problems()
	if name == "" {
		if len(all) > 0 {
			r.Errorf("problems: %v", all)
		}
		return
	}
	if len(all) != 1 || all[0].Service.Name != name || all[0].Reason != reason {
		r.Fatalf("problems: %+v, want one of %s, %s", all, name, reason)
	}
	for _, w := range words {
		if !strings.Contains(all[0].Text, w) {
			r.Errorf("%q does not say %q", all[0].Text, w)
		}
	}
}

func (r *trial) backend(address string) (uint32, backends.Value) {
	r.Helper()
	for i, b := range r.kernel.Backends {
		if b.Set != 0 && b.Address.String() == address {
			return uint32(i), b
		}
	}
	r.Fatalf("no backend has address %s", address)
	return 0, backends.Value{}
}

// lists counts the batches that are not empty.
func (w Writes) lists() (n int) {
	for _, length := range []int{
		len(w.Backends.Keys), len(w.Slots.Keys), len(w.Sets.Keys), len(w.Names.Keys), len(w.Ranges.Keys), len(w.Services.Keys),
		len(w.GoneServices), len(w.GoneRanges), len(w.GoneNames), len(w.EmptiedSets.Keys), len(w.Retired.Keys),
	} {
		if length > 0 {
			n++
		}
	}
	return n
}

func TestOneEndpointIsFewWrites(t *testing.T) {
	r := quiet(t, roomy)
	r.put("a", "10.96.0.1")
	for _, step := range []struct {
		name      string
		endpoints []string
		lists     int
	}{
		{"the first one", []string{"10.0.0.1"}, 4}, // backend, slot, set, address (it answers now)
		{"another", []string{"10.0.0.1", "10.0.0.2"}, 3},
		{"one replaces another", []string{"10.0.0.1", "10.0.0.3"}, 4},
		{"one is not ready", []string{"10.0.0.1", "10.0.0.3 dead"}, 3},
		{"it is again", []string{"10.0.0.1", "10.0.0.3"}, 3},
		{"one goes", []string{"10.0.0.3"}, 3},
		{"the last one goes", nil, 3},
	} {
		t.Run(step.name, func(t *testing.T) {
			_, slice := web(t, "a", "10.96.0.1", step.endpoints...)
			w := r.state.Plan(r.model, r.model.Apply(Update{Slices: []Slice{slice}}), r.now)
			if n := w.lists(); n != step.lists {
				t.Errorf("%d lists, want %d: %+v", n, step.lists, w)
			}
		})
	}
}

func TestNothingBeforeTheLists(t *testing.T) {
	r := quiet(t, roomy)
	r.put("a", "10.96.0.1", "10.0.0.1")
	state, model := Load(r.options, r.kernel.copy()), NewModel()
	service, slice := web(t, "b", "10.96.0.2", "10.0.0.2")
	for _, u := range []Update{
		{Services: []Service{service}, Slices: []Slice{slice}},
		{Err: errors.New("no API"), Complete: true},
	} {
		if w := state.Plan(model, model.Apply(u), r.now); !w.Empty() {
			t.Errorf("before the lists are complete this is written: %+v", w)
		}
	}
	w := state.Plan(model, model.Apply(Update{Complete: true}), r.now)
	if len(w.GoneServices) != 2 || len(w.GoneNames) != 1 || len(w.EmptiedSets.Keys) != 1 || len(w.Retired.Keys) != 1 {
		t.Errorf("a Service that is in no list is not removed: %+v", w)
	}
}

func TestLastEndpointsOfTheAPIServerStay(t *testing.T) {
	r := quiet(t, Capacities{Services: 64, Sets: 16, Backends: 16, Slots: 64})
	service, slice := web(t, "kubernetes", "10.96.0.1", "192.0.2.1", "192.0.2.2")
	service.Name, slice.Name = apiServer, apiServer
	r.update(Update{Services: []Service{service}, Slices: []Slice{slice}})
	slice.Endpoints = slice.Endpoints[:1]
	plan := func(u Update) {
		r.kernel.apply(t, r.state.Plan(r.model, r.model.Apply(u), r.now), func(string) {})
		r.state.Written(r.now)
	}
	plan(Update{Slices: []Slice{slice}})
	r.want("10.96.0.1", "192.0.2.1")
	plan(Update{GoneSlices: []Name{apiServer}})
	r.want("10.96.0.1", "192.0.2.1")

	r.state = Load(r.options, r.kernel.copy())
	plan(Update{Complete: true, Services: []Service{service}})
	r.want("10.96.0.1", "192.0.2.1")
	if _, b := r.backend("192.0.2.1"); b.Flags&backends.Serving == 0 {
		t.Error("it serves no more")
	}

	_, other := web(t, "kubernetes", "10.96.0.1", "192.0.2.3")
	other.Name = apiServer
	plan(Update{Slices: []Slice{other}})
	r.want("10.96.0.1", "192.0.2.3")
	plan(Update{GoneServices: []Name{apiServer}})
	if len(r.kernel.Services) > 0 {
		t.Error("a Service that is gone stays")
	}
}

func TestTwoServicesOneFrontend(t *testing.T) {
	r := quiet(t, roomy)
	young, youngs := web(t, "a", "10.96.0.1", "10.0.0.1")
	old, olds := web(t, "b", "10.96.0.1", "10.0.0.2")
	old.Created = young.Created.Add(-time.Hour)
	r.update(Update{Services: []Service{young}, Slices: []Slice{youngs}})
	r.wantProblem("", "")
	r.update(Update{Services: []Service{old}, Slices: []Slice{olds}})
	r.want("10.96.0.1", "10.0.0.2")
	r.wantProblem("a", Taken, "10.96.0.1:80 tcp", "ns/b")
	r.delete("b")
	r.want("10.96.0.1", "10.0.0.1")
	r.wantProblem("", "")
	r.update(Update{Services: []Service{old}, Slices: []Slice{olds}})
	old.Created = young.Created.Add(time.Hour) // it has been made anew, and both are seen at once
	r.update(Update{Services: []Service{old}})
	r.want("10.96.0.1", "10.0.0.1")
	r.wantProblem("b", Taken, "ns/a")
}

// A ClusterIP is the API's to give: who names another Service's as an address from outside gets no port of it, though older, and
// though the Service is not served because the node has the address itself.
func TestOthersClusterIP(t *testing.T) {
	held := netip.MustParseAddr("10.96.0.3")
	for name, claim := range map[string]func(*Service, netip.Addr){
		"externalIP":    func(s *Service, a netip.Addr) { s.ExternalIPs = []netip.Addr{a} },
		"load balancer": func(s *Service, a netip.Addr) { s.LoadBalancerIPs = []netip.Addr{a} },
	} {
		for _, a := range []netip.Addr{netip.MustParseAddr("10.96.0.2"), held} {
			t.Run(fmt.Sprint(name, " ", a), func(t *testing.T) {
				r := quiet(t, roomy)
				r.options.HeldAddresses = map[netip.Addr]bool{held: true}
				r.plan(r.state.Configure(r.options, r.model))
				thief, thiefs := web(t, "a", "10.96.0.1", "10.0.0.1")
				claim(&thief, a)
				thief.Ports = append(thief.Ports, Port{Name: "other", Protocol: wire.TCP, Port: 81})
				r.update(Update{Services: []Service{thief}, Slices: []Slice{thiefs}})
				r.want(a.String(), "10.0.0.1")
				owner, owners := web(t, "b", a.String(), "10.0.0.2")
				owner.Created = thief.Created.Add(time.Hour)
				r.update(Update{Services: []Service{owner}, Slices: []Slice{owners}})
				if a == held {
					r.want(a.String())
				} else {
					r.want(a.String(), "10.0.0.2")
				}
				if _, there := r.kernel.Services[services.Key{Address: wire.AddrFrom(a), Port: wire.PortFrom(81), Proto: wire.TCP}]; there {
					t.Error("it has another port there")
				}
				r.want("10.96.0.1", "10.0.0.1")
				r.wantProblem("a", Taken, a.String(), "ClusterIP", "ns/b")
				r.delete("b")
				r.want(a.String(), "10.0.0.1")
				r.wantProblem("", "")
			})
		}
	}
}

func TestHeldAddresses(t *testing.T) {
	r := quiet(t, roomy)
	service, slice := web(t, "a", "10.96.0.1", "10.0.0.1")
	service.LoadBalancerIPs = []netip.Addr{netip.MustParseAddr("192.0.2.9")}
	r.update(Update{Services: []Service{service}, Slices: []Slice{slice}})
	flags := func(a string) services.Flags {
		return r.kernel.Services[services.Key{Address: wire.AddrFrom(netip.MustParseAddr(a))}].Flags
	}
	if flags("10.96.0.1") != services.ClusterIP|services.Answers || flags("192.0.2.9") != services.Answers {
		t.Errorf("flags %v and %v", flags("10.96.0.1"), flags("192.0.2.9"))
	}
	r.options.HeldAddresses = map[netip.Addr]bool{service.ClusterIPs[0]: true, service.LoadBalancerIPs[0]: true}
	r.plan(r.state.Configure(r.options, r.model))
	r.want("10.96.0.1")
	r.want("192.0.2.9", "10.0.0.1")
	if flags("192.0.2.9") != 0 {
		t.Errorf("an address of the node's has flags %v", flags("192.0.2.9"))
	}
	r.options.HeldAddresses = nil
	r.plan(r.state.Configure(r.options, r.model))
	r.want("10.96.0.1", "10.0.0.1")
}

// A backend keeps its number as long as an EndpointSlice has it; when it comes back it is another.
func TestGenerations(t *testing.T) {
	r := quiet(t, roomy)
	r.put("a", "10.96.0.1", "10.0.0.1", "10.0.0.2")
	n, first := r.backend("10.0.0.1")
	r.put("a", "10.96.0.1", "10.0.0.1 dead", "10.0.0.2")
	if m, b := r.backend("10.0.0.1"); m != n || b.Generation != first.Generation || b.Flags&backends.Serving != 0 {
		t.Errorf("not ready: number %d, %+v; was %d, %+v", m, b, n, first)
	}
	r.put("a", "10.96.0.1", "10.0.0.1 leaving", "10.0.0.2")
	if m, b := r.backend("10.0.0.1"); m != n || b.Generation != first.Generation || b.Flags&(backends.Serving|backends.Answers) != backends.Answers {
		t.Errorf("terminating beside another: number %d, %+v; was %d, %+v", m, b, n, first)
	}
	w := r.put("a", "10.96.0.1", "10.0.0.1 left", "10.0.0.2")
	if want := []backends.Key{{Backend: n}}; !slices.Equal(w.Retired.Keys, want) {
		t.Errorf("retired when it does not serve any more: %v, want %v", w.Retired.Keys, want)
	}
	r.put("a", "10.96.0.1", "10.0.0.2")
	if gone := r.kernel.Backends[n]; gone.Generation != first.Generation+1 || gone.Set != 0 || gone.Address != first.Address {
		t.Errorf("gone: %+v; was %+v", gone, first)
	}
	r.put("a", "10.96.0.1", "10.0.0.1", "10.0.0.2")
	if m, _ := r.backend("10.0.0.1"); m == n {
		t.Errorf("number %d is used again at once", m)
	}
	r.wait(Grace)
	r.put("b", "10.96.0.2", "10.0.0.3")
	if m, b := r.backend("10.0.0.3"); m != n || b.Generation != first.Generation+1 {
		t.Errorf("number %d, %+v; want %d with the next generation", m, b, n)
	}
}

func TestPlanTakesNewZone(t *testing.T) {
	r := quiet(t, roomy)
	r.put("a", "10.96.0.1", "10.0.0.1 ~z0", "10.0.0.2 ~z1")
	r.want("10.96.0.1", "10.0.0.1")
	r.options.Zone = "z1"
	r.plan(r.state.Configure(r.options, r.model))
	r.want("10.96.0.1", "10.0.0.2")
}

// What NodePorts answer on is the node's to say; a Service may have such an address as well.
func TestNodeAddresses(t *testing.T) {
	r := quiet(t, roomy)
	own := netip.MustParseAddr("192.0.2.1")
	r.options.NodeAddresses = map[netip.Addr]bool{own: true}
	r.options.HeldAddresses = r.options.NodeAddresses
	r.plan(r.state.Configure(r.options, r.model))
	is := func(when string, want services.Flags, there bool) {
		t.Helper()
		if v, ok := r.kernel.Services[services.Key{Address: wire.AddrFrom(own)}]; ok != there || v.Flags != want {
			t.Errorf("%s: there %v with %v, want %v with %v", when, ok, v.Flags, there, want)
		}
	}
	is("the node's alone", services.Node|services.Own, true)
	service, slice := web(t, "a", "10.96.0.1", "10.0.0.1")
	service.ExternalIPs, service.Ports[0].NodePort = []netip.Addr{own}, 30080
	r.update(Update{Services: []Service{service}, Slices: []Slice{slice}})
	is("a Service's too", services.Node|services.Own, true)
	r.want("192.0.2.1", "10.0.0.1")
	wild := services.NodePort(wire.IPv4, wire.PortFrom(30080), wire.TCP)
	if v := r.kernel.Services[wild]; v.Set == 0 || v.Set != r.kernel.Services[services.Key{Address: wire.AddrFrom(own), Port: wire.PortFrom(80), Proto: wire.TCP}].Set {
		t.Errorf("the NodePort leads to set %d", v.Set)
	}
	if all := r.state.NodePorts(); !slices.Equal(all, []uint16{30080}) {
		t.Errorf("NodePorts %v", all)
	}
	r.restart()
	r.options.NodeAddresses, r.options.HeldAddresses = nil, nil
	r.plan(r.state.Configure(r.options, r.model))
	is("the Service's alone", services.Answers, true)
	r.delete("a")
	is("nobody's", 0, false)
	if len(r.kernel.Services)+len(r.state.NodePorts()) > 0 {
		t.Errorf("left: %v", r.kernel.Services)
	}
}

// Host ports answer on all of the node's own addresses, also where NodePorts do not.
func TestOwnAddresses(t *testing.T) {
	r := quiet(t, roomy)
	first, second := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	is := func(when string, want map[netip.Addr]services.Flags) {
		t.Helper()
		r.plan(r.state.Configure(r.options, r.model))
		got := map[netip.Addr]services.Flags{}
		for k, v := range r.kernel.Services {
			got[k.Address.Netip()] = v.Flags
		}
		if !maps.Equal(got, want) {
			t.Errorf("%s: %v, want %v", when, got, want)
		}
	}
	r.update(Update{Complete: true}) // no Services, as where others serve them
	r.options.OwnAddresses = map[netip.Addr]bool{first: true, second: true}
	is("both", map[netip.Addr]services.Flags{first: services.Own, second: services.Own})
	r.restart()
	r.options.NodeAddresses = map[netip.Addr]bool{first: true}
	is("NodePorts on one", map[netip.Addr]services.Flags{first: services.Own | services.Node, second: services.Own})
	delete(r.kernel.Services, services.Key{Address: wire.AddrFrom(second)})
	r.kernel.apply(r, r.state.Repair(r.kernel.copy()), func(string) {})
	is("somebody has deleted one", map[netip.Addr]services.Flags{first: services.Own | services.Node, second: services.Own})
	r.options.NodeAddresses = nil
	is("on none", map[netip.Addr]services.Flags{first: services.Own, second: services.Own})
	r.options.OwnAddresses = map[netip.Addr]bool{second: true}
	is("one is gone", map[netip.Addr]services.Flags{second: services.Own})
}

// A NodePort that a pod had before as its host port is a problem of the Service, as long as that is so. It is written all the same:
// the programs look at host ports first, and on single addresses only.
func TestHostPortsInTheWay(t *testing.T) {
	r := quiet(t, roomy)
	taken, other := services.NodePort(wire.IPv4, wire.PortFrom(30080), wire.TCP), services.NodePort(wire.IPv4, wire.PortFrom(30080), wire.UDP)
	in := func(has map[services.Key]string) {
		t.Helper()
		r.options.HostPorts = has
		r.plan(r.state.Configure(r.options, r.model))
	}
	service, slice := web(t, "a", "10.96.0.1", "10.0.0.1")
	service.Ports[0].NodePort = 30080
	in(map[services.Key]string{other: "host port 0.0.0.0:30080/udp of pod ns/dns"})
	r.update(Update{Services: []Service{service}, Slices: []Slice{slice}})
	r.wantProblem("", "")
	in(map[services.Key]string{taken: "host port 0.0.0.0:30080/tcp of pod ns/proxy", other: "host port 0.0.0.0:30080/udp of pod ns/dns"})
	r.wantProblem("a", HostPort, "*:30080 tcp does not answer on this node where it is host port 0.0.0.0:30080/tcp of pod ns/proxy")
	if v := r.kernel.Services[taken]; v.Set == 0 {
		t.Error("the NodePort is not written")
	}
	r.want("10.96.0.1", "10.0.0.1")
	in(map[services.Key]string{taken: "host port 192.0.2.1:30080/tcp of pod ns/later"})
	r.wantProblem("a", HostPort, "of pod ns/later")
	in(nil)
	r.wantProblem("", "")
}

func TestNodePortOfTwo(t *testing.T) {
	r := quiet(t, roomy)
	key := services.NodePort(wire.IPv4, wire.PortFrom(30080), wire.TCP)
	owner := func() string {
		return services.Text(r.kernel.Names[services.SetKey{Set: r.kernel.Services[key].Set}].Name)
	}
	old, olds := web(t, "old", "10.96.0.1", "10.0.0.1")
	young, youngs := web(t, "young", "10.96.0.2", "10.0.0.2")
	old.Ports[0].NodePort, young.Ports[0].NodePort, young.Created = 30080, 30080, old.Created.Add(time.Second)
	r.update(Update{Services: []Service{young}, Slices: []Slice{youngs}})
	r.update(Update{Services: []Service{old}, Slices: []Slice{olds}})
	if owner() != "old" {
		t.Errorf("it is %s's", owner())
	}
	r.wantProblem("young", Taken, "*:30080 tcp is served for Service ns/old")
	r.want("10.96.0.2", "10.0.0.2")
	r.delete("old")
	r.wantProblem("", "")
	if owner() != "young" {
		t.Errorf("it is %s's", owner())
	}
}

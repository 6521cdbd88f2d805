package agent

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// testServices is a node that serves Services, of which it knows nothing yet.
func testServices(t *testing.T) *loop {
	t.Helper()
	l := testLoop(t)
	l.cfg.Services, l.cfg.ExternalIPs = ServicesOn, true
	restartServices(t, l)
	return l
}

// restartServices is what another agent begins with.
func restartServices(t *testing.T, l *loop) {
	t.Helper()
	c, err := newServices(l.node)
	must(t, err)
	l.services = c
}

// here is where the node is, without a look at it.
func here(held ...string) whereabouts {
	s := whereabouts{known: true}
	for _, a := range held {
		addr := netip.MustParseAddr(a)
		s.held = append(s.held, addr)
		if !addr.IsLoopback() {
			s.own = append(s.own, addr)
		}
	}
	return s
}

// webService is a Service of one port, with a slice of its endpoints.
func webService(i int, endpoints ...string) (service.Service, service.Slice) {
	name := service.Name{Namespace: "shop", Name: fmt.Sprintf("web-%d", i)}
	s := service.Service{
		Name: name, Created: time.Unix(int64(i), 0), ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})},
		Ports: []service.Port{{Name: "http", Protocol: wire.TCP, Port: 80}},
	}
	slice := service.Slice{
		Name: service.Name{Namespace: "shop", Name: name.Name + "-x"}, Service: name.Name,
		Ports: []service.SlicePort{{Name: "http", Protocol: wire.TCP, Port: 8080}},
	}
	for _, a := range endpoints {
		slice.Endpoints = append(slice.Endpoints, service.Endpoint{Address: netip.MustParseAddr(a), Ready: true, Serving: true, Node: "n2"})
	}
	return s, slice
}

// complete is all there is: each Service with its endpoints.
func complete(all ...[]string) service.Update {
	u := service.Update{Complete: true}
	for i, endpoints := range all {
		s, slice := webService(i+1, endpoints...)
		u.Services, u.Slices = append(u.Services, s), append(u.Slices, slice)
	}
	return u
}

// leadsTo is what packets find: the endpoints that a frontend leads to.
func leadsTo(t *testing.T, l *loop, address string, port uint16) []string {
	t.Helper()
	v, err := l.dp.Maps.Services.Get(services.Key{Address: wire.AddrFrom(netip.MustParseAddr(address)), Port: wire.PortFrom(port), Proto: wire.TCP})
	if err != nil {
		return nil
	}
	all := []string{}
	for _, b := range members(t, l, v.Set) {
		if b.Flags&backends.Serving == 0 || b.Set != v.Set {
			t.Errorf("%s:%d leads to %+v", address, port, b)
		}
		all = append(all, b.Address.With(b.Port))
	}
	slices.Sort(all)
	return all
}

// members are the backends that a set names for any node.
func members(t *testing.T, l *loop, number uint32) (all []backends.Value) {
	t.Helper()
	m := l.dp.Maps
	set, err := m.Sets.Get(services.SetKey{Set: number})
	must(t, err)
	for i := range set.Block.Cluster() {
		slot, err := m.Slots.Get(backends.SlotKey{Slot: set.Block.First() + i})
		must(t, err)
		b, err := m.Backends.Get(backends.Key(slot))
		must(t, err)
		all = append(all, b)
	}
	return all
}

func assertFound(t *testing.T, l *loop, address string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, leadsTo(t, l, address, 80)); diff != "" {
		t.Errorf("%s (-want +found):\n%s", address, diff)
	}
}

func readServices(t *testing.T, l *loop) service.Content {
	t.Helper()
	m := &serviceMaps{Maps: l.dp.Maps}
	c, err := m.readAll()
	must(t, err)
	c.Sets, c.Backends, c.Slots = c.Sets[:m.sets], c.Backends[:m.backends], c.Slots[:m.slots]
	return c
}

func TestServicesReachTheMaps(t *testing.T) {
	l := testServices(t)
	c := l.services
	ready := complete([]string{"10.244.2.7", "10.244.2.8"}, []string{})
	c.accept(service.Update{Services: ready.Services}) // not all there are
	c.place(here())
	if left := readServices(t, l); len(left.Services) > 0 {
		t.Errorf("written before all was known: %v", left.Services)
	}
	c.accept(ready)
	assertFound(t, l, "10.96.0.1", "10.244.2.7:8080", "10.244.2.8:8080")
	if got := leadsTo(t, l, "10.96.0.2", 80); got == nil || len(got) > 0 {
		t.Errorf("a Service without endpoints leads to %v, want a set of none", got)
	}
	s, slice := webService(1, "10.244.2.8", "10.244.2.9")
	c.accept(service.Update{Services: []service.Service{s}, Slices: []service.Slice{slice}, GoneServices: []service.Name{{Namespace: "shop", Name: "web-2"}}})
	assertFound(t, l, "10.96.0.1", "10.244.2.8:8080", "10.244.2.9:8080")
	if leadsTo(t, l, "10.96.0.2", 80) != nil {
		t.Error("a Service that is gone still has its frontend")
	}
	if r := c.read(); r.services != 1 || r.used.Services != 4 || r.used.Sets == 0 {
		t.Errorf("it says %+v", r) // two frontends of each Service, of which one's have just gone
	}
}

// What comes before the node has been looked at waits for that: its zone and its addresses decide on what is written.
func TestServicesWaitForTheLook(t *testing.T) {
	l := testServices(t)
	l.services.accept(complete([]string{"10.244.2.7"}, []string{"10.244.2.8"}))
	if left := readServices(t, l); len(left.Services) > 0 {
		t.Errorf("written before the node was looked at: %v", left.Services)
	}
	l.services.place(here("10.96.0.2"))
	assertFound(t, l, "10.96.0.1", "10.244.2.7:8080")
	if leadsTo(t, l, "10.96.0.2", 80) != nil {
		t.Error("a ClusterIP that the node holds is translated")
	}
	l.services.place(here())
	assertFound(t, l, "10.96.0.2", "10.244.2.8:8080")
}

func TestRestartedServicesKeepTheirNumbers(t *testing.T) {
	l := testServices(t)
	state := complete([]string{"10.244.2.7", "10.244.2.8"}, []string{"10.244.2.9"}, []string{})
	l.services.place(here())
	l.services.accept(state)
	before := readServices(t, l)
	restartServices(t, l)
	if !l.services.read().filled {
		t.Error("what a former agent has left does not count")
	}
	l.services.place(here())
	slices.Reverse(state.Services)
	l.services.accept(state)
	if diff := cmp.Diff(before, readServices(t, l), cmp.AllowUnexported(services.Key{}, services.Set{}, services.ServiceName{})); diff != "" {
		t.Errorf("a restart changed the maps (-before +after):\n%s", diff)
	}
	// What has gone meanwhile goes with the first complete lists.
	restartServices(t, l)
	l.services.place(here())
	l.services.accept(complete([]string{"10.244.2.7"}))
	assertFound(t, l, "10.96.0.1", "10.244.2.7:8080")
	if leadsTo(t, l, "10.96.0.2", 80) != nil {
		t.Error("a Service that has gone while there was no agent still has its frontend")
	}
}

func TestServicesAreRestored(t *testing.T) {
	l := testServices(t)
	l.services.place(here())
	l.services.accept(complete([]string{"10.244.2.7", "10.244.2.8"}, []string{"10.244.2.9"}))
	want := readServices(t, l)
	m := l.dp.Maps
	for k := range want.Services {
		must(t, m.Services.Delete(k))
	}
	strange := services.Key{Address: wire.AddrFrom(netip.MustParseAddr("10.96.0.99")), Port: wire.PortFrom(1), Proto: wire.TCP}
	must(t, m.Services.Put(strange, services.Value{Set: 1}))
	must(t, m.Backends.Put(backends.Key{Backend: 1}, backends.Value{}))
	must(t, m.Slots.Put(backends.SlotKey{}, backends.Slot{Backend: 77}))
	l.services.again() // too early
	if leadsTo(t, l, "10.96.0.1", 80) != nil {
		t.Error("the maps are read all the time")
	}
	l.services.compared = time.Now().Add(-resync)
	if due := l.services.due(); time.Until(due) > 0 {
		t.Errorf("the maps are compared %v from now", time.Until(due))
	}
	l.services.again()
	if diff := cmp.Diff(want, readServices(t, l), cmp.AllowUnexported(services.Key{}, services.Set{}, services.ServiceName{})); diff != "" {
		t.Errorf("(-want +restored):\n%s", diff)
	}
	if n := sampleOf(t, l, "repairs_total", repairedService); n < 7 {
		t.Errorf("%v repairs are counted", n)
	}
}

// A map that has no room refuses the new Service by name, and leaves the others as they are.
func TestServicesThatDoNotFit(t *testing.T) {
	l := testServices(t)
	l.dp.Maps.Services = small(t, l.dp.Maps.Services, services.Name, 4) // an entry for the address, one for the port
	restartServices(t, l)
	said := logged(l)
	l.services.place(here())
	l.services.accept(complete([]string{"10.244.2.7"}, []string{"10.244.2.8"}, []string{"10.244.2.9"}))
	assertFound(t, l, "10.96.0.1", "10.244.2.7:8080")
	assertFound(t, l, "10.96.0.2", "10.244.2.8:8080")
	if leadsTo(t, l, "10.96.0.3", 80) != nil {
		t.Error("the third is served")
	}
	ready(t, l)
	told := l.readTold(t)
	if len(told.ServiceProblems) != 1 || told.ServiceProblems[0].Service != "shop/web-3" || told.ServiceProblems[0].Reason != "full" {
		t.Errorf("ebpfctl is told %+v", told.ServiceProblems)
	}
	if !slices.ContainsFunc(told.Degraded, func(d observe.Degraded) bool { return d.About == "services/room" }) {
		t.Errorf("degraded: %v", told.Degraded)
	}
	if strings.Count(said.String(), "problem with a Service") != 1 || !strings.Contains(said.String(), "shop/web-3") {
		t.Errorf("the log says\n%s", said)
	}
	if n := sampleOf(t, l, "service_problems", "full"); n != 1 {
		t.Errorf("%v problems in the metric", n)
	}
	l.services.accept(service.Update{GoneServices: []service.Name{{Namespace: "shop", Name: "web-1"}}})
	if due := time.Until(l.services.due()); due > service.Grace {
		t.Errorf("what was refused is tried again %v from now", due)
	}
	time.Sleep(time.Until(l.services.due()))
	l.services.again()
	assertFound(t, l, "10.96.0.3", "10.244.2.9:8080")
	l.judge()
	if told := l.readTold(t); len(told.ServiceProblems)+len(told.Degraded) != 0 {
		t.Errorf("with room ebpfctl is told %+v", told)
	}
}

// A write that fails is carried out as soon as it can be, with all that has come since.
func TestServicesThatCannotBeWritten(t *testing.T) {
	l := testServices(t)
	l.services.place(here())
	l.accept(list(n1(), n2()))
	l.pass(t.Context())
	if why := l.status.reason(); why == "" {
		t.Error("ready, though nothing is known of Services")
	}
	room := l.dp.Maps.Services
	l.dp.Maps.Services = small(t, room, services.Name, 1)
	l.services.accept(complete([]string{"10.244.2.7"}))
	if r := l.services.read(); r.filled || !l.services.failed {
		t.Errorf("it says %+v", r)
	}
	if due := time.Until(l.services.due()); due > retry {
		t.Errorf("tried again after %v", due)
	}
	if l.judge(); !strings.Contains(l.status.reason(), "write the maps of Services") {
		t.Errorf("not ready because %q", l.status.reason())
	}
	l.services.again()
	compared := l.services.compared
	s, slice := webService(2, "10.244.2.8")
	l.services.accept(service.Update{Services: []service.Service{s}, Slices: []service.Slice{slice}})
	if l.services.compared != compared {
		t.Error("with each change all is compared with the maps")
	}
	l.dp.Maps.Services = room
	l.services.again()
	assertFound(t, l, "10.96.0.1", "10.244.2.7:8080")
	assertFound(t, l, "10.96.0.2", "10.244.2.8:8080")
	if r := l.services.read(); !r.filled || l.services.failed {
		t.Errorf("it says %+v", r)
	}
}

func TestAgentWithoutServicesRemovesThem(t *testing.T) {
	l := testServices(t)
	l.services.place(here())
	l.services.accept(complete([]string{"10.244.2.7"}))
	before := readServices(t, l)
	names := l.dp.Maps.SetNames
	l.dp.Maps.SetNames = small(t, names, services.NamesName, 8)
	for k, v := range before.Names {
		must(t, l.dp.Maps.SetNames.Put(k, v))
	}
	must(t, l.dp.Maps.SetNames.Freeze())
	if emptyServices(l.dp.Maps) == nil {
		t.Error("nothing failed")
	}
	l.dp.Maps.SetNames = names
	must(t, emptyServices(l.dp.Maps)) // which goes on where the last one had to end
	left := readServices(t, l)
	if len(left.Services)+len(left.Names) > 0 || slices.ContainsFunc(left.Sets, func(s services.Set) bool { return s != services.Set{} }) {
		t.Errorf("left: %v, %v", left.Services, slices.Collect(maps.Keys(left.Names)))
	}
	for i, b := range left.Backends {
		if was := before.Backends[i]; b.Set != 0 || was.Set != 0 && b.Generation == was.Generation {
			t.Errorf("backend %d is %+v, was %+v: a flow of it would go on with whoever gets the number", i, b, was)
		}
	}
	if _, err := l.dp.Maps.Devices.Get(devices.Key{Ifindex: devices.World}); !errors.Is(err, typed.ErrKeyNotExist) {
		t.Errorf("the world's entry: %v", err)
	}
	must(t, emptyServices(l.dp.Maps)) // nothing to do
}

// One endpoint's change takes few system calls, one for each list.
func TestOneEndpointTakesFewCalls(t *testing.T) {
	l := testServices(t)
	l.services.place(here())
	l.services.accept(complete([]string{"10.244.2.7", "10.244.2.8"}, []string{}))
	for _, endpoints := range [][]string{{"10.244.2.7"}, {"10.244.2.7", "10.244.2.9"}, {}, {"10.244.2.5"}} {
		s, slice := webService(1, endpoints...)
		changed := l.services.model.Apply(service.Update{Services: []service.Service{s}, Slices: []service.Slice{slice}})
		w := l.services.state.Plan(l.services.model, changed, time.Now())
		calls := 0
		for _, n := range []int{
			len(w.Backends.Keys), len(w.Slots.Keys), len(w.Sets.Keys), len(w.Names.Keys), len(w.Services.Keys),
			len(w.GoneServices), len(w.GoneNames), len(w.EmptiedSets.Keys), len(w.Retired.Keys),
		} {
			calls += min(n, 1)
		}
		if calls == 0 || calls > 4 {
			t.Errorf("%v: %d system calls", endpoints, calls)
		}
		l.services.write(w)
	}
}

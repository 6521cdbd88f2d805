package service

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// A full map refuses a new Service by name, leaves the others, and has room when one has gone.
func TestFullMaps(t *testing.T) {
	for name, c := range map[string]Capacities{
		"services": {Services: 5, Sets: 16, Backends: 16, Slots: 16},
		"sets":     {Services: 16, Sets: 3, Backends: 16, Slots: 16},
		"backends": {Services: 16, Sets: 16, Backends: 6, Slots: 16},
		"slots":    {Services: 16, Sets: 16, Backends: 16, Slots: 5},
	} {
		t.Run(name, func(t *testing.T) {
			r := quiet(t, c)
			r.put("a", "10.96.0.1", "10.0.0.1", "10.0.0.2")
			r.put("b", "10.96.0.2", "10.0.0.3", "10.0.0.4")
			r.wantProblem("", "")
			if w := r.put("c", "10.96.0.3", "10.0.0.5", "10.0.0.6"); w.lists() > 0 {
				t.Errorf("something of the new Service is written: %+v", w)
			}
			r.wantProblem("c", Full, "map "+name+" has no room")
			r.want("10.96.0.1", "10.0.0.1", "10.0.0.2")
			r.want("10.96.0.2", "10.0.0.3", "10.0.0.4")
			if again := r.state.Again(); !again.IsZero() {
				t.Errorf("nothing has gone, and a Plan is asked for at %v", again)
			}

			r.delete("a")
			r.want("10.96.0.3")
			if again := r.state.Again(); again != r.now.Add(Grace) {
				t.Errorf("a Plan is asked for at %v, want %v", again, r.now.Add(Grace))
			}
			r.wait(Grace - time.Millisecond)
			r.want("10.96.0.3")
			r.wait(time.Millisecond)
			r.want("10.96.0.3", "10.0.0.5", "10.0.0.6")
			r.wantProblem("", "")
			if again := r.state.Again(); !again.IsZero() {
				t.Errorf("all is served, and a Plan is asked for at %v", again)
			}
		})
	}
}

// Where Services fill the map from the start, as after a reboot, NodePorts answer all the same.
func TestFullMapHasTheNodesAddresses(t *testing.T) {
	r := quiet(t, Capacities{Services: 5, Sets: 16, Backends: 16, Slots: 16})
	own := netip.MustParseAddr("192.0.2.1")
	r.options.NodeAddresses = map[netip.Addr]bool{own: true}
	r.state.Configure(r.options, r.model)
	service, slice := web(t, "a", "10.96.0.1", "10.0.0.1")
	service.Ports[0].NodePort = 30080
	second, seconds := web(t, "b", "10.96.0.2", "10.0.0.2")
	r.update(Update{Services: []Service{service, second}, Slices: []Slice{slice, seconds}})
	if v := r.kernel.Services[services.Key{Address: wire.AddrFrom(own)}]; v.Flags&services.Node == 0 {
		t.Errorf("the node's address has %v", r.kernel.Services)
	}
	r.want("10.96.0.1", "10.0.0.1")
	r.wantProblem("b", Full, "map services has no room")
}

// A Service that is there loses what has gone at once, even if nothing can come in its place yet.
func TestFullMapsLoseWhatHasGone(t *testing.T) {
	t.Run("backends", func(t *testing.T) {
		r := quiet(t, Capacities{Services: 16, Sets: 16, Backends: 4, Slots: 64})
		r.put("a", "10.96.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.3")
		r.put("a", "10.96.0.1", "10.0.0.1", "10.0.0.4", "10.0.0.5")
		r.want("10.96.0.1", "10.0.0.1")
		r.wantProblem("a", Full, "map backends has no room", "some endpoints of port 80")
		r.wait(Grace)
		r.want("10.96.0.1", "10.0.0.1", "10.0.0.4", "10.0.0.5")
		r.wantProblem("", "")
	})
	t.Run("both", func(t *testing.T) {
		r := quiet(t, Capacities{Services: 16, Sets: 16, Backends: 2, Slots: 2})
		service, slice := web(t, "a", "10.96.0.1", "10.0.0.1 @n0")
		service.InternalLocal = true
		r.update(Update{Services: []Service{service}, Slices: []Slice{slice}})
		r.want("10.96.0.1", "10.0.0.1")
		slice.Endpoints = []Endpoint{ep(t, "10.0.0.1 @n0 leaving"), ep(t, "10.0.0.2 @n1")}
		r.update(Update{Slices: []Slice{slice}})
		r.want("10.96.0.1", []string{}...)
	})
	t.Run("slots", func(t *testing.T) {
		r := quiet(t, Capacities{Services: 16, Sets: 16, Backends: 64, Slots: 4})
		r.put("a", "10.96.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.3")
		r.put("a", "10.96.0.1", "10.0.0.1", "10.0.0.4")
		r.want("10.96.0.1", "10.0.0.1", "10.0.0.4")
		r.wantProblem("a", Full, "map slots has no room")
		r.put("a", "10.96.0.1", "10.0.0.4 dead")
		r.want("10.96.0.1", []string{}...)
	})
}

// A Service that is there keeps its ports when a new one does not fit.
func TestFullMapRefusesPort(t *testing.T) {
	r := quiet(t, Capacities{Services: 16, Sets: 2, Backends: 16, Slots: 16})
	service, slice := web(t, "a", "10.96.0.1", "10.0.0.1")
	r.update(Update{Services: []Service{service}, Slices: []Slice{slice}})
	service.Ports = append(service.Ports, Port{Name: "more", Protocol: service.Ports[0].Protocol, Port: 81})
	r.update(Update{Services: []Service{service}})
	r.want("10.96.0.1", "10.0.0.1")
	r.wantProblem("a", Full, "map sets has no room", "port 81 is not served")
}

// A frontend that goes from one Service to another takes no room, even where there is none.
func TestFullMapsPassFrontendsOn(t *testing.T) {
	for name, c := range map[string]struct {
		capacity uint32
		new      bool
	}{"none": {4, false}, "for one more": {6, true}} {
		t.Run(name, func(t *testing.T) {
			r := quiet(t, Capacities{Services: c.capacity, Sets: 16, Backends: 16, Slots: 16})
			r.put("old", "10.96.0.1", "10.0.0.1")
			service, slice := web(t, "young", "10.96.0.1", "10.0.0.2")
			service.Created = service.Created.Add(time.Hour)
			service.ClusterIPs = append(service.ClusterIPs, addrs("10.96.0.2")...)
			r.update(Update{Services: []Service{service}, Slices: []Slice{slice}})
			r.wantProblem("young", Taken)
			u := Update{GoneServices: []Name{{"ns", "old"}}}
			if c.new {
				other, _ := web(t, "youngest", "10.96.0.3")
				other.Created = service.Created.Add(time.Hour)
				u.Services = append(u.Services, other)
			}
			r.update(u)
			r.want("10.96.0.1", "10.0.0.2")
			r.wantProblem("", "")
		})
	}
}

// Where others change all the time something becomes free all the time. Those that wait for room are not all tried with each
// change, and have it soon all the same.
func TestFullMapsUnderChanges(t *testing.T) {
	r := quiet(t, Capacities{Services: 64, Sets: 16, Backends: 12, Slots: 64})
	r.put("busy", "10.96.0.1", "10.0.0.1", "10.0.0.2")
	r.put("old", "10.96.0.2", "10.0.1.1", "10.0.1.2", "10.0.1.3")
	r.put("waiting", "10.96.0.3", "10.0.2.1", "10.0.2.2", "10.0.2.3", "10.0.2.4", "10.0.2.5", "10.0.2.6", "10.0.2.7")
	r.wantProblem("waiting", Full)
	change := func(i int) {
		r.now = r.now.Add(Grace / 4)
		r.put("busy", "10.96.0.1", "10.0.0.1", fmt.Sprintf("10.0.0.%d", 2+i%2))
	}
	tries, last := 0, r.state.tried
	for i := range 40 {
		if change(i); r.state.tried != last {
			tries, last = tries+1, r.state.tried
		}
	}
	if tries < 9 || tries > 11 {
		t.Errorf("in ten times Grace what waits is tried %d times", tries)
	}
	r.put("waiting", "10.96.0.3", "10.0.2.1", "10.0.2.2", "10.0.2.3", "10.0.2.4")
	r.delete("old")
	for i := range 8 {
		change(i)
	}
	r.want("10.96.0.3", "10.0.2.1", "10.0.2.2", "10.0.2.3", "10.0.2.4")
}

func TestBuddies(t *testing.T) {
	for _, slots := range []uint32{1, 5, 64, 100, 1000} {
		b := newBuddies(slots)
		var all []extent
		taken := map[uint32]bool{}
		for order := int8(4); order >= 0; order-- {
			for e, ok := b.take(order); ok; e, ok = b.take(order) {
				all = append(all, e)
				for i := e.first; i < e.first+1<<e.order; i++ {
					if taken[i] || i >= slots {
						t.Fatalf("of %d slots, %d is given twice or is none", slots, i)
					}
					taken[i] = true
				}
			}
		}
		if len(taken) != int(slots) {
			t.Errorf("of %d slots %d can be had", slots, len(taken))
		}
		for _, e := range all {
			b.put(e)
		}
		whole := newBuddies(slots)
		for order, n := range whole.count {
			if b.count[order] != n {
				t.Errorf("%d slots: %d extents of order %d after all came back, want %d", slots, b.count[order], order, n)
			}
		}
		for _, e := range all {
			if !b.reserve(e) || b.reserve(e) {
				t.Fatalf("%d slots: %v can't be reserved, or twice", slots, e)
			}
		}
		if _, ok := b.take(0); ok {
			t.Errorf("%d slots: there is one more", slots)
		}
	}
	if newBuddies(64).reserve(extent{3, 2}) {
		t.Error("an extent is reserved that is none")
	}
}

// A large Service whose endpoints change many times a second needs a new block each time, and those that it leaves are free only
// after Grace. That is no lack of room: for that long its newest endpoints wait, and nobody is told.
func TestRoomThatIsAboutToBeFree(t *testing.T) {
	r := quiet(t, Capacities{Services: 64, Sets: 8, Backends: 64, Slots: 32})
	var all []string
	for i := range 8 {
		all = append(all, fmt.Sprintf("10.244.0.%d", 1+i))
	}
	for i := range all {
		r.put("large", "10.96.0.1", slices.Delete(slices.Clone(all), i, i+1)...)
		if slices.Contains(r.find("10.96.0.1"), all[i]) {
			t.Errorf("%s has gone and still gets connections", all[i])
		}
		r.wantProblem("", "")
	}
	if again := r.state.Again(); again.Sub(r.now) > Grace {
		t.Errorf("tried again at %v, %v from now", again, again.Sub(r.now))
	}
	r.wait(Grace)
	r.want("10.96.0.1", all[:7]...)
	r.put("large", "10.96.0.1", all[:4]...)
	r.wait(Grace)
	r.put("other", "10.96.0.2", "10.244.1.1", "10.244.1.2", "10.244.1.3", "10.244.1.4", "10.244.1.5", "10.244.1.6", "10.244.1.7", "10.244.1.8", "10.244.1.9")
	r.put("large", "10.96.0.1", all...)
	r.put("large", "10.96.0.1", append(slices.Clone(all), "10.244.0.9")...)
	r.wait(Grace)
	r.wait(Grace)
	r.wantProblem("large", Full, "slots") // this is one
}

// Ranges that find no room keep who is in them out, and nobody in, until there is.
func TestFullRanges(t *testing.T) {
	r := quiet(t, Capacities{Services: 16, Ranges: 2, Sets: 16, Backends: 16, Slots: 16})
	put := func(name, address string, ranges ...netip.Prefix) {
		service, slice := web(t, name, map[string]string{"a": "10.96.0.1", "b": "10.96.0.2"}[name], "10.0.0.1")
		service.LoadBalancerIPs, service.SourceRanges = addrs(address), ranges
		r.update(Update{Services: []Service{service}, Slices: []Slice{slice}})
	}
	asks := func(address string) []string {
		return r.kernel.rangesOf(r.kernel.Services[services.Key{Address: wire.AddrFrom(addrs(address)[0]), Port: wire.PortFrom(80), Proto: wire.TCP}])
	}
	put("a", "192.0.2.1", prefixes("198.51.100.0/24")...)
	put("b", "192.0.2.2", prefixes("198.51.100.0/24", "203.0.113.0/24")...)
	r.wantProblem("b", Full, "map source_range has no room", "1 of the loadBalancerSourceRanges", "fewer ranges")
	if got := asks("192.0.2.2"); !slices.Equal(got, []string{"198.51.100.0/24"}) {
		t.Errorf("%v may ask", got)
	}
	put("a", "192.0.2.1")
	r.wait(Grace)
	if got := asks("192.0.2.2"); len(got) != 2 {
		t.Errorf("%v may ask", got)
	}
	r.wantProblem("", "")
}

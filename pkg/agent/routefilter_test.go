package agent

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"reflect"
	"runtime"
	"slices"
	"testing"

	"github.com/gaissmai/bart"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// routed is a node with several links, addresses and tables, and other nodes.
type routed struct {
	view   *view
	cfg    Config
	nodes  []plan.Node
	before plan.Standing
}

func newRouted() *routed {
	v := &view{used: plan.FamilySet{true, true}, links: map[int]device.Link{}, podRoutes: map[int][]device.Route{}}
	for _, l := range []device.Link{
		{Index: 1, Name: "lo", Flags: net.FlagLoopback | net.FlagUp}, {Index: 2, Name: "eth0", MTU: 1500}, {Index: 3, Name: "eth1", MTU: 9000},
		{Index: 4, Name: "tun0", MTU: 1400}, {Index: 5, Name: endpoint.ID{ContainerID: "a", IfName: "eth0"}.HostLinkName(), MTU: 1500}, {Index: 6, Name: "eth2", MTU: 1400},
	} {
		if l.Index != 4 {
			l.MAC = net.HardwareAddr{2, 0, 0, 0, 0, byte(l.Index)}
		}
		v.links[l.Index] = l
	}
	for index, prefixes := range map[int][]string{2: {"172.18.0.11/24", "2001:db8::11/64"}, 3: {"192.168.0.11/24", "192.168.1.11/24", "fd00::11/64", "2001:db8:1::11/64"}, 6: {"198.51.100.11/24"}} {
		for _, p := range prefixes {
			v.addresses = append(v.addresses, device.Address{Index: index, Prefix: netip.MustParsePrefix(p)})
		}
	}
	for _, a := range v.addresses {
		v.local = append(v.local, netip.PrefixFrom(a.Prefix.Addr(), a.Prefix.Addr().BitLen()))
	}
	v.rules = []device.Rule{{Table: unix.RT_TABLE_MAIN}, {Table: 77}, {Table: 78, From: netip.MustParsePrefix("192.168.0.0/16")}}
	r := &routed{view: v, cfg: Config{Node: "n1", RoutingMode: plan.RouteAuto, NonMasquerade: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/11")}}}
	for i := range 5 {
		r.nodes = append(r.nodes, plan.Node{
			Name: fmt.Sprintf("n%d", i+1), PodCIDRs: []string{fmt.Sprintf("10.244.%d.0/24", i+1), fmt.Sprintf("fd00:%d::/64", i+1)},
			InternalIPs: []string{[]string{"172.18.0.11", "172.18.0.12", "192.168.0.13", "203.0.113.14", "198.51.100.15"}[i], fmt.Sprintf("2001:db8::1%d", i+1)},
		})
	}
	return r
}

// randomRoutes are in the kernel's order of IPv4 or in another one, close to what the plan asks about and nested in one another.
func randomRoutes(random *rand.Rand, number int, sourced bool) (all []device.Route) {
	near := []string{"10.244.2.0/24", "172.18.0.0/24", "192.168.0.0/24", "203.0.113.0/24", "198.51.100.0/24", "10.1.0.0/16", "8.0.0.0/8", "2001:db8::/32", "fd00:2::/64", "2a00::/16"}
	gateways := []string{"", "172.18.0.1", "192.168.0.1", "192.168.1.1", "172.18.0.200", "10.244.3.7", "198.51.100.1"}
	sources := []string{"", "", "172.18.0.11", "192.168.1.11"}
	for range number {
		p := netip.MustParsePrefix(near[random.IntN(len(near))])
		b := p.Addr().AsSlice()
		low := max(1, p.Bits()-4)
		for i := low / 8; i < min(len(b), p.Bits()/8+2); i++ {
			b[i] ^= byte(random.Uint32() & random.Uint32() & random.Uint32())
		}
		addr, _ := netip.AddrFromSlice(b)
		dst := netip.PrefixFrom(addr, min(addr.BitLen(), low+random.IntN(14))).Masked()
		if random.IntN(60) == 0 {
			dst = netip.PrefixFrom(addr, 0).Masked()
		}
		r := device.Route{Dst: dst, Index: []int{2, 2, 2, 3, 3, 4, 6, 5}[random.IntN(8)], Protocol: []int{2, 4, 186, 186, 9}[random.IntN(5)], Table: []int{0, 0, 0, 77, 78}[random.IntN(5)], Priority: random.IntN(3)}
		if dst.Addr().Is4() {
			r.Gateway, _ = netip.ParseAddr(gateways[random.IntN(len(gateways))])
			if sourced {
				r.Source, _ = netip.ParseAddr(sources[random.IntN(len(sources))])
			}
		} else if sourced && random.IntN(3) == 0 {
			r.Source = netip.MustParseAddr("fd00::11")
		}
		switch random.IntN(30) {
		case 0:
			r.Hops, r.HopGateways, r.Index, r.Gateway = []int{2, 3}, []netip.Addr{r.Gateway, {}}, 0, netip.Addr{}
		case 1:
			r.Unreachable, r.Index, r.Gateway = true, 0, netip.Addr{}
		case 2:
			r.MTU = 1300
		}
		all = append(all, r)
	}
	slices.SortStableFunc(all, func(a, b device.Route) int { // main first, by family, a destination's best first
		if a.Table != b.Table {
			return a.Table - b.Table
		}
		if a.Dst != b.Dst {
			return a.Dst.Compare(b.Dst)
		}
		return a.Priority - b.Priority
	})
	return all
}

// conclude is all that follows from routes.
func (r *routed) conclude(routes []device.Route) (all map[string]any) {
	v := *r.view
	v.routes, v.others = nil, nil
	for _, route := range routes {
		if route.Table == 0 {
			v.routes = append(v.routes, route)
		} else {
			v.others = append(v.others, route)
		}
	}
	v.findExits(r.cfg)
	v.uplinks = v.findUplinks(nil, nil)
	numbers{}.give(v.uplinks)
	made := plan.Make(plan.Input{Self: "n1", Mode: r.cfg.RoutingMode, Known: true, Nodes: r.nodes, Facts: v.facts(), Before: r.before, Native: r.cfg.NonMasquerade})
	foreign := map[string]int{}
	have := v.foreignRoutes()
	for _, p := range made.Routes {
		foreign[p.Dst.String()] = have[p.Dst]
	}
	s := &state{view: &v, plan: made}
	return map[string]any{
		"plan": made, "exits": v.exits, "uplinks": v.uplinks, "stack": v.stackRoutes() != "", "foreign": foreign, "host links": v.hostLinks(), "needed": s.neededUplinks(),
	}
}

// filter reads the routes as if few were many.
func (r *routed) filter(t *testing.T, routes []device.Route) *routeFilter {
	t.Helper()
	asked := func() *bart.Lite { return plan.AskedAbout(r.nodes, r.before, r.cfg.NonMasquerade) }
	f, err := filterRoutes(0, asked, r.cfg.NonMasquerade, newRouteSources(r.view, r.cfg, nil), func(take func(device.Route)) error {
		for _, route := range routes {
			take(route)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

var routesAlike = cmp.Options{
	cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}), cmp.Exporter(func(reflect.Type) bool { return true }), cmpopts.EquateEmpty(),
}

// Nothing that follows from routes changes when those are left out that decide on nothing.
func TestSameConclusionsFromFilteredRoutes(t *testing.T) {
	left, seeds := 0, uint64(100)
	if priv.Long() {
		seeds = 2000
	}
	for seed := range seeds {
		random := rand.New(rand.NewPCG(seed, 0))
		r := newRouted()
		routes := randomRoutes(random, 1+random.IntN(400), seed%3 == 0)
		f := r.filter(t, routes)
		left += len(routes) - len(f.kept)
		if diff := cmp.Diff(r.conclude(routes), r.conclude(f.kept), routesAlike); diff != "" {
			t.Fatalf("seed %d: %d of %d routes kept, -all +kept:\n%s", seed, len(f.kept), len(routes), diff)
		}
	}
	if left == 0 {
		t.Error("no route was ever left out")
	}
}

// A route that decides on nothing takes no memory.
func TestManyRoutesTakeNoMemory(t *testing.T) {
	const number = 200_000
	r := newRouted()
	gateway := netip.MustParseAddr("172.18.0.1")
	allocated := func() uint64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.TotalAlloc
	}
	before := allocated()
	asked := func() *bart.Lite { return plan.AskedAbout(r.nodes, r.before, r.cfg.NonMasquerade) }
	f, err := filterRoutes(fewRoutes, asked, r.cfg.NonMasquerade, newRouteSources(r.view, r.cfg, nil), func(take func(device.Route)) error {
		take(device.Route{Dst: netip.MustParsePrefix("0.0.0.0/0"), Index: 2, Gateway: gateway, Protocol: 3})
		for i := range number {
			take(device.Route{Dst: netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(20 + i>>16), byte(i >> 8), byte(i), 0}), 24), Index: 2, Gateway: gateway, Protocol: 186})
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if each := (allocated() - before) / number; each > 64 || len(f.kept) > 100 {
		t.Errorf("%d bytes allocated for each of %d routes, %d kept", each, number, len(f.kept))
	}
}

// Changes of one of very many routes call for no pass, unless they may decide on something.
func TestManyRoutesChange(t *testing.T) {
	r := newRouted()
	gateway := netip.MustParseAddr("172.18.0.1")
	routes := []device.Route{{Dst: netip.MustParsePrefix("0.0.0.0/0"), Index: 2, Gateway: gateway, Protocol: 3}}
	for i := range 3000 {
		routes = append(routes, device.Route{Dst: netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(i >> 8), byte(i), 0}), 24), Index: 2, Gateway: gateway, Protocol: 186})
	}
	f := r.filter(t, routes)
	v := *r.view
	v.routes, v.many = f.kept, f
	v.uplinks = v.findUplinks(nil, nil)
	o := newOutline(&v, newIntent(plan.Result{}), true, func(endpoint.ID) bool { return false })
	event := func(dst string, change ...func(*device.Route)) device.Event {
		e := device.Event{Kind: device.RouteEvent, Route: device.Route{Dst: netip.MustParsePrefix(dst), Index: 2, Gateway: gateway, Protocol: 186}}
		for _, c := range change {
			c(&e.Route)
		}
		return e
	}
	for what, tt := range map[string]struct {
		event device.Event
		want  trigger
	}{
		"one more":                   {event("30.0.0.0/24"), 0},
		"by another gateway":         {event("30.0.0.0/24", func(r *device.Route) { r.Gateway = netip.MustParseAddr("172.18.0.9") }), 0},
		"to one address":             {event("30.0.0.1/32"), 0},
		"unreachable":                {event("30.0.0.0/24", func(r *device.Route) { r.Index, r.Unreachable = 0, true }), 0},
		"the default route":          {event("0.0.0.0/0"), urgent},
		"around a node's address":    {event("172.18.0.0/28"), casual},
		"in a podCIDR":               {event("10.244.2.128/25"), casual},
		"in a native prefix":         {event("10.1.0.0/16"), casual},
		"by a gateway in a podCIDR":  {event("30.0.0.0/24", func(r *device.Route) { r.Gateway = netip.MustParseAddr("10.244.2.1") }), casual},
		"with another source":        {event("30.0.0.0/24", func(r *device.Route) { r.Source = netip.MustParseAddr("192.168.0.11") }), casual},
		"for a TOS value":            {event("30.0.0.0/24", func(r *device.Route) { r.TOS = 8 }), casual},
		"over a link without routes": {event("30.0.0.0/24", func(r *device.Route) { r.Index = 6 }), urgent},
		"in a table without routes":  {event("30.0.0.0/24", func(r *device.Route) { r.Table = 77; r.Index = 3 }), casual},
		"events lost":                {device.Event{}, lost | ofPods},
	} {
		if got := o.weigh(tt.event); got != tt.want {
			t.Errorf("%s: %b, want %b", what, got, tt.want)
		}
	}
	ignored := 0
	for range 3000 {
		e := event("20.0.0.0/24")
		e.Gone = true
		if o.weigh(e) == 0 {
			ignored++
		}
	}
	if ignored == 0 || ignored > 1600 {
		t.Errorf("%d deleted routes of 3000 are ignored", ignored)
	}
	if f.covers(plan.AskedAbout(append(r.nodes, plan.Node{InternalIPs: []string{"203.0.113.99"}}), r.before, nil)) {
		t.Error("a new Node's address is covered")
	}
}

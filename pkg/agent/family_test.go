package agent

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// families are the clusters that there are by family, in the order of the Nodes' podCIDRs.
var families = map[string][]wire.Family{"IPv4": {wire.IPv4}, "IPv6": {wire.IPv6}, "dual": {wire.IPv4, wire.IPv6}, "dual, IPv6 first": {wire.IPv6, wire.IPv4}}

// nodeIn is node number i of a cluster of those families.
func nodeIn(i int, families []wire.Family) plan.Node {
	n := plan.Node{Name: fmt.Sprintf("n%d", i)}
	for _, f := range families {
		n.PodCIDRs = append(n.PodCIDRs, podsOf(i, f).String())
		n.InternalIPs = append(n.InternalIPs, [wire.Families]string{fmt.Sprintf("172.18.0.1%d", i), fmt.Sprintf("fd00:172:18::1%d", i)}[f])
	}
	return n
}

func podsOf(i int, f wire.Family) netip.Prefix {
	return netip.MustParsePrefix([wire.Families]string{fmt.Sprintf("10.244.%d.0/24", i), fmt.Sprintf("fd00:10:244:%d::/64", i)}[f])
}

// addSecondAddress gives the uplink an address of IPv6 besides. The kernel takes it into its local table a moment later.
func addSecondAddress(t *testing.T, l *loop) device.Link {
	t.Helper()
	link, err := l.host.LinkByName("uplink")
	must(t, err)
	must(t, l.host.WaitRunning(t.Context(), link.Index))
	must(t, l.host.AddAddress(link.Index, netip.MustParsePrefix("fd00:172:18::11/64")))
	for end := time.Now().Add(priv.Patience(5 * time.Second)); time.Now().Before(end); time.Sleep(time.Millisecond) {
		local, _, err := l.host.LocalTable(device.IPv6)
		must(t, err)
		if slices.Contains(local, netip.MustParsePrefix("fd00:172:18::11/128")) {
			return link
		}
	}
	t.Fatal("the address does not become the host's")
	return link
}

// inFamilies is a node whose uplink has an address of each family, in a cluster of some.
func inFamilies(t *testing.T, mode RoutingMode, families []wire.Family) *loop {
	t.Helper()
	l := testLoop(t)
	l.cfg.RoutingMode = mode
	addSecondAddress(t, l)
	l.accept(list(nodeIn(1, families), nodeIn(2, families)))
	l.pass(t.Context())
	return l
}

// assertFamily checks what the node has of one family: this node's record, the way to the other's pods, its addresses, the tunnel.
func assertFamily(t *testing.T, l *loop, f wire.Family, way destinations.Way, has bool) {
	t.Helper()
	c, err := l.dp.Maps.Config.Get(config.Key{})
	must(t, err)
	own, other := podsOf(1, f), podsOf(2, f)
	if (c.PodCIDR(f) == own) != has || (c.Tunnel[f].Address == wire.AddrFrom(own.Addr())) != has {
		t.Errorf("%s: config %+v", f.Name(), c)
	}
	if v, _ := l.destination(t, other.String()); has && v.Way() != way || !has && v.Kind != destinations.World {
		t.Errorf("%s: the other node's pods are reached %s, want %s", f.Name(), v.Way(), way)
	}
	for _, p := range []netip.Prefix{own, other} {
		if there := l.route(t, p.String()); there != has {
			t.Errorf("%s: a route to %s: %v", f.Name(), p, there)
		}
	}
	link, err := l.host.LinkByName("uplink")
	must(t, err)
	entry, err := l.dp.Maps.Uplinks.Get(uplinks.Key{Ifindex: uint32(link.Index)})
	must(t, err)
	want := netip.MustParseAddr([wire.Families]string{"172.18.0.11", "fd00:172:18::11"}[f])
	if has && entry.Addresses[f].Netip() != want {
		t.Errorf("%s: masqueraded to %s, want %s", f.Name(), entry.Addresses[f], want)
	}
	if v, _ := l.destination(t, netip.PrefixFrom(want, want.BitLen()).String()); has && v.Kind != destinations.Host {
		t.Errorf("%s: the node's address is %s", f.Name(), v.Kind)
	}
	addresses, err := l.host.Addresses()
	must(t, err)
	onTunnel := slices.ContainsFunc(addresses, func(a device.Address) bool {
		return a.Index == l.tunnel.index && a.Prefix == netip.PrefixFrom(own.Addr(), own.Addr().BitLen())
	})
	if onTunnel != has {
		t.Errorf("%s: the tunnel device's address is there: %v", f.Name(), onTunnel)
	}
}

func TestNodeInEveryFamily(t *testing.T) {
	for name, of := range families {
		for mode, way := range map[RoutingMode]destinations.Way{RouteDirect: destinations.Direct, RouteVXLAN: destinations.Tunnel} {
			t.Run(name+"/"+string(mode), func(t *testing.T) {
				l := inFamilies(t, mode, of)
				if why := l.status.reason(); why != "" || len(l.plan.Problems) != 0 {
					t.Fatalf("not ready: %s; problems %v", why, l.plan.Problems)
				}
				for f := range wire.Families {
					assertFamily(t, l, f, way, slices.Contains(of, f))
				}
				content, err := os.ReadFile(l.files.listPath())
				must(t, err)
				at := -1
				for _, f := range of {
					next := strings.Index(string(content), podsOf(1, f).String())
					if next <= at {
						t.Errorf("%s has no ranges in the order of %v:\n%s", l.files.listPath(), of, content)
					}
					at = next
				}
				first, all := l.planned, l.destinations(t)
				l.pass(t.Context())
				l.pass(t.Context())
				if len(l.complaints.current) > 0 || l.planned.facts.Tunnel != first.facts.Tunnel {
					t.Errorf("complaints %v", l.complaints.current)
				}
				if later := l.destinations(t); !slices.Equal(all, later) {
					t.Errorf("the first pass has written %v, the next ones have made it %v", all, later)
				}
				before := l.planned
				if l.pass(t.Context()); l.planned != before {
					t.Errorf("planned again for %+v, before for %+v", l.planned.facts, before.facts)
				}
			})
		}
	}
}

// destinations are the prefixes in the map, sorted.
func (l *loop) destinations(t *testing.T) (all []string) {
	t.Helper()
	content, err := l.dp.Maps.Destinations.Content()
	must(t, err)
	for k := range content {
		all = append(all, k.Netip().String())
	}
	slices.Sort(all)
	return all
}

// In a cluster of IPv4 nothing of IPv6 is touched, looked at or logged.
func TestOtherFamilyIsLeftAlone(t *testing.T) {
	l := testLoop(t)
	addSecondAddress(t, l)
	log := logged(l)
	ready(t, l)
	for name, want := range map[string]string{ipv6Forward: "0", acceptRAOf("uplink"): "1", "net/ipv6/conf/" + tunnelName + "/disable_ipv6": "1"} {
		if have, err := l.sysctls.Get(name); have != want || err != nil {
			t.Errorf("%s is %s, error %v", name, have, err)
		}
	}
	have, err := l.dp.Maps.Destinations.Content()
	must(t, err)
	for k := range have {
		if k.Netip().Addr().Is6() {
			t.Errorf("destinations has %s", k)
		}
	}
	if strings.Contains(log.String(), "IPv6") || strings.Contains(log.String(), "fd00") || strings.Contains(log.String(), "fe80") {
		t.Errorf("the log:\n%s", log)
	}
}

// IPv6 comes with a Node's second podCIDR, and goes with it.
func TestFamilyComes(t *testing.T) {
	l := inFamilies(t, RouteDirect, families["IPv4"])
	both := families["dual"]
	l.accept(list(nodeIn(1, both), nodeIn(2, both)))
	if l.view.used == l.used() {
		t.Fatal("the newest look is said to be of IPv6 as well")
	}
	l.pass(t.Context())
	for f := range wire.Families {
		assertFamily(t, l, f, destinations.Direct, true)
	}
}

// What turning forwarding on would take from a link goes on: it follows routers as before, and so it does after a cleanup.
func TestRoutersAreFollowed(t *testing.T) {
	for name, tt := range map[string]struct {
		forwarding, acceptRA string // as they are before
		ours, after          string // accept_ra with us, and after a cleanup
	}{
		"a host that follows":   {"0", "1", "2", "1"},
		"a host that does not":  {"0", "0", "0", "0"},
		"follows in any case":   {"0", "2", "2", "2"},
		"a router that ignores": {"1", "1", "1", "1"},
	} {
		t.Run(name, func(t *testing.T) {
			l := testLoop(t)
			files := device.Sysctl{Dir: l.cfg.ProcSys}
			set := func(name, value string) {
				t.Helper()
				_, err := files.Set(name, value)
				must(t, err)
			}
			expect := func(when, name, want string) {
				t.Helper()
				if have, err := files.Get(name); have != want || err != nil {
					t.Errorf("%s: %s is %q, want %q, error %v", when, name, have, want, err)
				}
			}
			set(acceptRAOf("uplink"), tt.acceptRA)
			set(ipv6Forward, tt.forwarding)
			addSecondAddress(t, l)
			l.accept(list(nodeIn(1, families["dual"]), nodeIn(2, families["dual"])))
			for _, when := range []string{"first", "again"} {
				l.pass(t.Context())
				expect(when, acceptRAOf("uplink"), tt.ours)
				expect(when, ipv6Forward, "1")
			}
			must(t, l.sysctls.restore())
			expect("put back", acceptRAOf("uplink"), tt.after)
			expect("put back", ipv6Forward, tt.forwarding)
		})
	}
}

// A route that a router has advertised outlives the change to a router.
func TestAdvertisedRouteStays(t *testing.T) {
	l := testLoop(t)
	link := addSecondAddress(t, l)
	must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: link.Index, Dst: nil, Gw: netip.MustParseAddr("fe80::99").AsSlice(), Protocol: 9, Family: netlink.FAMILY_V6}))
	l.accept(list(nodeIn(1, families["dual"]), nodeIn(2, families["dual"])))
	l.pass(t.Context())
	if names := l.view.hostLinks(); !slices.Equal(names, []string{"uplink"}) {
		t.Errorf("links that routers are followed on: %v", names)
	}
	if have, err := l.sysctls.Get(acceptRAOf("uplink")); have != "2" || err != nil {
		t.Errorf("accept_ra is %s, error %v", have, err)
	}
}

// Routers are followed on a network card that no route leads over yet, and on no other such link.
func TestNewNetworkCardFollowsRouters(t *testing.T) {
	t.Parallel()
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	v := &view{links: map[int]device.Link{
		2: {Index: 2, Name: "eth0", Kind: device.KindHardware, MAC: mac}, 3: {Index: 3, Name: "lo", Kind: device.KindHardware, Flags: net.FlagLoopback},
		4: {Index: 4, Name: "port", Kind: device.KindHardware, MAC: mac, Master: 5}, 5: {Index: 5, Name: "br0", Kind: device.KindBridge, MAC: mac},
		6: {Index: 6, Name: "veth7", Kind: "veth", MAC: mac}, 7: {Index: 7, Name: "wwan0", Kind: device.KindHardware},
	}}
	if names := v.hostLinks(); !slices.Equal(names, []string{"eth0"}) {
		t.Errorf("links that routers are followed on: %v", names)
	}
}

// What pods do without is said in the condition of the Node, as a complaint, and in the log, and keeps nobody from IPv4.
func TestMissingFamilyIsSaid(t *testing.T) {
	l := inFamilies(t, RouteDirect, families["IPv4"])
	both := families["dual"]
	own := nodeIn(1, both)
	own.PodCIDRs = own.PodCIDRs[:1]
	log := logged(l)
	l.accept(list(own, nodeIn(2, both)))
	l.pass(t.Context())
	want := "pods get no IPv6 address: Node n1 has no IPv6 podCIDR yet"
	missing := l.status.read().missing
	if said := carries(missing); said != "ebpf-cni carries pods; "+want {
		t.Errorf("the condition says %q", said)
	}
	if !strings.Contains(log.String(), want) || !strings.Contains(l.complaints.degraded()["cluster/addresses"], want) || l.status.reason() != "" {
		t.Errorf("degraded %v, not ready: %q, log:\n%s", l.complaints.degraded(), l.status.reason(), log)
	}
	l.accept(list(nodeIn(1, both), nodeIn(2, both)))
	l.pass(t.Context())
	if said := carries(l.status.read().missing); said != "ebpf-cni carries pods" {
		t.Errorf("the condition says %q", said)
	}
}

// The kernel sends nothing of its own through the tunnel: no group is reported but those that never are.
func TestTunnelIsSilent(t *testing.T) {
	l := inFamilies(t, RouteVXLAN, families["dual"])
	must(t, l.host.DeleteLink(l.tunnel.index)) // and is made again by what is a router now
	l.pass(t.Context())
	content, err := os.ReadFile("/proc/thread-self/net/igmp6")
	must(t, err)
	for line := range strings.Lines(string(content)) {
		fields := strings.Fields(line)
		unreported := []string{"ff020000000000000000000000000001", "ff010000000000000000000000000001"}
		if fields[1] == tunnelName && !slices.Contains(unreported, fields[2]) {
			t.Errorf("the tunnel device is in group %s", fields[2])
		}
	}
	addresses, err := device.Sysctl{Dir: "/proc/sys"}.Get("net/ipv6/conf/" + tunnelName + "/addr_gen_mode")
	if addresses != "1" || err != nil {
		t.Errorf("addr_gen_mode is %s, error %v", addresses, err)
	}
}

// A restart keeps the order in which pods get their addresses.
func TestOrderOutlivesTheAgent(t *testing.T) {
	l := inFamilies(t, RouteDirect, families["dual, IPv6 first"])
	list, err := os.ReadFile(l.files.listPath())
	must(t, err)
	standing, err := readStanding(l.dp.Maps)
	must(t, err)
	orderAs(list, standing.Own)
	if want := []netip.Prefix{podsOf(1, wire.IPv6), podsOf(1, wire.IPv4)}; !slices.Equal(standing.Own, want) {
		t.Errorf("an agent that starts takes for podCIDRs %v, want %v", standing.Own, want)
	}
}

// A route of somebody else in the place of ours stays, in either family.
func TestForeignRoutesOfBothFamiliesStay(t *testing.T) {
	l := inFamilies(t, RouteDirect, families["IPv4"])
	for f := range wire.Families {
		foreign := device.Route{Dst: podsOf(2, f), Index: int(l.view.uplinks[0].Index), Foreign: true}
		must(t, l.host.DeleteRoute(device.Route{Dst: foreign.Dst}))
		must(t, l.host.ReplaceRoute(foreign))
	}
	l.accept(list(nodeIn(1, families["dual"]), nodeIn(2, families["dual"])))
	l.pass(t.Context())
	for f := range wire.Families {
		if dst := podsOf(2, f); l.route(t, dst.String()) || !strings.Contains(fmt.Sprint(l.complaints.degraded()), dst.String()) {
			t.Errorf("the route to %s is ours, or nobody is told: %v", dst, l.complaints.degraded())
		}
	}
}

// Interfaces that only a link's own prefix of IPv6 leads to are no way out.
func TestUplinksOfIPv6(t *testing.T) {
	v := testView()
	v.used[wire.IPv6] = true
	v.routes = append(v.routes[:0:0],
		device.Route{Dst: netip.MustParsePrefix("fe80::/64"), Index: 6, Protocol: 2},
		device.Route{Dst: netip.MustParsePrefix("ff00::/8"), Index: 6, Protocol: 2},
		device.Route{Dst: netip.MustParsePrefix("2001:db8:9::9/128"), Index: 7, Protocol: 3},
		device.Route{Dst: netip.MustParsePrefix("::/0"), Index: 2, Gateway: netip.MustParseAddr("fe80::99"), Protocol: 9},
		device.Route{Dst: netip.MustParsePrefix("2001:db8::/64"), Index: 3, Protocol: 2},
	)
	uplinks := v.findUplinks(nil, nil)
	if !slices.Equal(names(uplinks), []string{"eth0", "eth1"}) {
		t.Fatalf("uplinks %v", names(uplinks))
	}
}

// Packets can have as their source what is known to be this node's, and is no link's own.
func TestSourceAddresses(t *testing.T) {
	v := testView()
	v.used[wire.IPv6] = true
	v.addresses = []device.Address{
		{Index: 1, Prefix: netip.MustParsePrefix("127.0.0.1/8"), Host: true},
		{Index: 2, Prefix: netip.MustParsePrefix("fe80::1/64"), Link: true},
		{Index: 2, Prefix: netip.MustParsePrefix("2001:db8::7/64"), Deprecated: true},
		{Index: 3, Prefix: netip.MustParsePrefix("2001:db8::a/64"), Unproven: true},
	}
	want := []plan.Address{{Index: 2, Prefix: netip.MustParsePrefix("2001:db8::7/64"), Deprecated: true}}
	if got := v.sourceAddresses(); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// A node whose kernel has no IPv6 carries pods of IPv4, and says why it carries no others.
func TestKernelWithoutIPv6(t *testing.T) {
	const want = "this node's kernel has no IPv6 (ipv6.disable=1 on its command line?)"
	for name, of := range families {
		t.Run(name, func(t *testing.T) {
			l := testLoop(t)
			l.sysctls.Dir = settings(t, map[string]string{ipForward: "1", forwardingOf("uplink"): "1", rpFilterOf("uplink"): "0", reservedPorts: ""})
			log := logged(l)
			l.accept(list(nodeIn(1, of), nodeIn(2, of)))
			l.pass(t.Context())
			four, six := slices.Contains(of, wire.IPv4), slices.Contains(of, wire.IPv6)
			if said := strings.Contains(l.status.reason()+fmt.Sprint(l.status.read().missing), want); said != six || (l.status.reason() == "") != four {
				t.Errorf("not ready: %q, missing: %v", l.status.reason(), l.status.read().missing)
			}
			if four {
				assertFamily(t, l, wire.IPv4, destinations.Direct, true)
			}
			of6 := func(prefix string) bool { return strings.Contains(prefix, ":") }
			if slices.ContainsFunc(l.destinations(t), of6) || l.route(t, podsOf(1, wire.IPv6).String()) || strings.Contains(log.String(), "failed") {
				t.Errorf("destinations %v, log:\n%s", l.destinations(t), log)
			}
		})
	}
}

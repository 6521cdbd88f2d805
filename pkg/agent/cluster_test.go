package agent

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// noGateway is an address on the uplink's link that the kernel accepts no route by.
const noGateway = "172.18.0.99"

// refuseGateway makes noGateway what it is: an odd broadcast address, of which only
// the kernel's local table tells.
func refuseGateway(t *testing.T) {
	t.Helper()
	link, err := netlink.LinkByName("uplink")
	if err != nil {
		t.Fatal(err)
	}
	err = netlink.RouteReplace(&netlink.Route{
		Dst: &net.IPNet{IP: net.ParseIP(noGateway).To4(), Mask: net.CIDRMask(32, 32)}, LinkIndex: link.Attrs().Index,
		Type: unix.RTN_BROADCAST, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_LINK,
	})
	if err != nil {
		t.Fatal(err)
	}
}

func n3() plan.Node {
	return plan.Node{Name: "n3", PodCIDRs: []string{"10.244.3.0/24"}, InternalIPs: []string{"172.18.0.13"}}
}

func TestRefusedRouteHurtsNobodyElse(t *testing.T) {
	bad := n2()
	bad.InternalIPs = []string{noGateway}
	check := func(t *testing.T, l *loop) {
		t.Helper()
		if why := l.status.reason(); why != "" {
			t.Errorf("not ready: %s", why)
		}
		if _, err := os.Stat(l.files.listPath()); err != nil {
			t.Error(err)
		}
		if problems := l.status.read().problems; problems[plan.Refused] != 1 || len(problems) != 1 {
			t.Errorf("problems %v, want one with n2", problems)
		}
		c := l.readTold(t)
		if c.NotReady != "" || len(c.Problems) != 1 || c.Problems[0].Node != "n2" || !strings.Contains(c.Problems[0].Text, noGateway) {
			t.Errorf("ebpfctl is told %+v", c)
		}
	}
	t.Run("from the start", func(t *testing.T) {
		l := testLoop(t)
		refuseGateway(t)
		l.accept(list(n1(), bad, n3()))
		l.pass(t.Context())
		check(t, l)
		if !l.route(t, "10.244.3.0/24") || l.route(t, "10.244.2.0/24") {
			t.Error("not exactly the good node has its route")
		}
	})
	t.Run("by a change", func(t *testing.T) {
		l := testLoop(t)
		refuseGateway(t)
		l.accept(list(n1(), n2(), n3()))
		l.pass(t.Context())
		l.accept(list(n1(), bad))
		if !l.replan(t.Context()) {
			t.Errorf("the change of the Nodes failed: %s", l.status.reason())
		}
		check(t, l)
		if _, ok := l.destination(t, "10.244.3.0/24"); ok || l.route(t, "10.244.3.0/24") {
			t.Error("what is of a node that is gone is still there")
		}
		l.accept(list(n1(), n2()))
		l.pass(t.Context())
		if problems := l.status.read().problems; len(problems) != 0 || !l.route(t, "10.244.2.0/24") {
			t.Errorf("after the node was put right: problems %v", problems)
		}
	})
}

// A fault that returns is said again.
func TestForeignRouteIsSaidEachTime(t *testing.T) {
	l := testLoop(t)
	said := logged(l)
	link, err := l.host.LinkByName("uplink")
	if err != nil {
		t.Fatal(err)
	}
	foreign := device.Route{Dst: netip.MustParsePrefix("10.244.2.0/24"), Index: link.Index, Gateway: netip.MustParseAddr("172.18.0.99"), Foreign: true}
	l.accept(list(n1(), n2()))
	for times := 1; times <= 2; times++ {
		if err := l.host.DeleteRoute(device.Route{Dst: foreign.Dst}); err != nil {
			t.Fatal(err)
		}
		if err := l.host.ReplaceRoute(foreign); err != nil {
			t.Fatal(err)
		}
		l.pass(t.Context())
		l.pass(t.Context())
		if got := strings.Count(said.String(), "somebody else's"); got != times {
			t.Errorf("said %d times, want %d:\n%s", got, times, said.String())
		}
		route := netlink.Route{Dst: &net.IPNet{IP: foreign.Dst.Addr().AsSlice(), Mask: net.CIDRMask(24, 32)}}
		if err := netlink.RouteDel(&route); err != nil {
			t.Fatal(err)
		}
		l.pass(t.Context())
		if !l.route(t, "10.244.2.0/24") {
			t.Error("our route does not take its place")
		}
	}
}

func TestForeignRouteStays(t *testing.T) {
	l := testLoop(t)
	link, err := l.host.LinkByName("uplink")
	if err != nil {
		t.Fatal(err)
	}
	foreign := device.Route{Dst: netip.MustParsePrefix("10.244.2.0/24"), Index: link.Index, Gateway: netip.MustParseAddr("172.18.0.99"), Foreign: true}
	if err := l.host.ReplaceRoute(foreign); err != nil {
		t.Fatal(err)
	}
	l.accept(list(n1(), n2()))
	l.pass(t.Context())
	routes, err := l.host.Routes()
	if err != nil {
		t.Fatal(err)
	}
	for _, have := range routes {
		if have.Dst == foreign.Dst && (have.Gateway != foreign.Gateway || have.Protocol == device.Protocol) {
			t.Errorf("the route is now %+v", have)
		}
	}
	if l.route(t, "10.244.2.0/24") {
		t.Error("a second route stands beside somebody else's")
	}
}

// A pod's link may come between the list of links and that of routes.
func TestRouteOverAnUnknownLinkIsNotOurs(t *testing.T) {
	v := testView()
	ours := device.Route{Dst: netip.MustParsePrefix("10.244.1.0/24"), Unreachable: true, Protocol: device.Protocol}
	newPod := device.Route{Dst: netip.MustParsePrefix("10.244.1.77/32"), Index: 77, Protocol: device.Protocol}
	v.routes = append(v.routes, ours, newPod)
	have := v.ownRoutes()
	for prefix, want := range map[string]bool{"10.244.1.0/24": true, "10.244.2.0/24": true, "10.244.1.5/32": false, "10.244.1.77/32": false} {
		if _, got := have[netip.MustParsePrefix(prefix)]; got != want {
			t.Errorf("%s: %v, want %v", prefix, got, want)
		}
	}
}

func TestEntryOfAPodWhoseStateIsUnreadableStays(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	const outside = "10.9.9.9/32"
	key := destinations.KeyFrom(netip.MustParsePrefix(outside))
	if err := l.dp.Maps.Destinations.Put(key, destinations.Value{Kind: destinations.Local}); err != nil {
		t.Fatal(err)
	}
	if err := endpoint.Write(l.cfg.State, endpoint.Endpoint{ID: endpoint.ID{ContainerID: "broken", IfName: "eth0"}}); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(endpoint.Dir(l.cfg.State), "*.json"))
	if err != nil || len(files) != 1 {
		t.Fatalf("state files %v, error %v", files, err)
	}
	if err := os.WriteFile(files[0], []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	l.pass(t.Context())
	if _, there := l.destination(t, outside); !there {
		t.Error("the entry of a pod that can't be told from others is gone")
	}
	if err := os.Remove(files[0]); err != nil {
		t.Fatal(err)
	}
	l.pass(t.Context())
	if _, there := l.destination(t, outside); there {
		t.Error("nobody's entry is still there")
	}
}

// The node's address may go before its Node says so, and come back.
func TestRoutesOutliveTheNodesAddress(t *testing.T) {
	l, _ := withPod(t)
	up, err := netlink.LinkByName("uplink")
	if err != nil {
		t.Fatal(err)
	}
	address := func(text string) *netlink.Addr {
		a, err := netlink.ParseAddr(text)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	internal, other := address("172.18.0.11/24"), address("172.18.0.21/24")
	assert := func(want netip.Addr) {
		t.Helper()
		l.pass(t.Context())
		l.assertReady(t)
		for _, prefix := range []string{"10.244.2.0/24", podRoute} {
			if got := l.source(t, prefix); got != want {
				t.Errorf("the route to %s has source %v, want %v", prefix, got, want)
			}
		}
		for _, p := range l.readTold(t).Problems {
			if p.Node != "n1" {
				t.Errorf("node %s is blamed: %s", p.Node, p.Text)
			}
		}
	}
	assert(netip.MustParseAddr("172.18.0.11"))
	if err := netlink.AddrDel(up, internal); err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrAdd(up, other); err != nil {
		t.Fatal(err)
	}
	assert(netip.Addr{})
	if err := netlink.AddrAdd(up, internal); err != nil {
		t.Fatal(err)
	}
	assert(netip.MustParseAddr("172.18.0.11"))
	moved := n1()
	moved.InternalIPs = []string{"172.18.0.21"}
	l.accept(list(moved, n2()))
	assert(netip.MustParseAddr("172.18.0.21"))
}

// A full map has what is needed most, and gets it in one pass, whatever it was full of.
func TestDestinationsThatAreNeededHaveRoom(t *testing.T) {
	const room, others = 128, 100
	l := testLoop(t)
	l.dp.Maps.Destinations = small(t, l.dp.Maps.Destinations, destinations.Name, room)
	for i := range room {
		former := netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 32)
		must(t, l.dp.Maps.Destinations.Put(destinations.KeyFrom(former), destinations.Value{Kind: destinations.Node}))
	}
	nodes := []plan.Node{n1()}
	ready(t, l)
	assert := func(when string, podCIDRs, addresses int, degraded bool) {
		t.Helper()
		l.pass(t.Context())
		l.assertReady(t)
		have, err := l.dp.Maps.Destinations.Content()
		must(t, err)
		kinds := map[destinations.Kind]int{}
		for k, v := range have {
			kinds[v.Kind]++
			if _, planned := l.plan.Destinations[k]; !planned {
				t.Errorf("%s: %v is still there", when, k)
			}
		}
		for k := range l.plan.Destinations {
			if _, there := have[k]; !there && plan.Essential(l.plan.Destinations, k) {
				t.Errorf("%s: %v is missing", when, k)
			}
		}
		if kinds[destinations.PodCIDR] != podCIDRs || kinds[destinations.Node] != addresses {
			t.Errorf("%s: %v, want %d podCIDRs and %d addresses", when, kinds, podCIDRs, addresses)
		}
		if is := l.complaints.degraded(); (len(is) > 0) != degraded {
			t.Errorf("%s: degraded by %v", when, is)
		}
	}
	assert("full of former nodes' addresses", 1, 1, false)

	for i := range others {
		nodes = append(nodes, plan.Node{
			Name: fmt.Sprint("m", i), PodCIDRs: []string{fmt.Sprintf("10.245.%d.0/24", i)}, InternalIPs: []string{fmt.Sprintf("172.18.0.%d", 100+i)},
		})
	}
	l.accept(list(nodes...))
	left := room - room/roomForPods - l.essentials() - others
	assert("many nodes", others, left, true)
	assert("a pass later", others, left, true)

	link, err := netlink.LinkByName("uplink")
	must(t, err)
	for i := range 5 {
		a, err := netlink.ParseAddr(fmt.Sprintf("172.18.1.%d/32", i))
		must(t, err)
		must(t, netlink.AddrAdd(link, a))
	}
	assert("and more addresses of this node", others, left-5, true)
	for i := range room / roomForPods {
		pod := netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), 32)
		if err := l.dp.Maps.Destinations.Put(destinations.KeyFrom(pod), destinations.Value{Kind: destinations.Local}); err != nil {
			t.Errorf("the plugin finds no room: %v", err)
		}
	}
	l.accept(list(n1(), n2()))
	assert("few nodes", 1, 1, false)
}

// What others take away or change is counted when it is put right, and what the plan changes is not.
func TestRepairsOfTheClusterAreCounted(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	expect := func(when string, routes, entries float64) {
		t.Helper()
		l.pass(t.Context())
		if r, d := l.repairs(t, repairedRoute), l.repairs(t, repairedDestination); r != routes || d != entries {
			t.Errorf("%s: %v routes and %v destinations have been repaired, want %v and %v", when, r, d, routes, entries)
		}
	}
	expect("at rest", 0, 0)
	pods, peer := netip.MustParsePrefix("10.244.2.0/24"), netip.MustParsePrefix("172.18.0.12/32")
	must(t, l.host.DeleteRoute(device.Route{Dst: pods}))
	must(t, l.dp.Maps.Destinations.Delete(destinations.KeyFrom(pods)))
	changed, ok := l.destination(t, peer.String())
	if !ok {
		t.Fatalf("no destination %s", peer)
	}
	changed.Ifindex++
	must(t, l.dp.Maps.Destinations.Put(destinations.KeyFrom(peer), changed))
	expect("after two entries and a route", 1, 2)
	expect("once all is put right", 1, 2)
	must(t, l.host.DeleteRoute(device.Route{Dst: pods}))
	l.accept(list(n1(), n3()))
	expect("when it was to go anyway", 1, 2)
	must(t, l.host.DeleteRoute(device.Route{Dst: netip.MustParsePrefix("10.244.1.0/24"), Unreachable: true}))
	expect("after this node's own route", 2, 2)
}

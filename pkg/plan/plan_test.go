package plan

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

var (
	day1 = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	day2 = day1.Add(24 * time.Hour)
)

func prefixes(texts ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range texts {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// node is node number i of a small cluster: 172.18.0.(10+i), 10.244.i.0/24.
func node(i int) Node {
	return Node{
		Name: fmt.Sprintf("n%d", i), Created: day1,
		PodCIDRs:    []string{fmt.Sprintf("10.244.%d.0/24", i)},
		InternalIPs: []string{fmt.Sprintf("172.18.0.%d", 10+i)},
	}
}

func (n Node) with(change func(*Node)) Node {
	change(&n)
	return n
}

// facts are those of node 1.
func facts() Facts {
	return Facts{
		Local:   prefixes("127.0.0.0/8", "172.18.0.11/32", "169.254.20.10/32"),
		Holders: map[netip.Addr]string{netip.MustParseAddr("172.18.0.11"): "eth0"},
		Uplinks: []Link{{Index: 2, Name: "eth0", MTU: 1500}},
		Addresses: []Address{
			{Index: 2, Prefix: netip.MustParsePrefix("172.18.0.200/24"), Secondary: true}, {Index: 2, Prefix: netip.MustParsePrefix("172.18.0.11/24")},
		},
		Routes: []KernelRoute{
			{Dst: netip.MustParsePrefix("0.0.0.0/0"), Index: 2, Via: netip.MustParseAddr("192.0.2.1")},
			{Dst: netip.MustParsePrefix("172.18.0.0/24"), Index: 2, OnLink: true},
		},
	}
}

func input(nodes ...Node) Input {
	return Input{Self: "n1", Known: true, Nodes: nodes, Facts: facts()}
}

// dump writes the destinations as text, which reads better in a test than the map.
func dump(r Result) map[string]string {
	out := map[string]string{}
	for k, v := range r.Destinations {
		text := v.Kind.String()
		if v.Kind == destinations.PodCIDR {
			text += fmt.Sprintf(" %s dev %d mtu %d", v.Node, v.Ifindex, v.MTU)
		}
		out[k.Netip().String()] = text
	}
	return out
}

func problems(r Result) []string {
	var out []string
	for _, p := range r.Problems {
		out = append(out, p.Node+" "+string(p.Reason))
	}
	slices.Sort(out)
	return out
}

func TestMakeSmallCluster(t *testing.T) {
	in := input(node(1), node(2), node(3))
	in.Native = prefixes("10.244.0.0/16", "192.0.2.0/24")
	in.Facts.Endpoints = []netip.Addr{netip.MustParseAddr("10.244.1.5"), netip.MustParseAddr("10.9.9.9")}
	r := Make(in)
	want := map[string]string{
		"127.0.0.0/8": "host", "172.18.0.11/32": "host", "169.254.20.10/32": "host",
		"10.244.0.0/16": "native", "192.0.2.0/24": "native",
		"10.244.1.0/24": "local", "10.9.9.9/32": "local",
		"172.18.0.12/32": "node", "172.18.0.13/32": "node",
		"10.244.2.0/24": "pod_cidr 172.18.0.12 dev 2 mtu 1500",
		"10.244.3.0/24": "pod_cidr 172.18.0.13 dev 2 mtu 1500",
	}
	if diff := cmp.Diff(want, dump(r)); diff != "" {
		t.Errorf("destinations (-want +got):\n%s", diff)
	}
	src := netip.MustParseAddr("172.18.0.11")
	routes := []Route{
		{Dst: netip.MustParsePrefix("10.244.2.0/24"), Via: netip.MustParseAddr("172.18.0.12"), Src: src, Index: 2},
		{Dst: netip.MustParsePrefix("10.244.3.0/24"), Via: netip.MustParseAddr("172.18.0.13"), Src: src, Index: 2},
		{Dst: netip.MustParsePrefix("10.244.1.0/24")},
	}
	if !slices.Equal(r.Routes, routes) {
		t.Errorf("routes %v, want %v", r.Routes, routes)
	}
	if len(r.Problems) != 0 || r.NotReady != "" {
		t.Errorf("ready %v (%s), problems %v", r.NotReady == "", r.NotReady, r.Problems)
	}
	if got := r.Uplinks[uplinks.Key{Ifindex: 2}].Addresses[wire.IPv4]; got != wire.AddrFrom(src) {
		t.Errorf("masquerading to %s, want the InternalIP %s although another address comes first", got, src)
	}
	if r.Config.NodeAddresses[wire.IPv4] != wire.AddrFrom(src) || r.Config.PodCIDRLens[wire.IPv4] != 24 || r.Config.Layout != wire.LayoutVersion {
		t.Errorf("config %+v", r.Config)
	}
}

// wrongNode is a Node that is wrong in some way, beside three that are right.
type wrongNode struct {
	name    string
	bad     Node
	want    []string // problems
	without string   // a destination that must not exist
	before  Standing
}

func wrongNodes() []wrongNode {
	young := func(n Node) Node { n.Created = day2; return n }
	return []wrongNode{
		{"everything", node(9).with(func(n *Node) { n.PodCIDRs = []string{"0.0.0.0/0"} }), []string{"n9 refused"}, "0.0.0.0/0", Standing{}},
		{"everything IPv6", node(9).with(func(n *Node) { n.PodCIDRs = []string{"::/0"} }), []string{"n9 refused"}, "::/0", Standing{}},
		{"no prefix", node(9).with(func(n *Node) { n.PodCIDRs = []string{"10.244.9.0"} }), []string{"n9 refused"}, "10.244.9.0/32", Standing{}},
		{"holds every node", node(9).with(func(n *Node) { n.PodCIDRs = []string{"172.16.0.0/12"} }), []string{"n9 refused"}, "172.16.0.0/12", Standing{}},
		{"holds another node", node(9).with(func(n *Node) { n.PodCIDRs = []string{"172.18.0.12/31"} }), []string{"n9 refused"}, "172.18.0.12/31", Standing{}},
		{"holds its own address", node(9).with(func(n *Node) { n.PodCIDRs = []string{"172.18.0.19/32"} }), []string{"n9 refused"}, "", Standing{}},
		{"loopback", node(9).with(func(n *Node) { n.PodCIDRs = []string{"127.1.0.0/24"} }), []string{"n9 refused"}, "127.1.0.0/24", Standing{}},
		{"multicast", node(9).with(func(n *Node) { n.PodCIDRs = []string{"239.1.0.0/24"} }), []string{"n9 refused"}, "239.1.0.0/24", Standing{}},
		{"wider than any private range", node(9).with(func(n *Node) { n.PodCIDRs = []string{"203.0.0.0/7"} }), []string{"n9 refused"}, "202.0.0.0/7", Standing{}},
		{"holds the default gateway", node(9).with(func(n *Node) { n.PodCIDRs = []string{"192.0.2.0/24"} }), []string{"n9 refused"}, "192.0.2.0/24", Standing{}},
		{"the services'", node(9).with(func(n *Node) { n.PodCIDRs = []string{"10.96.7.0/24"} }), []string{"n9 refused"}, "10.96.7.0/24", Standing{}},
		{"wider than the services'", node(9).with(func(n *Node) { n.PodCIDRs = []string{"10.64.0.0/10"} }), []string{"n9 refused"}, "10.64.0.0/10", Standing{}},
		{"our own", node(9).with(func(n *Node) { n.PodCIDRs = []string{"10.244.1.0/24"} }), []string{"n9 refused"}, "", Standing{}},
		{"within our own", node(9).with(func(n *Node) { n.PodCIDRs = []string{"10.244.1.128/25"} }), []string{"n9 refused"}, "10.244.1.128/25", Standing{}},
		{"InternalIP no address", node(9).with(func(n *Node) { n.InternalIPs = []string{"n9.example"} }), []string{"n9 refused"}, "10.244.9.0/24", Standing{}},
		{"InternalIP unspecified", node(9).with(func(n *Node) { n.InternalIPs = []string{"0.0.0.0"} }), []string{"n9 refused"}, "10.244.9.0/24", Standing{}},
		{"InternalIP ours", node(9).with(func(n *Node) { n.InternalIPs = []string{"172.18.0.11"} }), []string{"n9 refused"}, "10.244.9.0/24", Standing{}},
		{"InternalIP a pod's of ours", node(9).with(func(n *Node) { n.InternalIPs = []string{"10.244.1.7"} }), []string{"n9 refused"}, "10.244.1.7/32", Standing{}},
		{"InternalIP another's pod", young(node(9)).with(func(n *Node) { n.InternalIPs = []string{"10.244.2.7"} }), []string{"n9 refused"}, "10.244.2.7/32", Standing{}},
		{"InternalIP another's standing pod", node(9).with(func(n *Node) {
			n.InternalIPs, n.Created = []string{"10.244.2.7"}, day1.Add(-time.Hour)
		}), []string{"n9 refused"}, "10.244.2.7/32", Standing{Claims: map[netip.Prefix]netip.Addr{
			netip.MustParsePrefix("10.244.2.0/24"): netip.MustParseAddr("172.18.0.12"),
		}}},
		{"InternalIP for everybody on the link", node(9).with(func(n *Node) { n.InternalIPs = []string{"172.18.0.255"} }), []string{"n9 refused"}, "10.244.9.0/24", Standing{}},
		{"no InternalIP", node(9).with(func(n *Node) { n.InternalIPs = nil }), []string{"n9 refused"}, "10.244.9.0/24", Standing{}},
		{"no podCIDR", node(9).with(func(n *Node) { n.PodCIDRs = nil }), nil, "10.244.9.0/24", Standing{}},
		{"unreadable", node(9).with(func(n *Node) { n.Malformed = "spec: a number" }), []string{"n9 refused"}, "10.244.9.0/24", Standing{}},
		{"doubted by its source", node(9).with(func(n *Node) { n.Doubts = []string{"a second lease"} }), []string{"n9 refused"}, "", Standing{}},
		{"off link", node(9).with(func(n *Node) { n.InternalIPs = []string{"203.0.113.9"} }), []string{"n9 off_link"}, "", Standing{}},
		{"taken by an older one", young(node(9)).with(func(n *Node) { n.PodCIDRs = []string{"10.244.2.0/25"} }), []string{"n9 podcidr_conflict"}, "10.244.2.0/25", Standing{}},
		{"wider than an older one's", young(node(9)).with(func(n *Node) { n.PodCIDRs = []string{"10.244.2.0/23"} }), []string{"n9 podcidr_conflict"}, "10.244.2.0/23", Standing{}},
		{"a name twice", node(2).with(func(n *Node) { n.PodCIDRs = []string{"10.244.77.0/24"} }), []string{"n2 refused"}, "10.244.77.0/24", Standing{}},
	}
}

func TestOneNodeIsWrong(t *testing.T) {
	good := dump(Make(withService(input(node(1), node(2), node(3)))))
	for _, tt := range wrongNodes() {
		t.Run(tt.name, func(t *testing.T) {
			in := withService(input(node(1), node(2), node(3), tt.bad))
			in.Before = tt.before
			r := Make(in)
			got := dump(r)
			for p, v := range good {
				if got[p] != v {
					t.Errorf("a good node was hurt: %s is %q, want %q", p, got[p], v)
				}
			}
			if _, there := got[tt.without]; there {
				t.Errorf("%s is %q, want no entry", tt.without, got[tt.without])
			}
			if diff := cmp.Diff(tt.want, problems(r)); diff != "" {
				t.Errorf("problems (-want +got):\n%s\n%v", diff, r.Problems)
			}
			if r.NotReady != "" {
				t.Errorf("not ready: %s", r.NotReady)
			}
		})
	}
}

func withService(in Input) Input {
	in.Service = prefixes("10.96.0.0/12")
	return in
}

func TestConflicts(t *testing.T) {
	same := "10.244.7.0/24"
	claim := func(i int, created time.Time) Node {
		return node(i).with(func(n *Node) { n.PodCIDRs, n.Created = []string{same}, created })
	}
	standing := Standing{Claims: map[netip.Prefix]netip.Addr{netip.MustParsePrefix(same): netip.MustParseAddr("172.18.0.13")}}
	tests := []struct {
		name   string
		nodes  []Node
		before Standing
		winner int
		loser  string
	}{
		{"the older", []Node{claim(2, day2), claim(3, day1)}, Standing{}, 3, "n2"},
		{"the older against the standing", []Node{claim(2, day1), claim(3, day2)}, standing, 2, "n3"},
		{"the standing of the same age", []Node{claim(2, day1), claim(3, day1)}, standing, 3, "n2"},
		{"the first of the same age", []Node{claim(3, day1), claim(2, day1)}, Standing{}, 3, "n2"},
		{"any age against none", []Node{claim(2, time.Time{}), claim(3, day2)}, Standing{}, 3, "n2"},
		{"the second, the first refused", []Node{
			claim(2, day1).with(func(n *Node) { n.InternalIPs = []string{"::1"} }), claim(3, day2),
		}, Standing{}, 3, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			in := input(append([]Node{node(1)}, tt.nodes...)...)
			in.Before = tt.before
			r := Make(in)
			want := fmt.Sprintf("pod_cidr 172.18.0.%d dev 2 mtu 1500", 10+tt.winner)
			if got := dump(r)[same]; got != want {
				t.Errorf("%s is %q, want %q", same, got, want)
			}
			if tt.loser != "" && !slices.Contains(problems(r), tt.loser+" podcidr_conflict") {
				t.Errorf("the loser %s is not named: %v", tt.loser, r.Problems)
			}
		})
	}
}

func TestOwn(t *testing.T) {
	standing := Standing{Own: prefixes("10.244.1.0/24"), NodeIPs: []netip.Addr{netip.MustParseAddr("172.18.0.11")}}
	moved := node(1).with(func(n *Node) { n.PodCIDRs = []string{"10.244.50.0/24"} })
	older := node(5).with(func(n *Node) { n.PodCIDRs = []string{"10.244.1.0/24"} })
	younger := node(1).with(func(n *Node) { n.Created = day2 })
	grown := node(1).with(func(n *Node) { n.PodCIDRs = []string{"10.244.0.0/16"} })
	inForce := standing
	inForce.Claims = map[netip.Prefix]netip.Addr{netip.MustParsePrefix("10.244.2.0/24"): netip.MustParseAddr("172.18.0.12")}
	tests := []struct {
		name   string
		in     Input
		own    string
		reason string // part of why not ready; empty: ready
	}{
		{"new", input(node(1)), "10.244.1.0/24", ""},
		{"missing from a new node's list", input(node(2)), "", "no Node n1"},
		{"missing from the list", withBefore(input(node(2)), standing), "10.244.1.0/24", ""},
		{"no list", Input{Self: "n1", Facts: facts()}, "", "no complete list"},
		{"no list after a restart", Input{Self: "n1", Facts: facts(), Before: standing}, "10.244.1.0/24", ""},
		{"without podCIDR", input(node(1).with(func(n *Node) { n.PodCIDRs = nil })), "", "no IPv4 podCIDR yet"},
		{"podCIDR taken back", withBefore(input(node(1).with(func(n *Node) { n.PodCIDRs = nil })), standing), "10.244.1.0/24", ""},
		{"back with another", withBefore(input(moved), standing), "10.244.50.0/24", ""},
		{"refused", input(node(1).with(func(n *Node) { n.PodCIDRs = []string{"0.0.0.0/0"} })), "", "every address"},
		{"holds our address", input(node(1).with(func(n *Node) { n.PodCIDRs = []string{"172.18.0.0/24"} })), "", "addresses of this node: eth0 has 172.18.0.11;"},
		{"new and claimed by an older one", input(younger, older), "", "n5, which is older"},
		{"grown over one in force", withBefore(input(grown, node(2)), inForce), "10.244.1.0/24", ""},
		{"grown over a younger one", withBefore(input(grown, node(2).with(func(n *Node) { n.Created = day2 })), inForce), "10.244.0.0/16", ""},
		{"new, in force elsewhere, same age", withBefore(input(grown, node(2)), Standing{Claims: inForce.Claims}), "", "n2, whose claim is in force"},
		{"new, after one in the list, same age", input(node(2), grown), "", "n2, which comes first"},
		{"new, before one in the list, same age", input(grown, node(2)), "10.244.0.0/16", ""},
		{"new, after one that can't be reached", input(node(2).with(func(n *Node) { n.InternalIPs = nil }), grown), "10.244.0.0/16", ""},
		{"standing and claimed by an older one", withBefore(input(younger, older), standing), "10.244.1.0/24", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := Make(tt.in)
			if own := r.Standing.PodCIDR(wire.IPv4); own.IsValid() != (tt.own != "") || own.IsValid() && own.String() != tt.own {
				t.Errorf("own podCIDR %v, want %q", own, tt.own)
			}
			if (r.NotReady == "") != (tt.reason == "") || !strings.Contains(r.NotReady, tt.reason) {
				t.Errorf("ready %v, reason %q, want %q", r.NotReady == "", r.NotReady, tt.reason)
			}
			if tt.own != "" && dump(r)[tt.own] != "local" {
				t.Errorf("%s is %q in the destinations", tt.own, dump(r)[tt.own])
			}
		})
	}
}

func withBefore(in Input, s Standing) Input {
	in.Before = s
	return in
}

func TestNodeReturnsWithAnotherPodCIDR(t *testing.T) {
	first := Make(input(node(1), node(2)))
	gone := Make(withBefore(input(node(1)), first.Standing))
	if _, there := dump(gone)["10.244.2.0/24"]; there {
		t.Error("the podCIDR of a Node that is gone is still there")
	}
	back := node(2).with(func(n *Node) { n.PodCIDRs, n.Created = []string{"10.244.8.0/24"}, day2 })
	r := dump(Make(withBefore(input(node(1), back), gone.Standing)))
	if r["10.244.8.0/24"] == "" || r["10.244.2.0/24"] != "" {
		t.Errorf("destinations after the return: %v", r)
	}
}

func TestWithoutListNothingIsLost(t *testing.T) {
	first := Make(input(node(1), node(2), node(3)))
	in := Input{Self: "n1", Facts: facts(), Before: first.Standing}
	if diff := cmp.Diff(dump(first), dump(Make(in))); diff != "" {
		t.Errorf("after a restart, before the first list (-before +after):\n%s", diff)
	}
}

func TestOffLinkIsUnreachable(t *testing.T) {
	far := node(2).with(func(n *Node) { n.InternalIPs = []string{"203.0.113.9"} })
	r := Make(input(node(1), far))
	want := Route{Dst: netip.MustParsePrefix("10.244.2.0/24")}
	if !slices.Contains(r.Routes, want) {
		t.Errorf("routes %v lack the unreachable one", r.Routes)
	}
	if got := dump(r)["10.244.2.0/24"]; got != "pod_cidr 203.0.113.9 dev 0 mtu 0" {
		t.Errorf("destination %q", got)
	}
}

// clusterOf is a cluster of n nodes for measuring.
func clusterOf(n int) Input {
	in := input(node(1))
	for i := 2; i <= n; i++ {
		in.Nodes = append(in.Nodes, Node{
			Name: fmt.Sprintf("n%d", i), Created: day1,
			PodCIDRs:    []string{fmt.Sprintf("10.%d.%d.0/24", 32+i/256, i%256)},
			InternalIPs: []string{fmt.Sprintf("172.18.%d.%d", i/250, 1+i%250)},
		})
	}
	in.Facts.Routes[1].Dst = netip.MustParsePrefix("172.18.0.0/16")
	in.Facts.Local[1] = netip.MustParsePrefix("172.18.255.1/32")
	in.Nodes[0].InternalIPs = []string{"172.18.255.1"}
	return in
}

func TestLargeCluster(t *testing.T) {
	r := Make(clusterOf(5000))
	if len(r.Problems) != 0 || len(r.Peers) != 4999 {
		t.Fatalf("%d peers, problems %.5v", len(r.Peers), r.Problems)
	}
	if again := Make(withBefore(clusterOf(5000), r.Standing)); !maps.Equal(r.Destinations, again.Destinations) {
		t.Error("the same input planned twice differs")
	}
}

func BenchmarkMake5000(b *testing.B) {
	for name, in := range map[string]Input{"IPv4": clusterOf(5000), "IPv6": inSix(clusterOf(5000)), "both": withSix(clusterOf(5000))} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				Make(in)
			}
		})
	}
}

// The kernel takes no route with a source that the node does not have.
func TestAddressThatIsAwayIsNoSource(t *testing.T) {
	in := withBefore(input(node(1), node(2)), Make(input(node(1), node(2))).Standing)
	in.Facts.Local = prefixes("127.0.0.0/8", "172.18.0.200/32")
	r := Make(in)
	want := Route{Dst: netip.MustParsePrefix("10.244.2.0/24"), Via: netip.MustParseAddr("172.18.0.12"), Index: 2}
	if !slices.Contains(r.Routes, want) || r.Sources[wire.IPv4] != (wire.Addr{}) {
		t.Errorf("routes %v, source %v; want the route without a source", r.Routes, r.Sources)
	}
	if got := r.Standing.NodeIP(wire.IPv4).String(); got != "172.18.0.11" || r.NotReady != "" {
		t.Errorf("the node's address is %s, ready %v (%s)", got, r.NotReady == "", r.NotReady)
	}
	if diff := cmp.Diff([]string{"n1 refused"}, problems(r)); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
}

// Each address takes an entry of every node's map, so one Node has not as many as it likes.
func TestANodeHasFewAddresses(t *testing.T) {
	in := input(node(1), node(2), node(3))
	for i := range 2 * mostAddresses {
		in.Nodes[1].InternalIPs = append(in.Nodes[1].InternalIPs, fmt.Sprintf("198.51.100.%d", i))
	}
	r, usual := Make(in), Make(input(node(1), node(2), node(3)))
	if more := len(r.Destinations) - len(usual.Destinations); more != mostAddresses-1 {
		t.Errorf("%d more destinations", more)
	}
	if len(r.Problems) != 1 || r.Problems[0].Reason != Refused || r.Problems[0].Node != in.Nodes[1].Name || len(r.Peers) != 2 {
		t.Errorf("problems %v, peers %v", r.Problems, r.Peers)
	}
}

package plan

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
)

const stranger = "203.0.113.99" // behind the default gateway

// A Node's addresses are what its kubelet writes: those of others, of Services and of the world stay where they are.
func TestANodeTakesNobodysAddresses(t *testing.T) {
	young := func(addresses ...string) Node {
		return node(9).with(func(n *Node) { n.Created, n.InternalIPs = day2, addresses })
	}
	for name, tt := range map[string]struct {
		bad      Node
		problems []string
		says     string
		reached  bool // the bad node's pods are
	}{
		"besides its own":      {young("172.18.0.19", "172.18.0.12", "203.0.113.13"), []string{"n9 refused", "n9 refused"}, "InternalIP 172.18.0.12 is node n2's", true},
		"before its own":       {young("172.18.0.12", "172.18.0.19"), []string{"n9 refused"}, "InternalIP 172.18.0.12 is node n2's", true},
		"in its own's place":   {young("172.18.0.12"), []string{"n9 refused"}, "InternalIP 172.18.0.12 is node n2's", false},
		"of a far node":        {young("203.0.113.13"), []string{"n9 refused"}, "InternalIP 203.0.113.13 is node n3's", false},
		"n2's further one":     {young("172.18.0.19", "172.18.0.112"), []string{"n9 refused"}, "InternalIP 172.18.0.112 is node n2's", true},
		"a Service's":          {young("172.18.0.19", "10.96.0.10"), []string{"n9 refused"}, "InternalIP 10.96.0.10 is in the service CIDR 10.96.0.0/12", true},
		"a Service's alone":    {young("10.96.0.10"), []string{"n9 refused"}, "InternalIP 10.96.0.10 is in the service CIDR 10.96.0.0/12", false},
		"its own twice":        {young("172.18.0.19", "172.18.0.19"), nil, "", true},
		"the world's":          {young("172.18.0.19", stranger), nil, "", true},
		"the gateway's, IPv6s": {young("fd00::9", "172.18.0.19", "192.0.2.1"), nil, "", true},
		"an older node's that it is, of younger ones": {
			node(9).with(func(n *Node) { n.InternalIPs = []string{"172.18.0.19", "172.18.0.14"} }), []string{"n9 refused"}, "InternalIP 172.18.0.14 is node n4's", true,
		},
	} {
		for _, mode := range []RoutingMode{RouteDirect, RouteAuto, RouteVXLAN} {
			good := withService(apart(mode))
			good.Nodes[1].InternalIPs = append(good.Nodes[1].InternalIPs, "172.18.0.112")
			good.Nodes = append(good.Nodes, node(4).with(func(n *Node) { n.Created = day2 }))
			before := Make(good)
			in := good
			in.Nodes = append(slices.Clone(in.Nodes), tt.bad)
			r := Make(in)
			for k, v := range before.Destinations {
				if r.Destinations[k] != v {
					t.Errorf("%s, %s: %s was %+v, is %+v", name, mode, k.Netip(), v, r.Destinations[k])
				}
			}
			_, pods := r.Destinations[destinations.KeyFrom(netip.MustParsePrefix("10.244.9.0/24"))]
			_, service := r.Destinations[destinations.KeyFrom(netip.MustParsePrefix("10.96.0.10/32"))]
			if pods != tt.reached || service {
				t.Errorf("%s, %s: its podCIDR is in the destinations: %v; the Service's address: %v", name, mode, pods, service)
			}
			if v := r.Destinations[destinations.KeyFrom(netip.MustParsePrefix(stranger+"/32"))]; v.Way() == destinations.Tunnel {
				t.Errorf("%s, %s: pods' packets to %s go through the tunnel: %+v", name, mode, stranger, v)
			}
			added := slices.DeleteFunc(problems(r), func(p string) bool { return slices.Contains(problems(before), p) })
			if diff := cmp.Diff(tt.problems, added, cmp.Comparer(func(a, b []string) bool { return slices.Equal(a, b) })); diff != "" ||
				!strings.Contains(text(r.Problems), tt.says) {
				t.Errorf("%s, %s: problems (-want +got):\n%s\n%v, want %q", name, mode, diff, r.Problems, tt.says)
			}
		}
	}
}

// Of two Nodes that are reached by one address the older one is.
func TestOneAddressTwice(t *testing.T) {
	in := input(node(1), node(2), node(3).with(func(n *Node) { n.InternalIPs, n.Created = []string{"172.18.0.12"}, day1.Add(-1) }))
	r := Make(in)
	if len(r.Peers) != 1 || r.Peers[0].Name != "n3" || !slices.Equal(problems(r), []string{"n2 refused"}) {
		t.Errorf("peers %+v, problems %v", r.Peers, r.Problems)
	}
}

// A --service-cidr that covers the nodes is a mistake that cuts off no node at work.
func TestServiceCIDRCoversTheNodes(t *testing.T) {
	before := Make(input(node(1), node(2)))
	in := input(node(1), node(2), node(3))
	in.Service, in.Before = prefixes("172.18.0.0/16"), before.Standing
	r := Make(in)
	got := dump(r)
	for p, v := range dump(before) {
		if got[p] != v {
			t.Errorf("what stood was hurt: %s is %q, want %q", p, got[p], v)
		}
	}
	if _, there := got["172.18.0.13/32"]; there || !slices.Equal(problems(r), []string{"n2 refused", "n3 refused"}) ||
		!strings.Contains(text(r.Problems), "--service-cidr") {
		t.Errorf("a new node is believed: %v; problems %v", there, r.Problems)
	}
}

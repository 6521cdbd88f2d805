package plan

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Nothing of IPv6 is looked at or planned for in a cluster of IPv4, whatever the nodes have besides.
func TestOneFamilyIsLeftAlone(t *testing.T) {
	in := dual(RouteAuto, func(in *Input) {
		for i := range in.Nodes {
			withoutSecond(&in.Nodes[i].PodCIDRs)
		}
	})
	alone := apart(RouteAuto)
	opt := cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})
	want := Make(alone)
	for _, first := range []string{"IPv4", "IPv6"} {
		if Used(in.Self, in.Nodes, Standing{}, FamilySet{}) != (FamilySet{wire.IPv4: true}) {
			t.Errorf("%s first: IPv6 counts as used", first)
		}
		r := Make(in)
		if diff := cmp.Diff(want.Destinations, r.Destinations, opt) + cmp.Diff(want.Routes, r.Routes, opt) + cmp.Diff(want.Peers, r.Peers, opt); diff != "" {
			t.Errorf("%s first: (-IPv4 alone +with IPv6 on the nodes):\n%s", first, diff)
		}
		if r.Missing != (Result{}).Missing || len(r.Problems) != len(want.Problems) {
			t.Errorf("%s first: missing %q, problems %v", first, r.Missing, r.Problems)
		}
		for i := range in.Nodes {
			slices.Reverse(in.Nodes[i].InternalIPs)
		}
	}
}

// In a cluster of IPv4 a Node that has IPv6 alone, with pods or without, is off every link of those that have IPv4, and changes
// nothing else for them.
func TestNodeOfAnotherFamily(t *testing.T) {
	for _, pods := range [][]string{nil, {"10.244.3.0/24"}} {
		in := dual(RouteAuto, func(in *Input) {
			for i := range in.Nodes {
				withoutSecond(&in.Nodes[i].PodCIDRs)
			}
			in.Nodes[2].PodCIDRs, in.Nodes[2].InternalIPs = pods, in.Nodes[2].InternalIPs[1:]
		})
		r := Make(in)
		for k := range r.Destinations {
			if a := k.Netip().Addr(); a.Is6() {
				t.Errorf("destinations has %s", a)
			}
		}
		said := slices.ContainsFunc(r.Problems, func(p Problem) bool {
			return p.Node == "n3" && p.Reason == OffLink && strings.Contains(p.Text, "has no IPv4 InternalIP")
		})
		if !said || r.NotReady != "" || !r.Peers[1].Address.IsValid() {
			t.Errorf("problems %v, peers %+v, not ready: %q", r.Problems, r.Peers, r.NotReady)
		}
		if v := r.Destinations[destinations.KeyFrom(netip.MustParsePrefix("10.244.3.0/24"))]; pods != nil && (v.Kind != destinations.PodCIDR || v.Way() != destinations.None) {
			t.Errorf("its podCIDR: %+v", v)
		}
	}
}

// Pods of IPv4 on nodes of IPv6: the tunnel is the only way.
func TestPodsOfAnotherFamilyThanTheNodes(t *testing.T) {
	for _, mode := range []RoutingMode{RouteDirect, RouteAuto, RouteVXLAN} {
		in := dual(mode, func(in *Input) {
			for i := range in.Nodes {
				withoutSecond(&in.Nodes[i].PodCIDRs)
				in.Nodes[i].InternalIPs = in.Nodes[i].InternalIPs[1:]
			}
		})
		r := Make(in)
		v := r.Destinations[destinations.KeyFrom(netip.MustParsePrefix("10.244.2.0/24"))]
		byTunnel := v.Way() == destinations.Tunnel && v.Node.String() == secondNear && v.MTU == 1430 && r.MTU == 1430
		if byTunnel == (mode == RouteDirect) || (r.NotReady == "") == (mode == RouteDirect) {
			t.Errorf("%s: %+v, pods' MTU %d, not ready: %q", mode, v, r.MTU, r.NotReady)
		}
	}
}

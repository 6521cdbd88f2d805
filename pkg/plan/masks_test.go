package plan

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
)

// Through which uplinks there is a route: bits of eth0 (0), eth1 (3) and eth2 (63).
func TestUplinkMasks(t *testing.T) {
	const eth0, eth1, eth2 = 1 << 0, 1 << 3, 1 << 63
	route := func(dst string, index uint32, hops ...uint32) KernelRoute {
		return KernelRoute{Dst: netip.MustParsePrefix(dst), Index: index, OnLink: index != 0, Hops: hops}
	}
	in := input(node(1), node(2), node(3), node(4).with(func(n *Node) { n.InternalIPs = []string{"192.0.2.4"} }))
	in.Facts.Uplinks = append(in.Facts.Uplinks, Link{Index: 3, Name: "eth1", MTU: 1500, Bit: 3}, Link{Index: 4, Name: "eth2", Bit: 63})
	in.Native = prefixes("10.99.0.0/16", "10.98.0.0/16")
	in.Facts.Routes = []KernelRoute{
		route("0.0.0.0/0", 2), route("0.0.0.0/0", 3), // of different metrics
		route("172.18.0.0/24", 2),
		route("172.18.0.13/32", 0, 2, 3), // several next hops
		route("10.244.3.128/25", 4),      // somebody else's
		route("10.99.7.0/24", 4), route("10.98.0.0/15", 4),
	}
	in.Facts.Others = []KernelRoute{{Dst: netip.MustParsePrefix("172.18.0.0/16"), Index: 4, Table: 77}}
	got := map[string]uint64{}
	for k, v := range Make(in).Destinations {
		if v.Uplinks != 0 {
			got[k.Netip().String()] = v.Uplinks
		}
	}
	want := map[string]uint64{
		"172.18.0.12/32": eth0 | eth2, "10.244.2.0/24": eth0 | eth2,
		"172.18.0.13/32": eth0 | eth1 | eth2, "10.244.3.0/24": eth0 | eth1 | eth2,
		"192.0.2.4/32": eth0 | eth1, "10.244.4.0/24": eth0 | eth1,
		"10.99.0.0/16": eth2, "10.98.0.0/16": eth2,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A route that leads over no uplink stands in the way of wider ones.
func TestMaskOfARouteElsewhere(t *testing.T) {
	in := input(node(1), node(2))
	in.Facts.Routes = append(in.Facts.Routes, KernelRoute{Dst: netip.MustParsePrefix("172.18.0.12/32"), Index: 77})
	if v := Make(in).Destinations[destinations.KeyFrom(netip.MustParsePrefix("172.18.0.12/32"))]; v.Uplinks != 0 || v.Ifindex != 0 {
		t.Errorf("%+v", v)
	}
}

func TestNodesHaveAnInterface(t *testing.T) {
	v := Make(input(node(1), node(2))).Destinations[destinations.KeyFrom(netip.MustParsePrefix("172.18.0.12/32"))]
	if v.Kind != destinations.Node || v.Ifindex != 2 || v.Uplinks != 1 {
		t.Errorf("%+v", v)
	}
}

// What is everybody's on a link, and what was this node's a moment ago, is this node's.
func TestAddressesOfTheNodeThatAreNotLocal(t *testing.T) {
	in := input(node(1), node(2))
	in.Facts.Broadcast = prefixes("172.18.0.255/32", "172.18.0.12/32")
	in.Facts.Recent = []Recent{{netip.MustParseAddr("172.18.0.50"), 7}, {netip.MustParseAddr("172.18.0.12"), 7}}
	got := dump(Make(in))
	for p, want := range map[string]string{"172.18.0.255/32": "host", "172.18.0.50/32": "host", "172.18.0.12/32": "node"} {
		if got[p] != want {
			t.Errorf("%s is %q, want %q", p, got[p], want)
		}
	}
}

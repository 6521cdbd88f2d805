package plan

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

const tunnelIndex = 9

// A default route that is missing for a moment changes no way. That pods behind it can't be reached is said at once.
func TestWaysWithoutTheDefaultRoute(t *testing.T) {
	in := apart(RouteAuto)
	before := Make(in)
	in.Before, in.Facts.Routes = before.Standing, in.Facts.Routes[1:]
	now := Make(in)
	if !maps.Equal(before.Destinations, now.Destinations) || !slices.Equal(before.Routes, now.Routes) {
		t.Error(cmp.Diff(dump(before), dump(now)))
	}
	if len(now.Problems) != 1 || now.Problems[0].Reason != OffLink || !strings.Contains(now.Problems[0].Text, "leads to InternalIP 203.0.113.13") {
		t.Errorf("problems %v", now.Problems)
	}
	in.Facts.Routes = append(in.Facts.Routes, KernelRoute{Dst: netip.MustParsePrefix("0.0.0.0/0"), Unreachable: true})
	if again := Make(in); !maps.Equal(before.Destinations, again.Destinations) {
		t.Errorf("with an unreachable route in its place: %s", cmp.Diff(dump(before), dump(again)))
	}
	in.Facts.Routes = append(in.Facts.Routes, KernelRoute{Dst: netip.MustParsePrefix("0.0.0.0/0"), Index: 7})
	if p := Make(in).Peers[1]; p.Way != destinations.None {
		t.Errorf("with a default route over no uplink the way is %s", p.Way)
	}
}

// apart is node 1 with a node on its link and one behind the default gateway.
func apart(mode RoutingMode) Input {
	in := input(node(1), node(2), node(3).with(func(n *Node) { n.InternalIPs = []string{"203.0.113.13"} }))
	in.Mode, in.Facts.Tunnel = mode, tunnelIndex
	return in
}

// wayTo is how a plan gets to a node's pods, with the route that the host itself takes.
func wayTo(r Result, p Peer) (destinations.Value, Route) {
	i := slices.IndexFunc(r.Routes, func(route Route) bool { return route.Dst == p.PodCIDRs[0] })
	return r.Destinations[destinations.KeyFrom(p.PodCIDRs[0])], r.Routes[i]
}

// withoutEthernet are links of which some are no uplinks, so that no program reads them. bareUplink is one that is.
var (
	withoutEthernet = map[uint32]Link{7: {Index: 7, Name: "wg0", MTU: 1420, Bare: true}, 8: {Index: 8, Name: "tailscale0", MTU: 1280, Bare: true}}
	bareUplink      = Link{Index: 7, Name: "wg0", MTU: 1420, Bare: true, Bit: 5}
)

// What comes from a node that is reached over no Ethernet comes by that link and the tunnel, and by no uplink.
func TestArrivalsOverNoEthernet(t *testing.T) {
	in := apart(RouteAuto)
	in.Facts.NotEthernet = withoutEthernet
	far := KernelRoute{Dst: netip.MustParsePrefix("203.0.113.13/32"), Index: 7, OnLink: true}
	in.Facts.Routes = append(in.Facts.Routes, far)
	r := Make(in)
	for _, p := range []netip.Prefix{far.Dst, r.Peers[1].PodCIDRs[0]} {
		mask := r.Destinations[destinations.KeyFrom(p)].Uplinks
		for _, l := range in.Facts.Uplinks {
			if mask == 0 || mask&(1<<l.Bit) != 0 {
				t.Errorf("%s may come by the uplinks %b, %s among them", p, mask, l.Name)
			}
		}
	}
	// Where the link is an uplink, they come by that one.
	apart := in
	apart.Facts.Uplinks = append(slices.Clone(in.Facts.Uplinks), bareUplink)
	r = Make(apart)
	for _, p := range []netip.Prefix{far.Dst, r.Peers[1].PodCIDRs[0]} {
		if mask := r.Destinations[destinations.KeyFrom(p)].Uplinks; mask != 1<<bareUplink.Bit {
			t.Errorf("%s may come by the uplinks %b", p, mask)
		}
	}
	if v := r.Uplinks[uplinks.Key{Ifindex: 7}]; v.Flags != uplinks.Bare {
		t.Errorf("the uplink is %+v", v)
	}
	// The default route leads there by an uplink, and says less than the other table.
	in.Facts.Routes, in.Facts.Others = in.Facts.Routes[:len(in.Facts.Routes)-1], []KernelRoute{far}
	in.Facts.Others[0].Table = 52
	if mask := Make(in).Destinations[destinations.KeyFrom(far.Dst)].Uplinks; mask != 1<<noUplink {
		t.Errorf("by another table it may come by %b", mask)
	}
	in.Facts.InPart = map[int]bool{52: true}
	if r := Make(in); r.Destinations[destinations.KeyFrom(far.Dst)].Uplinks != 1 || r.Destinations[destinations.KeyFrom(far.Dst)].MTU != 1450 {
		t.Errorf("a table that takes a mark counts: %+v", r.Destinations[destinations.KeyFrom(far.Dst)])
	}
	// The VPN's route is gone, and an unreachable one keeps its packets from the default route.
	in.Facts.Routes, in.Facts.Others, in.Facts.InPart = append(in.Facts.Routes, KernelRoute{Dst: far.Dst, Unreachable: true}), nil, nil
	if mask := Make(in).Destinations[destinations.KeyFrom(far.Dst)].Uplinks; mask != 1<<noUplink {
		t.Errorf("beside an unreachable route it may come by %b", mask)
	}
	in.Facts.Routes[len(in.Facts.Routes)-1] = far
	// A route over an uplink as well may be the one that the node takes.
	in.Facts.Routes = append(in.Facts.Routes, KernelRoute{Dst: far.Dst, Index: in.Facts.Uplinks[0].Index})
	if mask := Make(in).Destinations[destinations.KeyFrom(far.Dst)].Uplinks; mask != 1<<in.Facts.Uplinks[0].Bit {
		t.Errorf("beside a route over an uplink it may come by %b", mask)
	}
}

// The default route of a VPN's own table, to which a rule leads some packets only or those of a source, decides on nothing between nodes: neither
// on who may send as a node, nor on the MTU.
func TestVPNsDefaultRoute(t *testing.T) {
	for _, mode := range []RoutingMode{RouteAuto, RouteVXLAN, RouteDirect} {
		in := apart(mode)
		want := Make(in)
		in.Facts.NotEthernet = withoutEthernet
		narrow := bareUplink
		narrow.MTU = 1280
		in.Facts.Uplinks = append(slices.Clone(in.Facts.Uplinks), narrow)
		in.Facts.Routes = append(in.Facts.Routes, KernelRoute{Dst: netip.MustParsePrefix("10.77.0.0/24"), Index: 7, OnLink: true})
		for _, all := range everything {
			in.Facts.Others = append(in.Facts.Others, KernelRoute{Dst: all, Index: 7, Table: 100})
		}
		for name, part := range map[string]map[int]bool{"all packets": nil, "some packets": {100: true}} {
			in.Facts.InPart = part
			got := Make(in)
			if got.MTU != want.MTU || got.Missing != want.Missing {
				t.Errorf("%s, %s: MTU %d, missing %q; want %d, %q", mode, name, got.MTU, got.Missing, want.MTU, want.Missing)
			}
			for k, v := range want.Destinations {
				if v.Kind != destinations.Node && v.Kind != destinations.PodCIDR {
					continue
				}
				if g := got.Destinations[k]; g.Uplinks != v.Uplinks || g.MTU != v.MTU {
					t.Errorf("%s, %s: %v may come by %b with MTU %d, want %b with %d", mode, name, k, g.Uplinks, g.MTU, v.Uplinks, v.MTU)
				}
			}
		}
	}
}

// A node that is reached over a narrow VPN takes IPv6 from no pod: it is off link where pods have IPv6, and says why.
func TestNarrowOverNoEthernet(t *testing.T) {
	for _, family := range []wire.Family{wire.IPv4, wire.IPv6} {
		in := apart(RouteAuto)
		if family == wire.IPv6 {
			in = dual(RouteAuto, func(*Input) {})
		}
		in.Facts.Routes = append(in.Facts.Routes, KernelRoute{Dst: netip.MustParsePrefix("203.0.113.13/32"), Index: 8, OnLink: true})
		in.Facts.NotEthernet = withoutEthernet
		r := Make(in)
		says := strings.Contains(text(r.Problems), "tailscale0, whose MTU of 1280 is less than the 1330 bytes")
		if is := r.Peers[1].Way == destinations.None; is != (family == wire.IPv6) || says != is || r.Missing[wire.IPv6] != "" {
			t.Errorf("with pods of %v the way is %s, problems %v, missing %q", family, r.Peers[1].Way, r.Problems, r.Missing)
		}
	}
}

func TestWays(t *testing.T) {
	const direct, tunnel, none = destinations.Direct, destinations.Tunnel, destinations.None
	for _, tt := range []struct {
		name      string
		mode      RoutingMode
		change    func(*Input)
		near, far destinations.Way
		mtu       uint32 // of what goes through the tunnel
		pods      int    // the MTU of new pods
		says      string // of the far node, if there is no way there
	}{
		{"direct", RouteDirect, func(*Input) {}, direct, none, 0, 1500, "not on the link of an uplink"},
		{"auto", RouteAuto, func(*Input) {}, direct, tunnel, 1450, 1450, ""},
		{"vxlan", RouteVXLAN, func(*Input) {}, tunnel, tunnel, 1450, 1450, ""},
		{"no device, auto", RouteAuto, func(in *Input) { in.Facts.Tunnel = 0 }, direct, none, 0, 1450, "no tunnel device"},
		{"no device, vxlan", RouteVXLAN, func(in *Input) { in.Facts.Tunnel = 0 }, none, none, 0, 1450, "no tunnel device"},
		{"no route, auto", RouteAuto, func(in *Input) { in.Facts.Routes = in.Facts.Routes[1:] }, direct, none, 0, 1450, "no route"},
		{"no route, vxlan", RouteVXLAN, func(in *Input) { in.Facts.Routes = in.Facts.Routes[1:] }, tunnel, none, 1450, 1450, "no route"},
		{"a route over no uplink", RouteAuto, func(in *Input) {
			in.Facts.Routes = append(in.Facts.Routes, KernelRoute{Dst: netip.MustParsePrefix("203.0.113.0/24"), Index: 7})
		}, direct, none, 0, 1450, "no route"},
		{"over no Ethernet", RouteAuto, func(in *Input) {
			in.Facts.Routes = append(in.Facts.Routes, KernelRoute{Dst: netip.MustParsePrefix("203.0.113.13/32"), Index: 7, OnLink: true})
			in.Facts.NotEthernet = withoutEthernet
		}, direct, tunnel, 1370, 1370, ""},
		{"over no Ethernet, a narrow route", RouteAuto, func(in *Input) {
			in.Facts.Routes = append(in.Facts.Routes, KernelRoute{Dst: netip.MustParsePrefix("203.0.113.13/32"), Index: 7, OnLink: true, MTU: 1300})
			in.Facts.NotEthernet = withoutEthernet
		}, direct, tunnel, 1250, 1250, ""},
		{"over no Ethernet, the narrower of two", RouteAuto, func(in *Input) {
			in.Facts.Routes[0] = KernelRoute{Dst: netip.MustParsePrefix("0.0.0.0/0"), Hops: []uint32{7, 8}}
			in.Facts.NotEthernet = withoutEthernet
		}, direct, tunnel, 1230, 1230, ""},
		{"over no Ethernet and Ethernet, the narrower of both", RouteAuto, func(in *Input) {
			in.Facts.Uplinks[0].MTU = 1400
			in.Facts.Routes[0] = KernelRoute{Dst: netip.MustParsePrefix("0.0.0.0/0"), Hops: []uint32{7, in.Facts.Uplinks[0].Index}}
			in.Facts.NotEthernet = withoutEthernet
		}, direct, tunnel, 1350, 1350, ""},
		{"over no Ethernet, too narrow", RouteAuto, func(in *Input) {
			in.Facts.Routes = append(in.Facts.Routes, KernelRoute{Dst: netip.MustParsePrefix("203.0.113.13/32"), Index: 7, OnLink: true, MTU: 50})
			in.Facts.NotEthernet = withoutEthernet
		}, direct, none, 0, 1450, "none with room"},
		{"over no Ethernet, direct", RouteDirect, func(in *Input) {
			in.Facts.Routes[0].Index = 7
			in.Facts.NotEthernet = withoutEthernet
		}, direct, none, 0, 1500, "203.0.113.13 is reached over wg0, which is no Ethernet interface"},
		{"over an uplink without Ethernet", RouteAuto, func(in *Input) {
			in.Facts.Routes = append(in.Facts.Routes, KernelRoute{Dst: netip.MustParsePrefix("203.0.113.13/32"), Index: 7, OnLink: true})
			in.Facts.NotEthernet, in.Facts.Uplinks = withoutEthernet, append(in.Facts.Uplinks, bareUplink)
		}, direct, tunnel, 1370, 1370, ""},
		{"over an uplink without Ethernet, direct", RouteDirect, func(in *Input) {
			in.Facts.Routes = append(in.Facts.Routes, KernelRoute{Dst: netip.MustParsePrefix("203.0.113.13/32"), Index: 7, OnLink: true})
			in.Facts.NotEthernet, in.Facts.Uplinks = withoutEthernet, append(in.Facts.Uplinks, bareUplink)
		}, direct, none, 0, 1500, "203.0.113.13 is reached over wg0, which is no Ethernet interface"},
		{"over no Ethernet by a rule", RouteAuto, func(in *Input) {
			in.Facts.Others = []KernelRoute{{Dst: netip.MustParsePrefix("203.0.113.13/32"), Hops: []uint32{7}, Table: 52}}
			in.Facts.NotEthernet = withoutEthernet
		}, direct, tunnel, 1370, 1370, ""},
		{"a default route by a rule", RouteAuto, func(in *Input) {
			in.Facts.Routes[0].Table, in.Facts.Others, in.Facts.Routes = 7, in.Facts.Routes[:1:1], in.Facts.Routes[1:]
		}, direct, tunnel, 1450, 1450, ""},
		{"a narrow uplink", RouteAuto, func(in *Input) { in.Facts.Uplinks[0].MTU = 1400 }, direct, tunnel, 1350, 1350, ""},
		{"a narrow route", RouteAuto, func(in *Input) { in.Facts.Routes[0].MTU = 1300 }, direct, tunnel, 1250, 1250, ""},
		{"an uplink too narrow", RouteAuto, func(in *Input) { in.Facts.Routes[0].MTU = 50 }, direct, none, 0, 1450, "none with room"},
		{"two uplinks to the far node", RouteAuto, func(in *Input) {
			in.Facts.Uplinks = append(in.Facts.Uplinks, Link{Index: 3, Name: "eth1", MTU: 1420, Bit: 1})
			in.Facts.Routes[0] = KernelRoute{Dst: netip.MustParsePrefix("0.0.0.0/0"), Hops: []uint32{2, 3}}
		}, direct, tunnel, 1370, 1370, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := apart(tt.mode)
			tt.change(&in)
			r := Make(in)
			if crossed := r.Crossed["eth0"]; crossed != (tt.near == tunnel) {
				t.Errorf("nodes on the link that are reached by tunnel: %v", crossed)
			}
			if r.MTU != tt.pods {
				t.Errorf("pods get MTU %d, want %d", r.MTU, tt.pods)
			}
			for i, want := range []destinations.Way{tt.near, tt.far} {
				peer := r.Peers[i]
				v, route := wayTo(r, peer)
				address := r.Destinations[destinations.KeyFrom(host(peer.Address))]
				if v.Way() != want || peer.Way != want || v.Node != wire.AddrFrom(peer.Address) || address.Node != v.Node {
					t.Errorf("%s is reached %s, %+v, its address %+v; want %s", peer.Name, peer.Way, v, address, want)
				}
				byTunnel := Route{Dst: v0(peer), Src: r.Sources[wire.IPv4].Netip(), Index: tunnelIndex, MTU: tt.mtu}
				switch want {
				case tunnel:
					if route != byTunnel || v.MTU != tt.mtu || v.Ifindex != 0 || address.Flags != destinations.ByTunnel || address.MTU != tt.mtu {
						t.Errorf("%s: route %+v, want %+v; %+v, its address %+v", peer.Name, route, byTunnel, v, address)
					}
				case none:
					if route != (Route{Dst: v0(peer)}) || address.Flags != 0 {
						t.Errorf("%s: route %+v, want an unreachable one; its address %+v", peer.Name, route, address)
					}
				default:
					if route.Via != peer.Address || route.MTU != 0 || v.MTU != in.Facts.Uplinks[0].MTU || address.Flags != 0 {
						t.Errorf("%s: route %+v, %+v, its address %+v", peer.Name, route, v, address)
					}
				}
			}
			if said := strings.Contains(text(r.Problems), tt.says); !said || (tt.far == none) != slices.Contains(problems(r), "n3 off_link") {
				t.Errorf("problems %v, want %q of n3", r.Problems, tt.says)
			}
		})
	}
}

func v0(p Peer) netip.Prefix { return p.PodCIDRs[0] }

func text(all []Problem) string {
	var b strings.Builder
	for _, p := range all {
		b.WriteString(p.String() + "\n")
	}
	return b.String()
}

// The far end compares a packet's source with one address, whichever of its node it is. What is sent to the others goes
// where routes lead: that they are the node's, only the node says.
func TestTunnelGoesToOneAddressOfANode(t *testing.T) {
	in := apart(RouteAuto)
	in.Nodes[2].InternalIPs = append(in.Nodes[2].InternalIPs, "172.18.0.77") // on our link
	r := Make(in)
	for address, want := range map[string]destinations.Value{
		"203.0.113.13": {Flags: destinations.ByTunnel, MTU: 1450},
		"172.18.0.77":  {Ifindex: 2},
	} {
		want.Kind, want.Node, want.Uplinks = destinations.Node, wire.AddrFrom(netip.MustParseAddr("203.0.113.13")), 1
		if v := r.Destinations[destinations.KeyFrom(host(netip.MustParseAddr(address)))]; v != want {
			t.Errorf("%s: %+v, want %+v", address, v, want)
		}
	}
}

// What the programs need in order to understand others is there in every mode.
func TestTunnelOfThisNode(t *testing.T) {
	for _, mode := range []RoutingMode{RouteDirect, RouteVXLAN, RouteAuto} {
		r := Make(apart(mode))
		address := r.Destinations[destinations.KeyFrom(netip.MustParsePrefix("10.244.1.0/32"))]
		if c := r.Config; c.TunnelIfindex != tunnelIndex || c.Tunnel[wire.IPv4].Source.String() != "172.18.0.11" || c.Tunnel[wire.IPv4].Address.String() != "10.244.1.0" ||
			address.Kind != destinations.Host {
			t.Errorf("%s: config %+v, the device's address %+v", mode, c, address)
		}
	}
	for name, tt := range map[string]struct {
		change          func(*Input)
		source, address string
	}{
		"no device":               {func(in *Input) { in.Facts.Tunnel = 0 }, "-", "-"},
		"the InternalIP is away":  {func(in *Input) { in.Facts.Local = in.Facts.Local[:1] }, "-", "10.244.1.0"},
		"a podCIDR of two pods":   {func(in *Input) { in.Nodes[0].PodCIDRs = []string{"10.244.1.0/31"} }, "172.18.0.11", "-"},
		"a podCIDR of four":       {func(in *Input) { in.Nodes[0].PodCIDRs = []string{"10.244.1.4/30"} }, "172.18.0.11", "10.244.1.4"},
		"a pod has the address":   {func(in *Input) { in.Facts.Endpoints = []netip.Addr{netip.MustParseAddr("10.244.1.0")} }, "172.18.0.11", "-"},
		"no podCIDR of this node": {func(in *Input) { in.Nodes = in.Nodes[1:] }, "-", "-"},
	} {
		in := apart(RouteAuto)
		tt.change(&in)
		c := Make(in).Config
		if c.Tunnel[wire.IPv4].Source.String() != tt.source || c.Tunnel[wire.IPv4].Address.String() != tt.address {
			t.Errorf("%s: source %s, address %s; want %s and %s", name, c.Tunnel[wire.IPv4].Source, c.Tunnel[wire.IPv4].Address, tt.source, tt.address)
		}
	}
}

// A node that moves is followed, and without a list nothing changes.
func TestWaysFollow(t *testing.T) {
	first := Make(apart(RouteAuto))
	in := apart(RouteAuto)
	in.Before = first.Standing
	in.Nodes[1].InternalIPs, in.Nodes[2].InternalIPs = []string{"203.0.113.12"}, []string{"172.18.0.13"}
	r := Make(in)
	if r.Peers[0].Way != destinations.Tunnel || r.Peers[1].Way != destinations.Direct || len(r.Problems) != 0 {
		t.Errorf("peers %+v, problems %v", r.Peers, r.Problems)
	}
	for _, mode := range []RoutingMode{RouteAuto, RouteVXLAN} {
		unknown := apart(mode)
		first := Make(unknown)
		unknown.Known, unknown.Before = false, first.Standing
		again := Make(unknown)
		if diff := cmp.Diff(dump(first), dump(again)) + cmp.Diff(first.Crossed, again.Crossed); diff != "" {
			t.Errorf("%s, after a restart, before the first list (-before +after):\n%s", mode, diff)
		}
	}
}

// The MTU of pods that start while the way to a node is away for a moment is what it was.
func TestMTUWithoutAWayForAMoment(t *testing.T) {
	for _, mode := range []RoutingMode{RouteVXLAN, RouteAuto, RouteDirect} {
		first := Make(apart(mode))
		in := apart(mode)
		in.Before, in.Facts.Routes = first.Standing, nil
		in.Facts.Uplinks[0].Away = true
		if r := Make(in); r.MTU != first.MTU {
			t.Errorf("%s: MTU %d, while the routes are away %d", mode, first.MTU, r.MTU)
		}
	}
	alone := input(node(1), node(2)) // on our link
	alone.Mode, alone.Facts.Tunnel = RouteAuto, tunnelIndex
	first := Make(alone)
	alone.Before, alone.Facts.Routes, alone.Facts.Uplinks[0].Away = first.Standing, nil, true
	if r := Make(alone); first.MTU != 1500 || r.MTU != 1500 {
		t.Errorf("without the tunnel: MTU %d, while the routes are away %d", first.MTU, r.MTU)
	}
	empty := input(node(1))
	empty.Mode = RouteVXLAN
	if r := Make(empty); r.MTU != 1450 {
		t.Errorf("the first node of a cluster gives its pods MTU %d", r.MTU)
	}
}

// A node whose end of the tunnel takes no frame but to its own address keeps that while Nodes are not known, too.
func TestTunnelMACs(t *testing.T) {
	mac := wire.MAC{2, 0, 0, 0, 0, 7}
	in := apart(RouteAuto)
	for i := range in.Nodes {
		in.Nodes[i].TunnelMACs[wire.IPv4] = mac
	}
	known := Make(in)
	in.Known, in.Before = false, known.Standing
	for name, r := range map[string]Result{"known": known, "not known": Make(in)} {
		for i, want := range []wire.MAC{{}, mac} { // directly, the kernel knows the neighbour's
			peer := known.Peers[i]
			pods, node := r.Destinations[destinations.KeyFrom(peer.PodCIDRs[0])], r.Destinations[destinations.KeyFrom(host(peer.Address))]
			if pods.MAC != want || node.MAC != want || pods.Kind != destinations.PodCIDR || node.Kind != destinations.Node {
				t.Errorf("%s: frames to node %s go to %s, to its pods to %s, want %s", name, peer.Name, node.MAC, pods.MAC, want)
			}
		}
	}
}

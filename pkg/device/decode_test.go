package device

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// TestListsAreTheKernels compares what is decoded here with what package netlink makes of the same network.
func TestListsAreTheKernels(t *testing.T) {
	h, _ := inside(t)
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "one", MTU: 1400}, PeerName: "two"}
	must(t, netlink.LinkAdd(veth))
	must(t, netlink.LinkAdd(&netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "tun"}, Mode: netlink.TUNTAP_MODE_TUN}))
	must(t, netlink.LinkAdd(&netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "tap"}, Mode: netlink.TUNTAP_MODE_TAP}))
	for name, address := range map[string]string{"one": "10.1.0.1/24", "two": "10.2.0.1/24"} {
		l, err := netlink.LinkByName(name)
		must(t, err)
		must(t, netlink.LinkSetUp(l))
		a, err := netlink.ParseAddr(address)
		must(t, err)
		must(t, netlink.AddrAdd(l, a))
		must(t, netlink.AddrAdd(l, &netlink.Addr{IPNet: ipNet(netip.MustParsePrefix(address)), Label: name + ":2", Peer: ipNet(netip.MustParsePrefix("10.3.0.9/32"))}))
	}
	one, err := netlink.LinkByName("one")
	must(t, err)
	two, err := netlink.LinkByName("two")
	must(t, err)
	first, second := one.Attrs().Index, two.Attrs().Index
	must(t, netlink.RouteAdd(&netlink.Route{Dst: ipNet(netip.MustParsePrefix("0.0.0.0/0")), MultiPath: []*netlink.NexthopInfo{{LinkIndex: first, Gw: net.ParseIP("10.1.0.9")}, {LinkIndex: second, Gw: net.ParseIP("10.2.0.9")}}}))
	must(t, netlink.RouteAdd(&netlink.Route{Dst: ipNet(netip.MustParsePrefix("10.9.0.0/16")), LinkIndex: first, Gw: net.ParseIP("10.1.0.8"), Priority: 7, MTU: 1300, AdvMSS: 1200, Tos: 8, Protocol: 186}))
	unnumbered := &netlink.Via{AddrFamily: unix.AF_INET6, Addr: net.ParseIP("fe80::9")}
	must(t, netlink.RouteAdd(&netlink.Route{Dst: ipNet(netip.MustParsePrefix("10.6.0.0/16")), LinkIndex: first, Via: unnumbered}))
	must(t, netlink.RouteAdd(&netlink.Route{Dst: ipNet(netip.MustParsePrefix("10.5.0.0/16")), MultiPath: []*netlink.NexthopInfo{{LinkIndex: first, Via: unnumbered}, {LinkIndex: second, Gw: net.ParseIP("10.2.0.9")}}}))
	encap := &netlink.SEG6Encap{Mode: nl.SEG6_IPTUN_MODE_ENCAP, Segments: []net.IP{net.ParseIP("2001:db8::5")}}
	must(t, netlink.RouteAdd(&netlink.Route{Dst: ipNet(netip.MustParsePrefix("10.4.0.0/16")), LinkIndex: first, Encap: encap}))
	must(t, h.ReplaceRoute(Route{Dst: netip.MustParsePrefix("10.8.0.0/16"), Unreachable: true}))
	must(t, h.ReplaceRoute(Route{Dst: netip.MustParsePrefix("2001:db8:8::/48"), Index: first}))
	must(t, h.ReplaceRoute(Route{Dst: netip.MustParsePrefix("10.7.0.0/16"), Index: first, Table: 300}))
	must(t, h.ReplaceNeighbour(first, netip.MustParseAddr("10.1.0.8"), net.HardwareAddr{2, 0, 0, 0, 0, 8}))
	sorted := cmp.Options{
		cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}),
		cmpopts.SortSlices(func(a, b Route) bool { return a.Dst.String() < b.Dst.String() }),
		cmpopts.SortSlices(func(a, b netip.Prefix) bool { return a.String() < b.String() }),
	}
	same := func(what string, want, have any, err error) {
		t.Helper()
		if diff := cmp.Diff(want, have, sorted); diff != "" || err != nil {
			t.Errorf("%s: error %v, -netlink +decoded:\n%s", what, err, diff)
		}
	}
	var links []Link
	all, err := h.nl.LinkList()
	must(t, err)
	for _, l := range all {
		c := convert(l)
		c.Flags &= net.FlagUp | net.FlagLoopback
		if c.Kind == "tuntap" { // to the kernel it is tun
			c.Kind = "tun"
		}
		links = append(links, c)
	}
	have, err := h.Links()
	same("links", links, have, err)
	for _, l := range have {
		if ethernet := slices.Contains([]string{"one", "two", "tap"}, l.Name); l.Ethernet() != ethernet || l.Bare != (l.Name == "tun") {
			t.Errorf("%s: that packets have an Ethernet header %t, or none %t", l.Name, l.Ethernet(), l.Bare)
		}
	}
	var four, six, policy []Route
	for table, into := range map[int]*[]Route{unix.RT_TABLE_MAIN: &four, 300: &policy} {
		found, err := h.nl.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE)
		must(t, err)
		for _, r := range found {
			*into = append(*into, asDecoded(r))
		}
	}
	found, err := h.nl.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{}, 0)
	must(t, err)
	for _, r := range found {
		six = append(six, asDecoded(r))
	}
	both, err := h.Routes()
	same("routes", append(four, six...), both, err)
	var ruled []Route
	for _, table := range []int{300, 301} {
		must(t, h.EachRoute(IPv4, table, 0, func(r Route) { ruled = append(ruled, r) }))
	}
	same("table 300", policy, ruled, nil)
	var local, broadcast []netip.Prefix
	for kind, into := range map[int]*[]netip.Prefix{unix.RTN_LOCAL: &local, unix.RTN_BROADCAST: &broadcast} {
		found, err := h.nl.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_LOCAL, Type: kind}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
		must(t, err)
		for _, r := range found {
			*into = append(*into, prefix(r.Dst))
		}
	}
	haveLocal, haveBroadcast, err := h.LocalTable(IPv4)
	same("local", local, haveLocal, err)
	same("broadcast", broadcast, haveBroadcast, err)
	var addresses []Address
	list, err := h.nl.AddrList(nil, netlink.FAMILY_ALL)
	must(t, err)
	for _, a := range list {
		addresses = append(addresses, Address{
			Index: a.LinkIndex, Prefix: prefix(a.IPNet), Host: a.Scope == unix.RT_SCOPE_HOST, Link: a.Scope == unix.RT_SCOPE_LINK,
			Secondary:  a.Flags&unix.IFA_F_SECONDARY != 0 && addr(a.IP).Is4(),
			Deprecated: a.Flags&unix.IFA_F_DEPRECATED != 0 && addr(a.IP).Is6(),
			Temporary:  a.Flags&unix.IFA_F_TEMPORARY != 0 && addr(a.IP).Is6(),
			Unproven:   a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) != 0,
		})
	}
	haveAddresses, err := h.Addresses()
	same("addresses", addresses, haveAddresses, err)
	neighbours, err := h.Neighbours(first)
	must(t, err)
	var permanent []Neighbour
	for _, n := range neighbours {
		if n.Index != first {
			t.Errorf("neighbour %v is another link's", n)
		} else if n.Permanent {
			permanent = append(permanent, n)
		}
	}
	if len(permanent) != 1 || !permanent[0].Is(netip.MustParseAddr("10.1.0.8"), net.HardwareAddr{2, 0, 0, 0, 0, 8}) {
		t.Errorf("permanent neighbours %v", permanent)
	}
}

// Package netlink reads no encapsulation of one of several next hops.
func TestEncapsulationOfANextHop(t *testing.T) {
	h, _ := inside(t)
	must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "one"}, PeerName: "two"}))
	l, err := netlink.LinkByName("one")
	must(t, err)
	must(t, netlink.LinkSetUp(l))
	a, err := netlink.ParseAddr("10.1.0.1/24")
	must(t, err)
	must(t, netlink.AddrAdd(l, a))
	encap := &netlink.SEG6Encap{Mode: nl.SEG6_IPTUN_MODE_ENCAP, Segments: []net.IP{net.ParseIP("2001:db8::5")}}
	dst := netip.MustParsePrefix("10.4.0.0/16")
	must(t, netlink.RouteAdd(&netlink.Route{Dst: ipNet(dst), MultiPath: []*netlink.NexthopInfo{
		{LinkIndex: l.Attrs().Index, Gw: net.ParseIP("10.1.0.9")}, {LinkIndex: l.Attrs().Index, Encap: encap},
	}}))
	r, found, err := h.RouteTo(dst)
	if err != nil || !found || r.Encap != unix.LWTUNNEL_ENCAP_SEG6 || !r.Encap.Hides() || r.Encap.String() != "encap seg6" {
		t.Errorf("route %+v (%v), found %v, error %v", r, r.Encap, found, err)
	}
}

func asDecoded(n netlink.Route) Route {
	r := Route{
		Dst: prefix(n.Dst), Index: n.LinkIndex, Gateway: gateway(n.Gw, n.Via), Source: addr(n.Src), Protocol: int(n.Protocol), Priority: n.Priority,
		MTU: n.MTU, AdvMSS: n.AdvMSS, TOS: n.Tos, Unreachable: n.Type == unix.RTN_UNREACHABLE, Foreign: n.Protocol != Protocol, Table: n.Table,
	}
	if r.Table == unix.RT_TABLE_MAIN {
		r.Table = 0
	}
	if n.Encap != nil {
		r.Encap = Encap(n.Encap.Type())
	}
	for _, hop := range n.MultiPath {
		r.Hops, r.HopGateways = append(r.Hops, hop.LinkIndex), append(r.HopGateways, gateway(hop.Gw, hop.Via))
	}
	return r
}

// gateway is that of a next hop, of either family.
func gateway(gw net.IP, via netlink.Destination) netip.Addr {
	if v, ok := via.(*netlink.Via); ok && v != nil {
		return addr(v.Addr)
	}
	return addr(gw)
}

// FuzzDecodeEvents reads rubbish. The kernel sends none, but a message of another kernel may be longer or shorter.
func FuzzDecodeEvents(f *testing.F) {
	for kind := range uint16(120) {
		m := native.AppendUint32(nil, 16+12)
		m = native.AppendUint16(m, kind)
		f.Add(append(m, make([]byte, 22)...))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		decodeEvents(b, unix.NETLINK_ROUTE, func(Event) {})
		_, _ = decodeNeighbour(b)
	})
}

// A tunnel has packets without a header if it has one far end.
func TestBareLinks(t *testing.T) {
	for _, tt := range []struct {
		kind     string
		hardware uint16
		flags    uint32
		want     bool
	}{
		{"", unix.ARPHRD_ETHER, unix.IFF_BROADCAST, false},
		{"", unix.ARPHRD_LOOPBACK, unix.IFF_LOOPBACK, false},
		{"", unix.ARPHRD_INFINIBAND, unix.IFF_BROADCAST, false},
		{"", unix.ARPHRD_NONE, unix.IFF_POINTOPOINT, true}, // WireGuard, tun
		{"xfrm", unix.ARPHRD_NONE, unix.IFF_NOARP, false},  // has the outer frame's header on arrival
		{"vti", unix.ARPHRD_TUNNEL, unix.IFF_NOARP | unix.IFF_POINTOPOINT, false},
		{"vti6", unix.ARPHRD_TUNNEL6, unix.IFF_NOARP | unix.IFF_POINTOPOINT, false},
		{"", unix.ARPHRD_PPP, unix.IFF_POINTOPOINT, redirectsToPPP()},
		{"", unix.ARPHRD_TUNNEL, unix.IFF_NOARP | unix.IFF_POINTOPOINT, true},
		{"", unix.ARPHRD_TUNNEL, unix.IFF_NOARP, false}, // tunl0
		{"", unix.ARPHRD_TUNNEL6, unix.IFF_NOARP, false},
		{"", unix.ARPHRD_SIT, unix.IFF_NOARP, false},
		{"", unix.ARPHRD_IPGRE, unix.IFF_POINTOPOINT, true},
		{"", unix.ARPHRD_IPGRE, unix.IFF_POINTOPOINT | unix.IFF_BROADCAST, false}, // to a group
	} {
		if got := isBare(tt.kind, tt.hardware, tt.flags); got != tt.want {
			t.Errorf("kind %q of hardware type %d with flags %#x: %t", tt.kind, tt.hardware, tt.flags, got)
		}
	}
}

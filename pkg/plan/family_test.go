package plan

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// six is the IPv6 address that stands for one of IPv4: fd00:10:244:1::5 for 10.244.1.5.
func six(a netip.Addr) netip.Addr {
	if !a.Is4() {
		return a
	}
	b := a.As4()
	return netip.MustParseAddr(fmt.Sprintf("fd00:%d:%d:%d::%d", b[0], b[1], b[2], b[3]))
}

func sixPrefix(p netip.Prefix) netip.Prefix {
	if p.Bits() == 0 {
		return everything[wire.IPv6]
	}
	return netip.PrefixFrom(six(p.Addr()), map[int]int{8: 32, 16: 48, 24: 64, 32: 128}[p.Bits()])
}

func sixEach[T any](all []T, convert func(T) T) []T {
	out := slices.Clone(all)
	for i := range out {
		out[i] = convert(out[i])
	}
	return out
}

var ipv4Text = regexp.MustCompile(`\d+\.\d+\.\d+\.\d+(/\d+)?`)

// sixText replaces the addresses and prefixes in a text.
func sixText(s string) string {
	return ipv4Text.ReplaceAllStringFunc(s, func(s string) string {
		if p, err := netip.ParsePrefix(s); err == nil {
			return sixPrefix(p).String()
		}
		return six(netip.MustParseAddr(s)).String()
	})
}

// inSix is the same cluster and node in IPv6 alone.
func inSix(in Input) Input {
	in.Nodes = sixEach(in.Nodes, func(n Node) Node {
		n.PodCIDRs, n.InternalIPs = sixEach(n.PodCIDRs, sixText), sixEach(n.InternalIPs, sixText)
		return n
	})
	f := &in.Facts
	f.Local, f.Broadcast, f.Endpoints = sixEach(f.Local, sixPrefix), sixEach(f.Broadcast, sixPrefix), sixEach(f.Endpoints, six)
	f.Addresses = sixEach(f.Addresses, func(a Address) Address { a.Prefix = sixPrefix(a.Prefix); return a })
	f.Addresses = slices.DeleteFunc(f.Addresses, func(a Address) bool { return a.Secondary }) // of IPv4 alone
	f.Routes = sixEach(f.Routes, func(r KernelRoute) KernelRoute {
		r.Dst = sixPrefix(r.Dst)
		if r.Via.IsValid() {
			r.Via = six(r.Via)
		}
		return r
	})
	f.Policies = sixEach(f.Policies, func(p Policy) Policy { p.Src, p.Dst = sixPrefix(p.Src), sixPrefix(p.Dst); return p })
	in.Native, in.Service = sixEach(in.Native, sixPrefix), sixEach(in.Service, sixPrefix)
	return in
}

// outcome is a Result as text, without what only one family has.
func outcome(r Result) map[string]string {
	out := map[string]string{
		"ready": r.NotReady, "problems": text(r.Problems), "crossed": fmt.Sprint(r.Crossed), "podCIDRs": fmt.Sprint(r.PodCIDRs), "flags": r.Config.Flags.String(),
		"nodes": fmt.Sprint(r.Config.NodeAddresses.All()), "own": fmt.Sprint(r.Config.PodCIDRs()), "notes": fmt.Sprint(r.Notes),
	}
	for f := range wire.Families {
		if t := r.Config.Tunnel[f]; t.Address != (wire.Addr{}) {
			out["tunnel"] = fmt.Sprintf("%d %s %s", r.Config.TunnelIfindex, t.Source, t.Address)
		}
	}
	for k, v := range r.Destinations {
		out[k.Netip().String()] = fmt.Sprintf("%+v", v)
	}
	for _, p := range r.Peers {
		out["peer "+p.Name] = fmt.Sprintf("%+v", p)
	}
	for _, p := range r.Routes {
		out["route to "+p.Dst.String()] = fmt.Sprintf("%+v", p)
	}
	for k, v := range r.Uplinks {
		out["uplink "+fmt.Sprint(k.Ifindex)] = fmt.Sprint(v.Bit, v.Addresses.All())
	}
	for _, p := range ofLink {
		delete(out, p.String())
	}
	return out
}

// A cluster of IPv6 alone is planned for as one of IPv4 alone is.
func TestFamiliesAreAlike(t *testing.T) {
	ipsec := input(node(1), node(2))
	ipsec.Facts.Policies = []Policy{
		{Src: netip.MustParsePrefix("10.244.1.0/24"), Dst: netip.MustParsePrefix("192.0.2.0/24"), Out: true, Required: true},
		{Src: netip.MustParsePrefix("172.18.0.11/32"), Dst: netip.MustParsePrefix("198.51.100.0/24"), Out: true, Required: true},
		{Src: netip.MustParsePrefix("10.244.0.0/16"), Dst: netip.MustParsePrefix("10.244.0.0/16"), Out: true},
	}
	native := input(node(1), node(2))
	native.Native, native.Facts.Endpoints = prefixes("10.244.0.0/16", "192.0.2.0/24"), []netip.Addr{netip.MustParseAddr("10.244.1.5"), netip.MustParseAddr("10.9.9.9")}
	noTunnel := apart(RouteVXLAN)
	noTunnel.Facts.Tunnel = 0
	away := input(node(1), node(2))
	away.Facts.Local = away.Facts.Local[:1]
	for name, in := range map[string]Input{
		"small": input(node(1), node(2), node(3)), "native": native, "IPsec": ipsec,
		"direct": apart(RouteDirect), "auto": apart(RouteAuto), "vxlan": apart(RouteVXLAN), "no tunnel": noTunnel, "two uplinks": network(),
		"no podCIDR": input(node(1).with(func(n *Node) { n.PodCIDRs = nil }), node(2)), "address away": away,
		"conflict": input(node(1), node(2), node(3).with(func(n *Node) { n.PodCIDRs = []string{"10.244.2.0/24"} })),
	} {
		t.Run(name, func(t *testing.T) {
			want := map[string]string{}
			r := Make(in)
			for about, text := range outcome(r) {
				want[sixText(about)] = strings.NewReplacer("IPv4", "IPv6").Replace(sixText(text))
				if strings.HasPrefix(about, "crossed") { // the reverse path filter is one of IPv4
					want[about] = "map[]"
				}
			}
			got := Make(inSix(in))
			overhead := strings.NewReplacer("MTU:1430", "MTU:1450")
			have := map[string]string{}
			for about, text := range outcome(got) {
				have[about] = overhead.Replace(text)
			}
			if diff := cmp.Diff(want, have); diff != "" {
				t.Errorf("(-as of IPv4 +of IPv6):\n%s", diff)
			}
			if r.MTU != got.MTU && r.MTU-20 != got.MTU {
				t.Errorf("pods get MTU %d, and %d in IPv6", r.MTU, got.MTU)
			}
			again := inSix(in)
			again.Known, again.Before = false, got.Standing
			if diff := cmp.Diff(dump(got), dump(Make(again))); diff != "" && len(got.Problems) == 0 && got.NotReady == "" {
				t.Errorf("after a restart, before the first list (-before +after):\n%s", diff)
			}
		})
	}
}

// dual is a cluster in which every node has both families, IPv4 first; change makes it another one.
func dual(mode RoutingMode, change func(*Input)) Input {
	in := input(node(1), node(2), node(3).with(func(n *Node) { n.InternalIPs = []string{"203.0.113.13"} }))
	in = withSix(in)
	in.Mode, in.Facts.Tunnel = mode, tunnelIndex
	change(&in)
	return in
}

// withSix is the same cluster and node in both families.
func withSix(in Input) Input {
	mirror := inSix(in)
	for i := range in.Nodes {
		n, m := &in.Nodes[i], mirror.Nodes[i]
		n.PodCIDRs, n.InternalIPs = append(n.PodCIDRs, m.PodCIDRs...), append(n.InternalIPs, m.InternalIPs...)
	}
	f, m := &in.Facts, mirror.Facts
	f.Local, f.Routes = append(f.Local, m.Local...), append(f.Routes, m.Routes...)
	f.Addresses = append(f.Addresses, m.Addresses...)
	return in
}

const (
	secondOwn, secondPods       = "fd00:10:244:1::/64", "fd00:10:244:2::/64"
	secondNear, secondFar       = "fd00:172:18::12", "fd00:203:0:113::13"
	firstOwn, firstNear, second = "10.244.1.0/24", "172.18.0.12", 1
)

func withoutSecond(list *[]string) { *list = (*list)[:1] }

// withoutOwnSecond takes this node's IPv6 address off its uplink.
func withoutOwnSecond(in *Input) {
	in.Facts.Local = slices.DeleteFunc(in.Facts.Local, func(p netip.Prefix) bool { return p.Addr().String() == "fd00:172:18::11" })
}

// What a Node lacks of a family costs that family, and nothing of the other one.
func TestDual(t *testing.T) {
	const direct, tunnel, none = destinations.Direct, destinations.Tunnel, destinations.None
	for _, tt := range []struct {
		name    string
		mode    RoutingMode
		change  func(*Input)
		ways    [2]destinations.Way // to the second node's pods, by family
		via     string              // to those of IPv6
		alias   string
		says    string // of the second node
		missing string // of this one, in IPv6
	}{
		{"direct", RouteDirect, func(*Input) {}, [2]destinations.Way{direct, direct}, secondNear, firstNear, "", ""},
		{"vxlan", RouteVXLAN, func(*Input) {}, [2]destinations.Way{tunnel, tunnel}, firstNear, secondNear, "", ""},
		{"vxlan, IPv6 first", RouteVXLAN, func(in *Input) { slices.Reverse(in.Nodes[1].InternalIPs) }, [2]destinations.Way{tunnel, tunnel}, secondNear, firstNear, "", ""},
		{"vxlan, IPv6 first, which we lack", RouteVXLAN, func(in *Input) {
			slices.Reverse(in.Nodes[1].InternalIPs)
			withoutSecond(&in.Nodes[0].InternalIPs)
		}, [2]destinations.Way{tunnel, tunnel}, firstNear, secondNear, "", ""},
		{"direct, no IPv6 InternalIP there", RouteDirect, func(in *Input) { withoutSecond(&in.Nodes[1].InternalIPs) },
			[2]destinations.Way{direct, none}, firstNear, "-", "no IPv6 InternalIP", ""},
		{"auto, no IPv6 InternalIP there", RouteAuto, func(in *Input) { withoutSecond(&in.Nodes[1].InternalIPs) },
			[2]destinations.Way{direct, tunnel}, firstNear, "-", "", ""},
		{"direct, no IPv4 InternalIP there", RouteDirect, func(in *Input) { in.Nodes[1].InternalIPs = in.Nodes[1].InternalIPs[1:] },
			[2]destinations.Way{none, direct}, secondNear, "-", "no IPv4 InternalIP", ""},
		{"direct, no IPv6 podCIDR there", RouteDirect, func(in *Input) { withoutSecond(&in.Nodes[1].PodCIDRs) }, [2]destinations.Way{direct, ""}, "", "", "", ""},
		{"direct, no IPv6 podCIDR here", RouteDirect, func(in *Input) { withoutSecond(&in.Nodes[0].PodCIDRs) },
			[2]destinations.Way{direct, direct}, secondNear, firstNear, "", "no IPv6 podCIDR yet"},
		{"direct, no IPv6 InternalIP here", RouteDirect, func(in *Input) { withoutSecond(&in.Nodes[0].InternalIPs) },
			[2]destinations.Way{direct, direct}, secondNear, firstNear, "", "no IPv6 InternalIP"},
		{"auto, an IPv6 InternalIP that is not here", RouteAuto, withoutOwnSecond, [2]destinations.Way{direct, direct}, secondNear, firstNear, "", "InternalIP fd00:172:18::11 is on no interface"},
		{"vxlan, an IPv6 InternalIP that is not here", RouteVXLAN, withoutOwnSecond, [2]destinations.Way{tunnel, tunnel}, firstNear, secondNear, "", ""},
		{"vxlan, no IPv6 InternalIP here", RouteVXLAN, func(in *Input) { withoutSecond(&in.Nodes[0].InternalIPs) },
			[2]destinations.Way{tunnel, tunnel}, firstNear, secondNear, "", ""},
		{"direct, a podCIDR refused", RouteDirect, func(in *Input) { in.Nodes[0].PodCIDRs[second] = "fe80::/64" },
			[2]destinations.Way{direct, direct}, secondNear, firstNear, "", "which is reserved"},
		{"a narrow uplink", RouteDirect, func(in *Input) { in.Facts.Uplinks[0].MTU = 1279 },
			[2]destinations.Way{direct, direct}, secondNear, firstNear, "", "uplink eth0 (MTU 1279) leaves 1279 bytes for pods' packets, and IPv6 needs 1280"},
		{"an uplink narrow for the tunnel", RouteVXLAN, func(in *Input) { in.Facts.Uplinks[0].MTU = 1329 },
			[2]destinations.Way{tunnel, tunnel}, firstNear, secondNear, "", "uplink eth0 (MTU 1329) leaves 1279 bytes"},
		{"an uplink narrow for the tunnel, whatever --mtu says", RouteVXLAN, func(in *Input) { in.MTU, in.Facts.Uplinks[0].MTU = 1500, 1329 },
			[2]destinations.Way{tunnel, tunnel}, firstNear, secondNear, "", "uplink eth0 (MTU 1329) leaves 1279 bytes"},
		{"a narrow uplink, which has lost its IPv6", RouteDirect, func(in *Input) {
			in.Facts.Uplinks[0].MTU = 1279
			in.Facts.Local = slices.DeleteFunc(in.Facts.Local, func(p netip.Prefix) bool { return p.Addr().Is6() })
			in.Facts.Routes = slices.DeleteFunc(in.Facts.Routes, func(r KernelRoute) bool { return r.Dst.Addr().Is6() })
		}, [2]destinations.Way{direct, none}, firstNear, secondNear, "", "uplink eth0 (MTU 1279) leaves 1279 bytes"},
		{"an uplink wide enough for the tunnel over IPv4", RouteVXLAN, func(in *Input) { in.Facts.Uplinks[0].MTU = 1330 },
			[2]destinations.Way{tunnel, tunnel}, firstNear, secondNear, "", ""},
		{"an uplink narrow for the tunnel over IPv6", RouteVXLAN, func(in *Input) {
			in.Facts.Uplinks[0].MTU = 1349
			for i := range in.Nodes {
				slices.Reverse(in.Nodes[i].InternalIPs)
			}
		}, [2]destinations.Way{tunnel, tunnel}, secondNear, firstNear, "", "uplink eth0 (MTU 1349) leaves 1279 bytes"},
		{"a route narrow for the tunnel", RouteAuto, func(in *Input) { in.Facts.Routes[0].MTU = 1329 },
			[2]destinations.Way{direct, direct}, secondNear, firstNear, "", "uplink eth0 (MTU 1329) leaves 1279 bytes"},
		{"a kernel without IPv6", RouteVXLAN, func(in *Input) { in.Facts.Lacks[wire.IPv6] = true }, [2]destinations.Way{tunnel, ""}, "", "", "", "kernel has no IPv6"},
		{"--mtu", RouteDirect, func(in *Input) { in.MTU = 1279 }, [2]destinations.Way{direct, direct}, secondNear, firstNear, "", "--mtu=1279"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := Make(dual(tt.mode, tt.change))
			for f, p := range prefixes("10.244.2.0/24", secondPods) {
				v, there := r.Destinations[destinations.KeyFrom(p)]
				if there != (tt.ways[f] != "") || there && v.Way() != tt.ways[f] {
					t.Errorf("%s is reached %s (%v), want %q", p, v.Way(), there, tt.ways[f])
				}
				if f == second && there && (v.Node.String() != tt.via || v.Alias.String() != tt.alias) {
					t.Errorf("%s belongs to %s or %s, want %s and %s", p, v.Node, v.Alias, tt.via, tt.alias)
				}
				for _, route := range r.Routes {
					src := r.Sources[f].Netip()
					if route.Dst == p && (route.Index == 0 || route.Src != src || tt.ways[f] == direct && wire.FamilyOf(route.Via) != wire.FamilyOf(p.Addr())) != (tt.ways[f] == none || f == second && v.Way() == tunnel && v.MTU < 1280) {
						t.Errorf("route %+v, way %s", route, tt.ways[f])
					}
				}
			}
			said := slices.ContainsFunc(r.Problems, func(p Problem) bool { return p.Node == "n2" && tt.says != "" && strings.Contains(p.Text, tt.says) })
			if said != (tt.says != "") {
				t.Errorf("problems %v, want %q", r.Problems, tt.says)
			}
			if (r.Missing[wire.IPv6] == "") != (tt.missing == "") || !strings.Contains(r.Missing[wire.IPv6], tt.missing) || r.Missing[wire.IPv4] != "" {
				t.Errorf("missing %q, want %q of IPv6", r.Missing, tt.missing)
			}
			want := prefixes(firstOwn, secondOwn)
			if tt.missing != "" {
				want = want[:1]
			}
			if !slices.Equal(r.PodCIDRs, want) || r.NotReady != "" {
				t.Errorf("pods get addresses of %v, want %v; not ready: %q", r.PodCIDRs, want, r.NotReady)
			}
		})
	}
}

// Pods get their addresses in the order of the Node's podCIDRs.
func TestOrderOfPodCIDRs(t *testing.T) {
	in := dual(RouteDirect, func(in *Input) { slices.Reverse(in.Nodes[0].PodCIDRs) })
	for range 2 {
		r := Make(in)
		if !slices.Equal(r.PodCIDRs, prefixes(secondOwn, firstOwn)) {
			t.Errorf("podCIDRs %v", r.PodCIDRs)
		}
		in.Known, in.Before = false, r.Standing
	}
}

// A node without anything of the only family that the cluster has is not ready, and says which that is.
func TestNotReadyNamesTheFamily(t *testing.T) {
	in := inSix(input(node(1), node(2)))
	in.Facts.Uplinks[0].MTU = 1200
	if r := Make(in); !strings.Contains(r.NotReady, "IPv6 needs 1280") || len(r.PodCIDRs) != 0 {
		t.Errorf("not ready: %q, podCIDRs %v", r.NotReady, r.PodCIDRs)
	}
	in = inSix(input(node(1).with(func(n *Node) { n.PodCIDRs = nil }), node(2)))
	if r := Make(in); r.NotReady != "Node n1 has no IPv6 podCIDR yet" {
		t.Errorf("not ready: %q", r.NotReady)
	}
}

// What means something on a link only is the host's, and so wide a prefix of IPv6 that the maps have IPv4 in it is none of IPv4's.
func TestWholeOfIPv6(t *testing.T) {
	in := dual(RouteDirect, func(in *Input) {
		in.Native = []netip.Prefix{everything[wire.IPv6]}
		in.Facts.Local = append(in.Facts.Local, prefixes("fe80::7/128", "::1/128")...)
	})
	got := dump(Make(in))
	for p, want := range map[string]string{
		"fe80::/10": "host", "ff00::/8": "host", "fe80::7/128": "", "::1/128": "host", "::/0": "native", "0.0.0.0/0": "world", secondOwn: "local",
	} {
		if got[p] != want {
			t.Errorf("%s is %q, want %q", p, got[p], want)
		}
	}
	block := Policy{Src: everything[wire.IPv6], Dst: everything[wire.IPv6], Out: true, Required: true}
	in = dual(RouteDirect, func(in *Input) { in.Facts.Policies = []Policy{block} })
	r := Make(in)
	for f, want := range map[wire.Family]destinations.Flags{wire.IPv4: 0, wire.IPv6: destinations.ToStack | destinations.Part} {
		if v := r.Destinations[destinations.KeyFrom(everything[f])]; v.Flags != want {
			t.Errorf("%s has flags %s, want %s", everything[f], v.Flags, want)
		}
	}
}

// Each uplink has an address of each family to masquerade to, its own or another link's.
func TestMasqueradingByFamily(t *testing.T) {
	in := dual(RouteDirect, func(in *Input) {
		in.Facts.Uplinks = append(in.Facts.Uplinks, Link{Index: 3, Name: "eth1", MTU: 1500, Bit: 1})
		in.Facts.Addresses = append(in.Facts.Addresses, Address{Index: 3, Prefix: netip.MustParsePrefix("2001:db8::7/64")})
	})
	r := Make(in)
	for index, want := range map[uint32]wire.Addresses{
		2: wire.AddressesFrom(netip.MustParseAddr("172.18.0.11"), netip.MustParseAddr("fd00:172:18::11")),
		3: wire.AddressesFrom(netip.MustParseAddr("172.18.0.11"), netip.MustParseAddr("2001:db8::7")),
	} {
		if got := r.Uplinks[uplinks.Key{Ifindex: index}].Addresses; got != want {
			t.Errorf("uplink %d: %v, want %v", index, got.All(), want.All())
		}
	}
}

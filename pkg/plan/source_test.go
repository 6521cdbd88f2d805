package plan

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/sources"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// withAddresses is node 1 with these addresses on links, and these routes.
func withAddresses(routes []KernelRoute, addresses ...Address) Input {
	in := input(node(1), node(2))
	in.Facts.Routes, in.Facts.Addresses = routes, addresses
	in.Nodes[0].PodCIDRs = append(in.Nodes[0].PodCIDRs, "fd00:244:1::/64")
	return in
}

func on(index uint32, prefix string) Address {
	return Address{Index: index, Prefix: netip.MustParsePrefix(prefix)}
}

// over is a route over eth0, with `via` or `src` an address.
func over(dst string, more ...string) KernelRoute {
	r := KernelRoute{Dst: netip.MustParsePrefix(dst), Index: 2}
	for i := 0; i+1 < len(more); i += 2 {
		if a := netip.MustParseAddr(more[i+1]); more[i] == "src" {
			r.Src = a
		} else {
			r.Via = a
		}
	}
	r.OnLink = !r.Via.IsValid()
	return r
}

// sourceOf is the address that packets to a destination are masqueraded to on an uplink, as the programs find it.
func sourceOf(r Result, index uint32, to netip.Addr) netip.Addr {
	for bits := to.BitLen(); bits >= 0; bits-- {
		if v, ok := r.Exceptions[sources.KeyFrom(index, netip.PrefixFrom(to, bits))]; ok {
			return v.Address.Netip()
		}
	}
	return r.Uplinks[uplinks.Key{Ifindex: index}].Addresses[wire.FamilyOf(to)].Netip()
}

func TestSources(t *testing.T) {
	deprecated, temporary := on(2, "2001:db8:1::1/64"), on(2, "2001:db8:1::7/64")
	deprecated.Deprecated, temporary.Temporary = true, true
	inVRF, tunnel := on(7, "198.51.100.7/32"), on(9, "10.244.1.0/32")
	inVRF.VRF = 6
	for name, tt := range map[string]struct {
		routes    []KernelRoute
		addresses []Address
		recent    []Recent
		want      map[string]string // by destination
	}{
		"next hop's subnet": {
			[]KernelRoute{over("0.0.0.0/0", "via", "192.0.2.1"), over("10.0.0.0/8", "via", "172.18.0.1"), over("172.18.0.0/24", "src", "172.18.0.11"), over("10.9.0.0/16", "via", "192.0.2.1")},
			[]Address{on(2, "172.18.0.11/24"), on(2, "192.0.2.11/24")}, nil,
			map[string]string{"8.8.8.8": "192.0.2.11", "10.1.1.1": "172.18.0.11", "172.18.0.99": "172.18.0.11", "10.9.1.1": "192.0.2.11", "192.0.2.9": "192.0.2.11"},
		},
		"VIP first": {
			[]KernelRoute{over("0.0.0.0/0", "via", "172.18.0.1")},
			[]Address{on(2, "198.51.100.1/32"), on(2, "172.18.0.11/24")}, nil,
			map[string]string{"8.8.8.8": "172.18.0.11"},
		},
		"src of a route": {
			[]KernelRoute{over("0.0.0.0/0", "via", "172.18.0.1", "src", "198.51.100.1"), over("203.0.113.0/24", "via", "172.18.0.1"), over("2001:db8:9::/48", "via", "fe80::1", "src", "2001:db8:1::9"), over("::/0", "via", "fe80::1")},
			[]Address{on(1, "198.51.100.1/32"), on(1, "2001:db8:1::9/128"), on(2, "172.18.0.11/24"), on(2, "2001:db8:1::1/64")}, nil,
			map[string]string{"8.8.8.8": "198.51.100.1", "203.0.113.1": "172.18.0.11", "2001:db8:9::1": "2001:db8:1::9", "2001:db8:8::1": "2001:db8:1::1"},
		},
		"src of the default route": {
			[]KernelRoute{over("::/0", "via", "fe80::1", "src", "fd00:18::11"), over("2001:db8:9::/48", "via", "fe80::1")},
			[]Address{on(2, "fd00:18::11/64"), on(2, "2001:db8:1::1/64")}, nil,
			map[string]string{"2600::1": "fd00:18::11", "2001:db8:2::1": "fd00:18::11", "2001:db8:9::1": "2001:db8:1::1"},
		},
		"several next hops": {
			[]KernelRoute{{Dst: netip.MustParsePrefix("0.0.0.0/0"), Hops: []uint32{2}, HopVias: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}},
			[]Address{on(2, "172.18.0.11/24"), on(2, "192.0.2.11/24")}, nil,
			map[string]string{"8.8.8.8": "192.0.2.11"},
		},
		"none on the uplink": {
			[]KernelRoute{over("0.0.0.0/0", "via", "fe80::1")},
			[]Address{tunnel, on(1, "203.0.113.11/32"), on(1, "2001:db8:1::9/128"), on(5, "172.17.0.1/16")}, nil,
			map[string]string{"8.8.8.8": "203.0.113.11", "2001:db8:9::1": "2001:db8:1::9"},
		},
		"InternalIP moved":  {nil, []Address{on(1, "172.18.0.11/32")}, []Recent{{netip.MustParseAddr("192.0.2.11"), 2}}, map[string]string{"8.8.8.8": "172.18.0.11"}},
		"another VRF's":     {nil, []Address{inVRF}, nil, map[string]string{"8.8.8.8": "invalid IP"}},
		"lost a moment ago": {nil, []Address{on(5, "172.17.0.1/16")}, []Recent{{netip.MustParseAddr("172.18.0.11"), 2}}, map[string]string{"8.8.8.8": "invalid IP"}},
		"ULA and GUA": {
			[]KernelRoute{over("::/0", "via", "fe80::1")}, []Address{on(2, "fd00:18::11/64"), on(2, "2001:db8:1::1/64"), temporary}, nil,
			map[string]string{"2001:db8:9::1": "2001:db8:1::1", "fd00:9::1": "fd00:18::11", "2600::1": "2001:db8:1::1"},
		},
		"longest match": {
			[]KernelRoute{over("::/0", "via", "fe80::1")}, []Address{on(2, "2001:db8:1::1/64"), on(2, "2001:db8:8::1/64")}, nil,
			map[string]string{"2001:db8:9::1": "2001:db8:8::1", "2001:db8:2::1": "2001:db8:1::1", "2600::1": "2001:db8:1::1"},
		},
		"deprecated":       {nil, []Address{deprecated, on(2, "2001:db8:2::2/64")}, nil, map[string]string{"2001:db8:1::9": "2001:db8:2::2"}},
		"deprecated alone": {nil, []Address{deprecated}, nil, map[string]string{"2001:db8:1::9": "2001:db8:1::1"}},
	} {
		t.Run(name, func(t *testing.T) {
			in := withAddresses(tt.routes, tt.addresses...)
			in.Facts.Recent = tt.recent
			r, got := Make(in), map[string]string{}
			for to := range tt.want {
				got[to] = sourceOf(r, 2, netip.MustParseAddr(to)).String()
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got:\n%s\n%v", diff, r.Exceptions)
			}
		})
	}
}

// An uplink with one address has no exceptions, however many routes there are.
// The administrator's address is the only one, whatever routes say, and while the node does not have it there is none.
func TestSnatAddress(t *testing.T) {
	chosen, other := netip.MustParseAddr("198.51.100.9"), netip.MustParseAddr("198.51.100.10")
	routes := []KernelRoute{over("0.0.0.0/0", "via", "192.0.2.1"), over("10.0.0.0/8", "src", "192.0.2.7"), over("::/0")}
	addresses := []Address{on(2, "192.0.2.7/24"), on(2, "2001:db8:1::1/64"), on(1, "198.51.100.9/32"), on(1, "198.51.100.10/32")}
	in := withAddresses(routes, addresses...)
	for name, tt := range map[string]struct {
		all   []SnatAddress
		want4 netip.Addr
	}{
		"for any uplink":          {[]SnatAddress{{Addr: chosen}}, chosen},
		"for this uplink":         {[]SnatAddress{{Addr: other}, {Uplink: "eth0", Addr: chosen}}, chosen},
		"in the other order":      {[]SnatAddress{{Uplink: "eth0", Addr: chosen}, {Addr: other}}, chosen},
		"of another uplink":       {[]SnatAddress{{Uplink: "eth9", Addr: chosen}, {Addr: other}}, other},
		"that the node has not":   {[]SnatAddress{{Addr: netip.MustParseAddr("198.51.100.11")}}, netip.Addr{}},
		"of another uplink alone": {[]SnatAddress{{Uplink: "eth9", Addr: chosen}}, netip.MustParseAddr("192.0.2.7")},
	} {
		in.SnatAddresses = tt.all
		r := Make(in)
		for _, to := range []string{"8.8.8.8", "10.1.2.3", "192.0.2.1"} {
			if got := sourceOf(r, 2, netip.MustParseAddr(to)); got != tt.want4 {
				t.Errorf("%s, to %s: %s, want %s", name, to, got, tt.want4)
			}
		}
		if got, want := sourceOf(r, 2, netip.MustParseAddr("2001:db8:9::1")), netip.MustParseAddr("2001:db8:1::1"); got != want {
			t.Errorf("%s, the other family: %s, want %s", name, got, want)
		}
	}
}

// A table that rules lead to by a source alone that no pod has decides nothing for pods.
func TestTablesOfOtherSources(t *testing.T) {
	chosen, other := netip.MustParseAddr("10.9.0.2"), netip.MustParseAddr("192.0.2.2")
	in := withAddresses([]KernelRoute{over("0.0.0.0/0", "via", "10.9.0.1")}, on(2, "10.9.0.2/24"), on(2, "192.0.2.2/24"))
	half := over("128.0.0.0/1", "via", "192.0.2.1")
	half.Table = 101
	in.Facts.Others = []KernelRoute{half}
	for from, want := range map[string]netip.Addr{"192.0.2.2/32": chosen, "10.244.1.0/24": other, "10.0.0.0/8": other} {
		in.Facts.Sources = map[int][]netip.Prefix{101: {netip.MustParsePrefix(from)}}
		if got := sourceOf(Make(in), 2, netip.MustParseAddr("203.0.113.1")); got != want {
			t.Errorf("with a table for packets from %s: %s, want %s", from, got, want)
		}
	}
	in.Facts.Sources = nil
	if got := sourceOf(Make(in), 2, netip.MustParseAddr("203.0.113.1")); got != other {
		t.Errorf("with a table for all packets: %s, want %s", got, other)
	}
}

// What map sources has no room for is said.
func TestTooManySources(t *testing.T) {
	routes := []KernelRoute{over("0.0.0.0/0", "via", "10.9.0.1")}
	for i := range mostSources + 10 {
		routes = append(routes, over(fmt.Sprintf("198.18.%d.%d/32", i>>8, i&0xff), "via", "192.0.2.1"))
	}
	r := Make(withAddresses(routes, on(2, "10.9.0.2/24"), on(2, "192.0.2.2/24")))
	if len(r.Exceptions) != mostSources || !slices.ContainsFunc(r.Notes, func(n string) bool { return strings.HasPrefix(n, "10 destinations too many") }) {
		t.Errorf("%d exceptions, notes %q", len(r.Exceptions), r.Notes)
	}
}

func TestOneAddressHasNoExceptions(t *testing.T) {
	in := withAddresses(nil, on(2, "172.18.0.11/24"), on(2, "2001:db8:1::1/64"))
	for i := range 100 {
		in.Facts.Routes = append(in.Facts.Routes, over(fmt.Sprintf("10.%d.0.0/16", i), "via", fmt.Sprintf("192.0.2.%d", i)), over(fmt.Sprintf("2001:db8:%x::/48", i), "via", "fe80::1"))
	}
	if r := Make(in); len(r.Exceptions) > 0 {
		t.Errorf("exceptions %v", r.Exceptions)
	}
}

// The prefixes together say of each destination what the rules say of it alone.
func TestSourcesByRules(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	address := func() netip.Addr {
		a := [16]byte{0x20, 0x01, 0xd, 0xb8, byte(random.IntN(4)), byte(random.IntN(2) * 0x80), 0, byte(random.IntN(4)), 15: byte(random.IntN(3))}
		if random.IntN(3) == 0 {
			a[0], a[1] = 0xfd, byte(random.IntN(2))
		}
		return netip.AddrFrom16(a)
	}
	for range 200 {
		in := withAddresses([]KernelRoute{over("::/0", "via", "fe80::1")})
		for range 1 + random.IntN(5) {
			in.Facts.Addresses = append(in.Facts.Addresses, Address{Index: 2, Prefix: netip.PrefixFrom(address(), []int{48, 64, 128}[random.IntN(3)]), Temporary: random.IntN(4) == 0})
		}
		r := Make(in)
		for range 50 {
			to := address()
			want := (&chooser{family: wire.IPv6, addresses: in.Facts.Addresses}).choose(host(to), KernelRoute{})
			if got := sourceOf(r, 2, to); got != want {
				t.Fatalf("to %s: %s, want %s of %v; exceptions %v", to, got, want, in.Facts.Addresses, r.Exceptions)
			}
		}
	}
}

// An address that is gone is this node's for a while only if its uplink has no other.
func TestRecentAddressWithAnother(t *testing.T) {
	lost := Recent{netip.MustParseAddr("172.18.0.50"), 2}
	for name, addresses := range map[string][]Address{"another": {on(2, "172.18.0.11/24")}, "none": nil} {
		in := withAddresses(nil, addresses...)
		in.Facts.Recent = []Recent{lost}
		if v, is := Make(in).Destinations[destinations.KeyFrom(host(lost.Addr))]; is != (name == "none") || is && v.Ifindex != 2 {
			t.Errorf("%s: %+v, %v", name, v, is)
		}
	}
}

// A flow ends when its route leads over another uplink than the one that has its address.
func TestHoldersOfAddresses(t *testing.T) {
	in := withAddresses(nil, on(2, "172.18.0.11/24"), on(2, "192.0.2.5/32"), on(3, "192.0.2.5/32"), on(1, "203.0.113.1/32"))
	in.Facts.Uplinks = append(in.Facts.Uplinks, Link{Index: 3, Name: "eth1", MTU: 1500, Bit: 1})
	in.Facts.Local = prefixes("172.18.0.11/32", "192.0.2.5/32", "203.0.113.1/32", "127.0.0.0/8")
	r := Make(in)
	for p, want := range map[string]uint32{"172.18.0.11/32": 2, "192.0.2.5/32": 0, "203.0.113.1/32": 0, "127.0.0.0/8": 0} {
		if v := r.Destinations[destinations.KeyFrom(netip.MustParsePrefix(p))]; v.Kind != destinations.Host || v.Ifindex != want {
			t.Errorf("%s: %+v, want the uplink %d", p, v, want)
		}
	}
}

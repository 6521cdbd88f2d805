// Package destinations is the longest-prefix map that says what an address is
// and how to reach it. The agent writes it; the plugin writes the Local entries
// of pods outside the podCIDR.
package destinations

//go:generate go run ../../tools/enums

import (
	"cmp"
	"net/netip"
	"strconv"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Name is the map's name in the object and below the pin directory.
const Name = "destinations"

// Key is struct destination_key: an LPM trie key.
type Key struct {
	// PrefixLen counts bits of the 16-byte address: an IPv4 /24 is 120.
	PrefixLen uint32
	Prefix    wire.Addr
}

// KeyFrom converts a valid prefix; host bits are cleared.
func KeyFrom(p netip.Prefix) Key {
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	return Key{PrefixLen: uint32(bits), Prefix: wire.AddrFrom(p.Masked().Addr())}
}

// Netip returns the prefix, IPv4 unmapped.
func (k Key) Netip() netip.Prefix {
	a := netip.AddrFrom16(k.Prefix)
	if a.Is4In6() && k.PrefixLen >= 96 {
		return netip.PrefixFrom(a.Unmap(), int(k.PrefixLen)-96)
	}
	return netip.PrefixFrom(a, int(k.PrefixLen))
}

// String implements fmt.Stringer, for error messages.
func (k Key) String() string { return k.Netip().String() }

// Kind says what an address is: enum destination_kind. An address without an entry is World.
type Kind uint32

// Flags are properties of a destination: enum destination_flags.
type Flags uint32

// Value is struct destination.
type Value struct {
	Kind Kind
	// Ifindex is the uplink to a PodCIDR; 0 behind the tunnel, or if no way leads there. Way names which it is. Of a Host it
	// is the uplink that has the address; 0: another link has it, or several.
	Ifindex uint32
	// Node is the InternalIP of the node that a PodCIDR or Node belongs to: next hop, or far end of the tunnel. Never zero,
	// since what arrives through the tunnel is compared with it, whatever the way there.
	Node wire.Addr
	// MTU is of IP packets that go there, in bytes: the uplink's, less what the tunnel adds.
	MTU   uint32
	Flags Flags
	// NeighbourChecked is when the programs last saw Node resolve, or asked for LearntMTU (CLOCK_MONOTONIC, ns); the
	// agent writes 0.
	NeighbourChecked uint64
	// Uplinks has the bits of the uplinks through which this host has a route to a PodCIDR, Node or Native. Without any, packets from there may
	// arrive by each uplink. The highest bit alone stands for no uplink, as long as there are fewer than 64.
	Uplinks uint64
	// MAC is the inner Ethernet address behind the tunnel; zero: the node takes any.
	MAC wire.MAC
	// LearntMTU is what the kernel has learnt that the way to the tunnel's far end carries, in bytes of inner IP packet;
	// 0: no less than MTU. Only the programs write it, with NeighbourChecked; the agent writes 0.
	LearntMTU uint16
	// Alias is the node's InternalIP of the other family, from which its tunnel may send as well; zero: it has none.
	Alias wire.Addr
}

// Way is how packets get to the pods of another node.
type Way string

// The ways; Value.Way tells them apart.
const (
	None   Way = "none"   // the node is on none of our links, and no tunnel leads there
	Direct Way = "direct" // to the node itself, over an uplink
	Tunnel Way = "tunnel" // encapsulated, to the node's InternalIP
)

// Way says how packets get to a PodCIDR.
func (v Value) Way() Way {
	switch {
	case v.Flags&ByTunnel != 0:
		return Tunnel
	case v.Ifindex == 0:
		return None
	}
	return Direct
}

// Same reports whether two values differ at most in the fields that the programs
// own, for typed.Sync.
func Same(have, want Value) bool {
	have.NeighbourChecked, want.NeighbourChecked = 0, 0
	have.LearntMTU, want.LearntMTU = 0, 0
	return have == want
}

// Definition defines the map.
var Definition = typed.Define[Key, Value](typed.Definition{
	Name:    Name,
	Content: typed.Configured,
	View: typed.View[Key, Value]{
		Columns: typed.Columns("PREFIX", "KIND", "NODE", "IFINDEX#", "MTU#", "FLAGS", "UPLINKS", "MAC", "ALIAS", "LEARNT-MTU#", "CHECKED#"),
		Compare: func(a, b typed.Entry[Key, Value]) int {
			return cmp.Or(a.Key.Prefix.Compare(b.Key.Prefix), cmp.Compare(a.Key.PrefixLen, b.Key.PrefixLen))
		},
		Cells: func(k Key, v Value) []any {
			return []any{
				k.Netip(), v.Kind, v.Node, typed.Number(v.Ifindex), typed.Number(v.MTU),
				v.Flags, bitNumbers(v.Uplinks), v.MAC, v.Alias, typed.Number(v.LearntMTU), typed.Stamp(v.NeighbourChecked),
			}
		},
		Object: func(k Key, v Value) typed.Object {
			return append(typed.Object{{Name: "prefix", Value: k.Netip().String()}}, typed.ObjectOf(v)...)
		},
	},
})

// bitNumbers lists the bits that are set, such as "0,3".
func bitNumbers(mask uint64) string {
	var set []string
	for bit := range 64 {
		if mask&(1<<bit) != 0 {
			set = append(set, strconv.Itoa(bit))
		}
	}
	return cmp.Or(strings.Join(set, ","), "-")
}

// Map is the open map.
type Map = typed.Map[Key, Value]

// Open opens the map pinned at path.
func Open(path string) (*Map, error) { return typed.Open[Key, Value](path) }

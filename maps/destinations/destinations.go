// Package destinations is the longest-prefix map that says what an address is
// and how to reach it. The agent writes it.
package destinations

import (
	"net/netip"
	"strconv"

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

// Kind says what an address is: enum destination_kind.
type Kind uint32

// The kinds; an address without an entry is World.
const (
	World Kind = iota
	Host
	Local
	PodCIDR
	Node
	Native
)

// String is the name used in dumps, such as "pod_cidr".
func (k Kind) String() string {
	names := []string{"world", "host", "local", "pod_cidr", "node", "native"}
	if int(k) < len(names) {
		return names[k]
	}
	return strconv.Itoa(int(k))
}

// MarshalText implements encoding.TextMarshaler.
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// Flags are properties of a destination: enum destination_flags.
type Flags uint32

// The bits of Flags: the host's stack decides, whatever the kind; nothing may go
// there in clear under the node's own address; a part of a wider entry, there for its
// flags alone.
const (
	ToStack   Flags = 1
	Protected Flags = 2
	Part      Flags = 4
)

// String lists the bits, such as "to_stack|protected"; "-" when none is set.
func (f Flags) String() string { return wire.Bits(uint32(f), "to_stack", "protected", "part") }

// MarshalText implements encoding.TextMarshaler.
func (f Flags) MarshalText() ([]byte, error) { return []byte(f.String()), nil }

// Value is struct destination.
type Value struct {
	Kind Kind
	// Ifindex is the uplink of a PodCIDR; 0: the node is on no link of ours.
	Ifindex uint32
	// Node is the next hop of a PodCIDR.
	Node wire.Addr
	// MTU of the uplink, in bytes of IP packet.
	MTU   uint32
	Flags Flags
	// NeighbourChecked belongs to the programs; writers leave it 0.
	NeighbourChecked uint64
	// Uplinks has the bits of the uplinks through which this host has a route to a PodCIDR, Node or Native.
	Uplinks uint64
}

// Same reports whether the two differ at most in what the programs own; it is
// the comparison for typed.Sync.
func Same(have, want Value) bool {
	have.NeighbourChecked, want.NeighbourChecked = 0, 0
	return have == want
}

// Map is the open map.
type Map = typed.Map[Key, Value]

// Open opens the map pinned at path.
func Open(path string) (*Map, error) { return typed.Open[Key, Value](path) }

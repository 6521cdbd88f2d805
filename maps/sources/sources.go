// Package sources is the map of the addresses that packets to certain destinations are masqueraded to, where those differ from
// the uplink's in map uplinks. The agent writes it.
package sources

import (
	"cmp"
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Name is the map's name in the object and below the pin directory.
const Name = "sources"

// indexBits are the bits of a key before the address.
const indexBits = 32

// Key is struct source_key: an LPM trie key.
type Key struct {
	// PrefixLen counts the bits of Ifindex and of the 16-byte address: an IPv4 /24 is 152.
	PrefixLen uint32
	Ifindex   uint32
	Prefix    wire.Addr
}

// KeyFrom is the key of a valid prefix on an uplink; host bits are cleared.
func KeyFrom(ifindex uint32, p netip.Prefix) Key {
	k := destinations.KeyFrom(p)
	return Key{PrefixLen: indexBits + k.PrefixLen, Ifindex: ifindex, Prefix: k.Prefix}
}

// Netip returns the prefix, IPv4 unmapped.
func (k Key) Netip() netip.Prefix {
	return destinations.Key{PrefixLen: k.PrefixLen - indexBits, Prefix: k.Prefix}.Netip()
}

// Value is struct source.
type Value struct {
	Address wire.Addr
}

// Definition defines the map.
var Definition = typed.Define[Key, Value](typed.Definition{
	Name:    Name,
	Content: typed.Configured,
	View: typed.View[Key, Value]{
		Columns: typed.Columns("IFINDEX#", "PREFIX", "ADDRESS"),
		Compare: func(a, b typed.Entry[Key, Value]) int {
			return cmp.Or(cmp.Compare(a.Key.Ifindex, b.Key.Ifindex), a.Key.Prefix.Compare(b.Key.Prefix), cmp.Compare(a.Key.PrefixLen, b.Key.PrefixLen))
		},
		Cells: func(k Key, v Value) []any { return []any{k.Ifindex, k.Netip(), v.Address} },
		Object: func(k Key, v Value) typed.Object {
			return append(typed.Object{{Name: "ifindex", Value: k.Ifindex}, {Name: "prefix", Value: k.Netip().String()}}, typed.ObjectOf(v)...)
		},
	},
})

// Map is the open map.
type Map = typed.Map[Key, Value]

// Open opens the map pinned at path.
func Open(path string) (*Map, error) { return typed.Open[Key, Value](path) }

// Package bridges is the longest-prefix map of the parts of this node's podCIDRs
// that are behind bridges of somebody else's, and of the host's own addresses
// there. The agent writes it.
package bridges

import (
	"cmp"
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Name is the map's name in the object and below the pin directory.
const Name = "bridges"

// Key is struct bridge_key: an LPM trie key.
type Key struct {
	// PrefixLen counts bits of the 16-byte address: an IPv4 /24 is 120.
	PrefixLen uint32
	Prefix    wire.Addr
}

// KeyFrom converts a valid prefix; host bits are cleared.
func KeyFrom(p netip.Prefix) Key { return Key(destinations.KeyFrom(p)) }

// Netip returns the prefix, IPv4 unmapped.
func (k Key) Netip() netip.Prefix { return destinations.Key(k).Netip() }

// String implements fmt.Stringer, for error messages.
func (k Key) String() string { return k.Netip().String() }

// Value is the endpoint that all containers there are together: Ifindex is the
// bridge's, 0 where the address is the host's own.
type Value = endpoints.Value

// Definition defines the map.
var Definition = typed.Define[Key, Value](typed.Definition{
	Name:    Name,
	Content: typed.Configured,
	View: typed.View[Key, Value]{
		Columns: typed.Columns("PREFIX", "IFINDEX#"),
		Compare: func(a, b typed.Entry[Key, Value]) int {
			return cmp.Or(a.Key.Prefix.Compare(b.Key.Prefix), cmp.Compare(a.Key.PrefixLen, b.Key.PrefixLen))
		},
		Cells: func(k Key, v Value) []any { return []any{k.Netip(), typed.Number(v.Ifindex)} },
		Object: func(k Key, v Value) typed.Object {
			return append(typed.Object{{Name: "prefix", Value: k.Netip().String()}}, typed.ObjectOf(v)...)
		},
	},
})

// Map is the open map.
type Map = typed.Map[Key, Value]

// Open opens the map pinned at path.
func Open(path string) (*Map, error) { return typed.Open[Key, Value](path) }

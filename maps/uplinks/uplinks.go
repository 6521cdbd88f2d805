// Package uplinks is the map of the interfaces that lead out of the node, with
// the addresses to masquerade to. The agent writes it.
package uplinks

//go:generate go run ../../tools/enums

import (
	"cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Name is the map's name in the object and below the pin directory.
const Name = "uplinks"

// Key is struct uplink_key.
type Key struct {
	Ifindex uint32
}

// Value is struct uplink.
type Value struct {
	// Addresses are those to masquerade to.
	Addresses wire.Addresses
	// Bit is the uplink's number in the masks of destinations, below Bits.
	Bit   uint32
	Flags Flags
}

// Flags say what kind of link an uplink is: enum uplink_flags.
type Flags uint32

// Bits is how many uplinks can have a number of their own; those beyond share the last one.
const Bits = 64

// Definition defines the map.
var Definition = typed.Define[Key, Value](typed.Definition{
	Name:    Name,
	Content: typed.Configured,
	View: typed.View[Key, Value]{
		Columns: typed.Columns("IFINDEX#", "IPV4", "IPV6", "BIT#", "FLAGS"),
		Compare: func(a, b typed.Entry[Key, Value]) int { return cmp.Compare(a.Key.Ifindex, b.Key.Ifindex) },
		Cells: func(k Key, v Value) []any {
			return []any{k.Ifindex, v.Addresses[wire.IPv4], v.Addresses[wire.IPv6], v.Bit, v.Flags}
		},
	},
})

// Map is the open map.
type Map = typed.Map[Key, Value]

// Open opens the map pinned at path.
func Open(path string) (*Map, error) { return typed.Open[Key, Value](path) }

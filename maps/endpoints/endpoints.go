// Package endpoints is the map of this node's pods by address, by which the
// programs deliver packets. The plugin writes it.
package endpoints

import (
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Name is the map's name in the object and below the pin directory.
const Name = "endpoints"

// Key is struct endpoint_key.
type Key struct {
	Address wire.Addr
}

// Value is struct endpoint. Ifindex, the host-side veth's, is also the
// endpoint's generation.
type Value struct {
	Ifindex uint32
	PodMAC  wire.MAC
	HostMAC wire.MAC
}

// Definition defines the map.
var Definition = typed.Define[Key, Value](typed.Definition{
	Name:    Name,
	Content: typed.Configured,
	View: typed.View[Key, Value]{
		Columns: typed.Columns("ADDRESS", "IFINDEX#", "POD MAC", "HOST MAC"),
		Compare: func(a, b typed.Entry[Key, Value]) int { return a.Key.Address.Compare(b.Key.Address) },
		Cells:   func(k Key, v Value) []any { return []any{k.Address, v.Ifindex, v.PodMAC, v.HostMAC} },
	},
})

// Map is the open map.
type Map = typed.Map[Key, Value]

// Open opens the map pinned at path.
func Open(path string) (*Map, error) { return typed.Open[Key, Value](path) }

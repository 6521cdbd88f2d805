// Package backends is the array of the endpoints of Services' ports, and the array
// of slots in which each set of maps/services has the numbers of its own. The
// agent writes them.
package backends

//go:generate go run ../../tools/enums

import (
	"cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// The maps' names in the object and below the pin directory.
const (
	Name      = "backends"
	SlotsName = "slots"
)

// Key is the backend's number; 0 is none.
type Key struct {
	Backend uint32
}

// Value is struct backend.
type Value struct {
	Address wire.Addr
	Port    wire.Port
	Proto   wire.Protocol
	Flags   Flags
	// Generation rises when the backend is in no EndpointSlice any more.
	Generation uint32
	// Set is the index in the map sets of the Service's port that it serves.
	Set uint32
}

// Flags are properties of a backend: enum backend_flags.
type Flags uint8

// SlotKey is the index of a slot.
type SlotKey struct {
	Slot uint32
}

// Slot is struct slot.
type Slot struct {
	Backend uint32
}

// The definitions of the two maps.
var (
	Definition = typed.Define[Key, Value](typed.Definition{
		Name:    Name,
		Content: typed.Configured,
		View: typed.View[Key, Value]{
			Columns: typed.Columns("BACKEND#", "PROTO", "ENDPOINT", "SET#", "FLAGS", "GENERATION#"),
			Compare: func(a, b typed.Entry[Key, Value]) int { return cmp.Compare(a.Key.Backend, b.Key.Backend) },
			Cells: func(k Key, v Value) []any {
				return []any{k.Backend, v.Proto, v.Address.With(v.Port), v.Set, v.Flags, v.Generation}
			},
			Unused: func(v Value) bool { return v.Set == 0 },
		},
	})
	Slots = typed.Define[SlotKey, Slot](typed.Definition{Name: SlotsName, Content: typed.Configured})
)

// The open maps.
type (
	// Map is that of backends.
	Map = typed.Map[Key, Value]
	// SlotsMap is that of slots.
	SlotsMap = typed.Map[SlotKey, Slot]
)

// Package affinity is the array of the backends that clients keep, for Services
// with sessionAffinity ClientIP. The programs write it.
package affinity

//go:generate go run ../../tools/enums

import (
	"cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Name is the map's name in the object and below the pin directory.
const Name = "affinity"

// Key is the array index.
type Key struct {
	Slot uint32
}

// Value is struct affinity.
type Value struct {
	Client wire.Addr
	// Set and Backend are numbers of the maps sets and backends.
	Set        uint32
	Backend    uint32
	Generation uint32
	// Ifindex is that of the pod that holds the record; 0: a client in the world.
	Ifindex uint32
	// LastSeen is when the client last opened a flow (CLOCK_MONOTONIC, ns); 1: being written, 0: never used.
	LastSeen uint64
}

// Definition defines the map.
var Definition = typed.Define[Key, Value](typed.Definition{
	Name:    Name,
	Content: typed.Learned,
	View: typed.View[Key, Value]{
		Columns: typed.Columns("CLIENT", "SET#", "BACKEND#", "IFINDEX#", "AGE#"),
		Compare: func(a, b typed.Entry[Key, Value]) int {
			return cmp.Or(a.Value.Client.Compare(b.Value.Client), cmp.Compare(a.Value.Set, b.Value.Set))
		},
		Cells: func(_ Key, v Value) []any {
			return []any{v.Client, v.Set, v.Backend, typed.Number(v.Ifindex), typed.Stamp(v.LastSeen)}
		},
		Object: func(_ Key, v Value) typed.Object { return typed.ObjectOf(v) },
		Unused: func(v Value) bool { return v.LastSeen == 0 },
	},
})

// Map is the open map.
type Map = typed.Map[Key, Value]

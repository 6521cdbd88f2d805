// Package fragments is the array of fragmented datagrams with the ports that the
// first fragment of each has carried. The programs write it.
package fragments

//go:generate go run ../../tools/enums

import (
	"cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Name is the map's name in the object and below the pin directory.
const Name = "fragments"

// Key is the array index.
type Key struct {
	Slot uint32
}

// Value is struct fragment.
type Value struct {
	Src wire.Addr
	Dst wire.Addr
	// ID is the identification of IPv4, or of the IPv6 fragment header, in host order.
	ID    uint32
	Proto wire.Protocol
	_     [3]byte
	Sport wire.Port
	Dport wire.Port
	// Ifindex is that of the pod that holds the record, or World or Node.
	Ifindex uint32
	// LastSeen is when the first fragment came (CLOCK_MONOTONIC, ns); 1: being written, 0: never used.
	LastSeen uint64
}

// Definition defines the map.
var Definition = typed.Define[Key, Value](typed.Definition{
	Name:    Name,
	Content: typed.Learned,
	// Shows the datagrams, without their indexes.
	View: typed.View[Key, Value]{
		Columns: typed.Columns("PROTO", "SOURCE", "DESTINATION", "ID#", "SPORT#", "DPORT#", "IFINDEX#", "AGE#"),
		Compare: func(a, b typed.Entry[Key, Value]) int {
			return cmp.Or(
				cmp.Compare(a.Value.Proto, b.Value.Proto), a.Value.Src.Compare(b.Value.Src),
				a.Value.Dst.Compare(b.Value.Dst), cmp.Compare(a.Value.ID, b.Value.ID),
			)
		},
		Cells: func(_ Key, v Value) []any {
			return []any{v.Proto, v.Src, v.Dst, v.ID, v.Sport, v.Dport, typed.Number(v.Ifindex), typed.Stamp(v.LastSeen)}
		},
		Object: func(_ Key, v Value) typed.Object { return typed.ObjectOf(v) },
		Unused: func(v Value) bool { return v.LastSeen == 0 },
	},
})

// Map is the open map.
type Map = typed.Map[Key, Value]

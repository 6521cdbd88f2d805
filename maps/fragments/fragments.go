// Package fragments is the array of fragmented datagrams with the ports that the
// first fragment of each carried. The programs write it.
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
	Place uint32
}

// Value is struct fragment. LastSeen is 0 in a record never used.
type Value struct {
	Src   wire.Addr
	Dst   wire.Addr
	ID    uint32
	Proto wire.Protocol
	_     [3]byte
	Sport wire.Port
	Dport wire.Port
	// Ifindex is the pod's that holds the record, or World or Node.
	Ifindex  uint32
	LastSeen uint64
}

// Definition is what there is to know about the map.
var Definition = typed.Define[Key, Value](typed.Definition{
	Name:    Name,
	Content: typed.Learned,
	// The datagrams that stand in the array, wherever they do.
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

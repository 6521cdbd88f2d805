// Package usage is the array that counts the entries of the flow tables, and holds
// the ends of their journals. The programs write it.
package usage

//go:generate go run ../../tools/enums

import (
	"cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
)

// Name is the map's name in the object and below the pin directory.
const Name = "usage"

// Table is a flow table: enum usage_table. Its text is the name of its map.
type Table uint32

// Key is the array index.
type Key struct {
	Table Table
}

// Value is struct usage.
type Value struct {
	Entries uint64 `map:"counter"`
	// Head and Tail are the ends of the table's journal, as counts of records ever appended and removed.
	Head uint64 `map:"counter"`
	Tail uint64 `map:"counter"`
	// Swept is the time of the last sweep, CLOCK_MONOTONIC in ns.
	Swept uint64 `map:"counter"`
}

// Definition defines the map.
var Definition = typed.Define[Key, Value](typed.Definition{
	Name:    Name,
	Content: typed.Learned,
	View: typed.View[Key, Value]{
		Columns: typed.Columns("TABLE", "ENTRIES#"),
		Compare: func(a, b typed.Entry[Key, Value]) int { return cmp.Compare(a.Key.Table, b.Key.Table) },
		Cells:   func(k Key, v Value) []any { return []any{k.Table, v.Entries} },
	},
})

// Map is the open map.
type Map = typed.Map[Key, Value]

// Open opens the map pinned at path.
func Open(path string) (*Map, error) { return typed.Open[Key, Value](path) }

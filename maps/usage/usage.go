// Package usage is the array that counts the entries of the flow tables. The
// programs write it.
package usage

import (
	"strconv"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
)

// Name is the map's name in the object and below the pin directory.
const Name = "usage"

// Table is a flow table: enum usage_table.
type Table uint32

// The tables.
const (
	Snat Table = iota
	Conntrack
	Tables
)

// String is the table's map name.
func (t Table) String() string {
	switch t {
	case Snat:
		return "snat"
	case Conntrack:
		return "conntrack"
	}
	return strconv.Itoa(int(t))
}

// MarshalText implements encoding.TextMarshaler.
func (t Table) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// Key is the array index.
type Key struct {
	Table Table
}

// Value is struct usage.
type Value struct {
	Entries uint64
	// Head and Tail are the ends of the table's journal, in records ever written.
	Head, Tail uint64
	// Swept is the time of the last sweep, CLOCK_MONOTONIC in ns.
	Swept uint64
}

// Map is the open map.
type Map = typed.Map[Key, Value]

// Open opens the map pinned at path.
func Open(path string) (*Map, error) { return typed.Open[Key, Value](path) }

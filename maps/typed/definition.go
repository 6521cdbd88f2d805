package typed

import (
	"reflect"

	"github.com/ebpf-cni/ebpf-cni/maps/raw"
)

// Content says who writes a map, and so what becomes of its entries when a new
// build has to recreate it, because a value grows or a capacity changes.
type Content int

const (
	// Configured maps are written by the agent and the plugin, except for counters:
	// the new map becomes a copy of the pinned one.
	Configured Content = iota + 1
	// Learned maps are written by the programs. Flows are merged and counters added;
	// everything else costs little to lose, and the new map begins without it.
	Learned
	// Private maps belong to the programs of one load and are not pinned.
	Private
)

// Definition is what code that handles all maps alike needs to know of one. Each
// map's package has one, and maps/registry lists them.
//
// Fields of Value with the tag `map:"counter"` are numbers of 32 or 64 bits that
// the programs add to.
type Definition struct {
	// Name is the map's name in the object and below the pin directory.
	Name string
	// Key and Value are the record's Go types; nil for a private map.
	Key, Value reflect.Type
	Content    Content
	// Capacity names the flow table whose capacity, an option of the agent, the map
	// shares; empty: as compiled.
	Capacity string
	// Flows is set for a flow table.
	Flows *Flows
	// View shows the map to operators; nil: it is not shown.
	View Viewer
}

// Define adds the types of the record to a definition.
func Define[K comparable, V any](d Definition) Definition {
	d.Key, d.Value = reflect.TypeFor[K](), reflect.TypeFor[V]()
	return d
}

// Flows says how two copies of a flow table are merged.
type Flows struct {
	// Join merges the two values of a flow that is in both tables.
	Join func(ours, theirs []byte) []byte
	// LastSeen is the offset in the value of the time of the last packet, 64 bits.
	LastSeen uintptr
}

// JoinedBy makes Flows of a function on values.
func JoinedBy[V any](join func(ours, theirs V) V, lastSeen uintptr) *Flows {
	return &Flows{LastSeen: lastSeen, Join: func(ours, theirs []byte) []byte {
		return raw.Encode(ours, join(raw.Decode[V](ours), raw.Decode[V](theirs)))
	}}
}

// Counters returns the fields that the programs add to.
func (d Definition) Counters() (fields []reflect.StructField) {
	if d.Value == nil || d.Value.Kind() != reflect.Struct {
		return nil
	}
	for f := range d.Value.Fields() {
		if f.Tag.Get("map") == "counter" {
			fields = append(fields, f)
		}
	}
	return fields
}

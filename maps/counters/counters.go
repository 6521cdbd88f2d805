// Package counters is what the maps drops and traffic have in common: a per-CPU array that counts packets by direction and by
// what became of them, a number of slots for each direction.
package counters

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Value is struct drop_counter and struct traffic_counter.
type Value struct {
	Packets uint64
	Bytes   uint64
}

// Map is the open map.
type Map struct {
	*ebpf.Map
	name  string
	slots uint32
}

// Open opens the map pinned at path.
func Open(path string, slots uint32) (*Map, error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return nil, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	return Of(m, path, slots), nil
}

// Of wraps a map that is open already; name is for error messages.
func Of(m *ebpf.Map, name string, slots uint32) *Map { return &Map{m, name, slots} }

// Sum returns the counter at index, added up over all CPUs.
func (m *Map) Sum(index uint32) (Value, error) {
	var sum Value
	var each []Value
	if err := m.Lookup(&index, &each); err != nil {
		return sum, fmt.Errorf("look up %d in map %s: %w", index, m.name, err)
	}
	for _, v := range each {
		sum.Packets += v.Packets
		sum.Bytes += v.Bytes
	}
	return sum, nil
}

// Each calls f with the counters that are not zero, by direction, then slot.
func (m *Map) Each(f func(d wire.Direction, slot uint32, v Value)) error {
	for d := range wire.Directions {
		for slot := range m.slots {
			v, err := m.Sum(uint32(d)*m.slots + slot)
			if err != nil {
				return err
			}
			if v != (Value{}) {
				f(d, slot, v)
			}
		}
	}
	return nil
}

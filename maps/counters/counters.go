// Package counters is the common form of the maps drops and traffic: per-CPU
// arrays that count packets by direction and by what became of them.
package counters

import (
	"fmt"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Slot is what packets are counted by: a drop's reason, or an event.
type Slot interface {
	~uint32
	fmt.Stringer
	// Explain is one line for operators.
	Explain() string
}

// Value is struct counter.
type Value struct {
	Packets uint64 `map:"counter"`
	// Bytes are of whole frames, at their length on arrival.
	Bytes uint64 `map:"counter"`
}

// Counter is the sum over all CPUs for one direction and slot.
type Counter[S Slot] struct {
	Direction wire.Direction
	Slot      S
	Value
}

// Map is the open map.
type Map[S Slot] struct {
	*ebpf.Map
	name string
}

// Open opens the map pinned at path.
func Open[S Slot](path string) (*Map[S], error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return nil, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	return Of[S](m, path), nil
}

// Of wraps an open map; name is for error messages.
func Of[S Slot](m *ebpf.Map, name string) *Map[S] { return &Map[S]{m, name} }

// slots is how many slots each direction has.
func (m *Map[S]) slots() uint32 { return m.MaxEntries() / wire.DirectionSlots }

// Index is the key of a counter.
func (m *Map[S]) Index(d wire.Direction, s S) uint32 { return uint32(d)*m.slots() + uint32(s) }

// Sum returns a counter, added up over all CPUs.
func (m *Map[S]) Sum(d wire.Direction, s S) (sum Value, err error) {
	var each []Value
	if err := m.Lookup(m.Index(d, s), &each); err != nil {
		return sum, fmt.Errorf("look up %v %v in map %s: %w", d, s, m.name, err)
	}
	for _, v := range each {
		sum.Packets += v.Packets
		sum.Bytes += v.Bytes
	}
	return sum, nil
}

// All returns the counters that are not zero, sorted by direction, then slot.
func (m *Map[S]) All() (out []Counter[S], err error) {
	for d := range wire.Directions {
		for s := range S(m.slots()) {
			v, err := m.Sum(d, s)
			if err != nil {
				return nil, err
			}
			if v != (Value{}) {
				out = append(out, Counter[S]{d, s, v})
			}
		}
	}
	return out, nil
}

// Define is the definition of a map of counters; slot is the name of a slot in dumps.
func Define[S Slot](name, slot string) typed.Definition {
	return typed.Define[uint32, Value](typed.Definition{Name: name, Content: typed.Learned, View: view[S]{slot}})
}

type view[S Slot] struct{ slot string }

// Show implements typed.Viewer.
func (w view[S]) Show(m *ebpf.Map, name string, _ uint64) (typed.Table, error) {
	all, err := Of[S](m, name).All()
	return typed.Table{
		Name:    name,
		Columns: typed.Columns("DIRECTION", strings.ToUpper(w.slot), "PACKETS#", "BYTES#", "EXPLANATION"),
		Len:     len(all),
		Cells: func(i int) []string {
			c := all[i]
			return []string{c.Direction.String(), c.Slot.String(), fmt.Sprint(c.Packets), fmt.Sprint(c.Bytes), c.Slot.Explain()}
		},
		Object: func(i int) typed.Object {
			c := all[i]
			return typed.Object{
				{Name: "direction", Value: c.Direction.String()}, {Name: w.slot, Value: c.Slot.String()},
				{Name: "packets", Value: c.Packets}, {Name: "bytes", Value: c.Bytes}, {Name: "explanation", Value: c.Slot.Explain()},
			}
		},
	}, err
}

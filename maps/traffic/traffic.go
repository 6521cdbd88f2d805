// Package traffic is the per-CPU array that counts what became of the packets
// that were not dropped. The programs write it.
package traffic

import (
	"strconv"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/counters"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Name is the map's name in the object and below the pin directory.
const Name = "traffic"

// Slots is how many events each direction has room for: TRAFFIC_SLOTS.
const Slots = 16

// Event is what became of a packet: enum traffic_event.
type Event uint32

// The events; each packet counts under one of the first four or in drops.
const (
	Delivered Event = iota
	Forwarded
	Stack
	Answered
	SnatAllocated
	SnatRetried
	Events
)

// text holds an event's name and its explanation for people.
var text = [Events][2]string{
	Delivered:     {"delivered", "redirected into a pod of this node"},
	Forwarded:     {"forwarded", "redirected out of an uplink"},
	Stack:         {"stack", "passed on to other programs and the host's stack"},
	Answered:      {"answered", "answered by the program itself"},
	SnatAllocated: {"snat_allocated", "a port was chosen for a new masqueraded flow"},
	SnatRetried:   {"snat_retried", "a port was tried and found taken"},
}

// String is the name used in dumps, such as "delivered".
func (e Event) String() string {
	if e < Events {
		return text[e][0]
	}
	return strconv.Itoa(int(e))
}

// Explain is one line for people, the comment of enum traffic_event.
func (e Event) Explain() string {
	if e < Events {
		return text[e][1]
	}
	return "unknown to this version"
}

// Index is the key of a counter.
func Index(d wire.Direction, e Event) uint32 { return uint32(d)*Slots + uint32(e) }

// Value is one counter.
type Value = counters.Value

// Counter is the sum over all CPUs for one direction and event.
type Counter struct {
	Direction wire.Direction
	Event     Event
	Value
}

// Map is the open map.
type Map struct{ *counters.Map }

// Open opens the map pinned at path.
func Open(path string) (*Map, error) {
	m, err := counters.Open(path, Slots)
	return &Map{m}, err
}

// Of wraps a map that is open already.
func Of(m *ebpf.Map) *Map { return &Map{counters.Of(m, Name, Slots)} }

// All returns the counters that are not zero, by direction, then event.
func (m *Map) All() (out []Counter, err error) {
	err = m.Each(func(d wire.Direction, slot uint32, v Value) { out = append(out, Counter{d, Event(slot), v}) })
	return out, err
}

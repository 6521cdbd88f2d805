// Package traffic is the per-CPU array that counts what became of the packets
// that were not dropped. The programs write it.
package traffic

//go:generate go run ../../tools/enums -explain

import "github.com/ebpf-cni/ebpf-cni/maps/counters"

// Name is the map's name in the object and below the pin directory.
const Name = "traffic"

// Event is what became of a packet: enum traffic_event. Each packet is counted under
// one of the first four or in drops.
type Event uint32

// Counter is the sum over all CPUs for one direction and event.
type Counter = counters.Counter[Event]

// Map is the open map.
type Map = counters.Map[Event]

// Definition defines the map.
var Definition = counters.Define[Event](Name, "event")

// Open opens the map pinned at path.
func Open(path string) (*Map, error) { return counters.Open[Event](path) }

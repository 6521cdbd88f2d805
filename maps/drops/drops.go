// Package drops is the per-CPU array that counts packets which did not get
// through, by direction and reason. The programs write it.
package drops

//go:generate go run ../../tools/enums -upper -explain

import "github.com/ebpf-cni/ebpf-cni/maps/counters"

// Name is the map's name in the object and below the pin directory.
const Name = "drops"

// Reason says why a packet did not get through: enum drop_reason.
type Reason uint32

// Counter is the sum over all CPUs for one direction and reason.
type Counter = counters.Counter[Reason]

// Map is the open map.
type Map = counters.Map[Reason]

// Definition defines the map.
var Definition = counters.Define[Reason](Name, "reason")

// Open opens the map pinned at path.
func Open(path string) (*Map, error) { return counters.Open[Reason](path) }

// Package conntrack is the map of flows that the world opened towards a pod.
// The programs write it.
package conntrack

import (
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Name is the map's name in the object and below the pin directory.
const Name = "conntrack"

// Key is struct tuple, of the pod's replies.
type Key = wire.Tuple

// Value is struct conntrack_entry.
type Value struct {
	Ifindex     uint32
	FromPod     snat.State
	FromWorld   snat.State
	Flags       snat.Flags
	_           uint8
	PodSeqEnd   uint32
	PodAck      uint32
	WorldSeqEnd uint32
	WorldAck    uint32
	// LastSeen is CLOCK_MONOTONIC in ns; less than snat.Marks: being removed.
	LastSeen uint64
}

// Map is the open map.
type Map = typed.Map[Key, Value]

// Open opens the map pinned at path.
func Open(path string) (*Map, error) { return typed.Open[Key, Value](path) }

// Package conntrack is the map of flows that the world opened towards a pod.
// The programs write it, ec_collect removes entries.
package conntrack

import (
	"unsafe"

	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Name is the map's name in the object and below the pin directory.
const Name = "conntrack"

// Key is struct tuple, of the pod's replies.
type Key = wire.Tuple

// Value is struct conntrack_entry.
type Value struct {
	// Ifindex is the pod's generation.
	Ifindex   uint32
	FromPod   flow.State
	FromWorld flow.State
	Flags     flow.Flags
	_         uint8
	// The highest TCP numbers sent in each direction, in host order.
	PodSeqEnd   uint32
	PodAck      uint32
	WorldSeqEnd uint32
	WorldAck    uint32
	// LastSeen is CLOCK_MONOTONIC in ns, renewed at most once a second; below flow.Marks: being removed.
	LastSeen uint64
}

// Definition defines the map.
var Definition = typed.Define[Key, Value](typed.Definition{
	Name:     Name,
	Content:  typed.Learned,
	Capacity: Name,
	Flows:    typed.JoinedBy(join, unsafe.Offsetof(Value{}.LastSeen)),
	View: typed.View[Key, Value]{
		Columns: typed.Columns("PROTO", "POD", "WORLD", "FROM POD", "FROM WORLD", "IFINDEX#", "AGE#"),
		Compare: func(a, b typed.Entry[Key, Value]) int { return a.Key.Compare(b.Key) },
		Cells: func(k Key, v Value) []any {
			return []any{k.Proto, k.Src.With(k.Sport), k.Dst.With(k.Dport), v.FromPod, v.FromWorld, v.Ifindex, typed.Stamp(v.LastSeen)}
		},
	},
})

// join merges two copies of an entry, as in snat.
func join(ours, theirs Value) Value {
	same := ours.Ifindex == theirs.Ifindex
	if flow.Stale(ours.LastSeen, theirs.LastSeen, same) {
		return ours
	}
	out := ours
	if theirs.LastSeen > ours.LastSeen {
		out = theirs
	}
	if same {
		out.FromPod, out.FromWorld = ours.FromPod|theirs.FromPod, ours.FromWorld|theirs.FromWorld
		out.PodSeqEnd, out.PodAck = flow.Later(ours.PodSeqEnd, theirs.PodSeqEnd), flow.Later(ours.PodAck, theirs.PodAck)
		out.WorldSeqEnd, out.WorldAck = flow.Later(ours.WorldSeqEnd, theirs.WorldSeqEnd), flow.Later(ours.WorldAck, theirs.WorldAck)
	}
	return out
}

// Map is the open map.
type Map = typed.Map[Key, Value]

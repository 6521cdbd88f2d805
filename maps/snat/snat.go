// Package snat is the pair of maps that hold masqueraded flows, one by the tuple
// as the pod sends it, one by the tuple as the world sees it. The programs write
// both, ec_collect removes entries.
package snat

import (
	"unsafe"

	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// The maps' names in the object and below the pin directory.
const (
	Name        = "snat"
	ReverseName = "snat_reverse"
)

// Key is struct tuple, of a packet on its way out in both maps.
type Key = wire.Tuple

// Value is struct snat_entry.
type Value struct {
	// ToAddress and ToPort are what the pod's side becomes: the node's in snat,
	// the pod's in snat_reverse.
	ToAddress wire.Addr
	ToPort    wire.Port
	State     flow.State
	Flags     flow.Flags
	// Ifindex is the pod's generation, 0 for a flow of the node itself.
	Ifindex uint32
	// SeqEnd and Ack are the highest TCP numbers sent in this half's direction, in host order.
	SeqEnd uint32
	Ack    uint32
	// LastSeen is CLOCK_MONOTONIC in ns, renewed at most once a second; below flow.Marks: being removed.
	LastSeen uint64
	// FarAddress and FarPort are, with flow.Service, what the far side becomes: the backend's in snat, the Service's in snat_reverse.
	FarAddress wire.Addr
	// Set and Backend are the numbers of the Service's port and of the backend; Generation is the backend's when the flow began.
	Set        uint32
	Backend    uint32
	Generation uint32
	FarPort    wire.Port
	_          [3]uint16
	// Pod is the generation of the backend, if that is a pod of this node; 0: none, or not known.
	Pod uint32
}

// Definition and Reverse define the two maps.
var (
	Definition = define(Name, "AS", "BACKEND")
	Reverse    = define(ReverseName, "POD", "SERVICE")
)

// define defines one map; to and far are the columns' names for what the pod's side and the far side become.
func define(name, to, far string) typed.Definition {
	return typed.Define[Key, Value](typed.Definition{
		Name:     name,
		Content:  typed.Learned,
		Capacity: Name,
		Flows:    typed.JoinedBy(join, unsafe.Offsetof(Value{}.LastSeen)),
		View: typed.View[Key, Value]{
			Columns: typed.Columns("PROTO", "SOURCE", "DESTINATION", to, far, "STATE", "FLAGS", "IFINDEX#", "AGE#"),
			Compare: func(a, b typed.Entry[Key, Value]) int { return a.Key.Compare(b.Key) },
			Cells: func(k Key, v Value) []any {
				return []any{
					k.Proto, k.Src.With(k.Sport), k.Dst.With(k.Dport), v.ToAddress.With(v.ToPort), farSide(v),
					v.State, v.Flags, v.Ifindex, typed.Stamp(v.LastSeen),
				}
			},
		},
	})
}

// farSide is what the far side becomes; a dash: it stays.
func farSide(v Value) string {
	if v.Flags&flow.Service == 0 {
		return "-"
	}
	return v.FarAddress.With(v.FarPort)
}

// join merges two copies of an entry: the later one, with the state bits that only
// the other has, since each may have been written for different packets.
func join(ours, theirs Value) Value {
	same := ours.Ifindex == theirs.Ifindex && ours.ToAddress == theirs.ToAddress && ours.ToPort == theirs.ToPort &&
		ours.FarAddress == theirs.FarAddress && ours.FarPort == theirs.FarPort
	if flow.Stale(ours.LastSeen, theirs.LastSeen, same) {
		return ours
	}
	out := ours
	if theirs.LastSeen > ours.LastSeen {
		out = theirs
	}
	if same {
		out.State = ours.State | theirs.State
		out.SeqEnd, out.Ack = flow.Later(ours.SeqEnd, theirs.SeqEnd), flow.Later(ours.Ack, theirs.Ack)
	}
	return out
}

// Map is the open map, either half.
type Map = typed.Map[Key, Value]

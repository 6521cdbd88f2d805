// Package snat is the pair of maps that hold masqueraded flows, by the tuple
// as the pod sends it and by the tuple as the world sees it. The programs write
// both.
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
	SeqEnd  uint32
	Ack     uint32
	// LastSeen is CLOCK_MONOTONIC in ns; less than flow.Marks: being removed.
	LastSeen uint64
}

// Definition and Reverse are what there is to know about the two halves.
var (
	Definition = define(Name, "AS")
	Reverse    = define(ReverseName, "POD")
)

// define is the definition of one half; to names the column of what the pod's side becomes.
func define(name, to string) typed.Definition {
	return typed.Define[Key, Value](typed.Definition{
		Name:     name,
		Content:  typed.Learned,
		Capacity: Name,
		Flows:    typed.JoinedBy(join, unsafe.Offsetof(Value{}.LastSeen)),
		View: typed.View[Key, Value]{
			Columns: typed.Columns("PROTO", "SOURCE", "DESTINATION", to, "STATE", "FLAGS", "IFINDEX#", "AGE#"),
			Compare: func(a, b typed.Entry[Key, Value]) int { return a.Key.Compare(b.Key) },
			Cells: func(k Key, v Value) []any {
				return []any{
					k.Proto, k.Src.With(k.Sport), k.Dst.With(k.Dport), v.ToAddress.With(v.ToPort),
					v.State, v.Flags, v.Ifindex, typed.Stamp(v.LastSeen),
				}
			},
		},
	})
}

// join makes one entry of two copies. The later one counts, with the state bits
// that only the other saw: each direction of a flow passes one hook, so they saw
// different packets.
func join(ours, theirs Value) Value {
	same := ours.Ifindex == theirs.Ifindex && ours.ToAddress == theirs.ToAddress && ours.ToPort == theirs.ToPort
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

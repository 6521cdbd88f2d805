// Package devices is the map of this node's pods by the index of their
// host-side veth: the addresses each may send from, and its counters. The plugin
// writes an entry, the programs its counters. World is no pod.
package devices

//go:generate go run ../../tools/enums

import (
	"cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Name is the map's name in the object and below the pin directory.
const Name = "devices"

// World is the index under which the world and the node itself hold flows to Services: no pod's. The agent makes that entry.
const World = 0

// Key is struct device_key.
type Key struct {
	Ifindex uint32
}

// Value is struct device. The counters belong to the programs: a missing entry is
// restored with typed.Map.Insert, so that a live one is never overwritten.
type Value struct {
	// Addresses are those that the pod may send from.
	Addresses wire.Addresses
	PodMAC    wire.MAC
	HostMAC   wire.MAC
	// SnatFlows and ConntrackFlows are the pod's entries in these tables.
	SnatFlows uint32 `map:"counter"`
	// Packets and Bytes, of whole frames, are what the pod has sent.
	Packets        uint64 `map:"counter"`
	Bytes          uint64 `map:"counter"`
	ConntrackFlows uint32 `map:"counter"`
	// AnswersUntil is until when the pod's answers, RSTs and errors about what is too big, are used up (CLOCK_MONOTONIC, 2^16 ns);
	// AllowanceUntil is the same for neighbours to ask for, in ns. The programs write both.
	AnswersUntil   uint32
	AllowanceUntil uint64
	// Netns is 1 more than the number of the pod's namespace in the host's (NETNSA_NSID); 0: it has none.
	Netns uint32
	// Flags are the programs'.
	Flags Flags
}

// Flags are what programs have learnt of a pod: enum device_flags.
type Flags uint32

// Definition defines the map.
var Definition = typed.Define[Key, Value](typed.Definition{
	Name:    Name,
	Content: typed.Configured,
	View: typed.View[Key, Value]{
		Columns: typed.Columns("IFINDEX#", "IPV4", "IPV6", "POD MAC", "HOST MAC", "SNAT#", "CONNTRACK#", "PACKETS#", "BYTES#"),
		Compare: func(a, b typed.Entry[Key, Value]) int { return cmp.Compare(a.Key.Ifindex, b.Key.Ifindex) },
		Cells: func(k Key, v Value) []any {
			return []any{k.Ifindex, v.Addresses[wire.IPv4], v.Addresses[wire.IPv6], v.PodMAC, v.HostMAC, v.SnatFlows, v.ConntrackFlows, v.Packets, v.Bytes}
		},
	},
})

// Map is the open map.
type Map = typed.Map[Key, Value]

// Open opens the map pinned at path.
func Open(path string) (*Map, error) { return typed.Open[Key, Value](path) }

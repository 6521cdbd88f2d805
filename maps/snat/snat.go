// Package snat is the pair of maps that hold masqueraded flows, by the tuple
// as the pod sends it and by the tuple as the world sees it. The programs write
// both.
package snat

import (
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// The maps' names in the object and below the pin directory.
const (
	Name        = "snat"
	ReverseName = "snat_reverse"
)

// State is what has passed in one direction: enum flow_state.
type State uint8

// The bits of State.
const (
	SYN    State = 1
	ACK    State = 2
	FIN    State = 4
	Reset  State = 8
	Packet State = 16
)

// String lists the bits, such as "syn|ack"; "-" when none is set.
func (s State) String() string {
	return wire.Bits(uint32(s), "syn", "ack", "fin", "reset", "packet")
}

// MarshalText implements encoding.TextMarshaler.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Flags are properties of a flow: enum snat_flags.
type Flags uint8

// The bits of Flags.
const (
	ViaStack Flags = 1
	Host     Flags = 2
	Counted  Flags = 4
)

// String lists the bits, such as "via_stack"; "-" when none is set.
func (f Flags) String() string { return wire.Bits(uint32(f), "via_stack", "host", "counted") }

// MarshalText implements encoding.TextMarshaler.
func (f Flags) MarshalText() ([]byte, error) { return []byte(f.String()), nil }

// Key is struct tuple, of a packet on its way out in both maps.
type Key = wire.Tuple

// Value is struct snat_entry.
type Value struct {
	// ToAddress and ToPort are what the pod's side becomes: the node's in snat,
	// the pod's in snat_reverse.
	ToAddress wire.Addr
	ToPort    wire.Port
	State     State
	Flags     Flags
	// Ifindex is the pod's generation, 0 for a flow of the node itself.
	Ifindex uint32
	SeqEnd  uint32
	Ack     uint32
	// LastSeen is CLOCK_MONOTONIC in ns; less than Marks: being removed.
	LastSeen uint64
}

// Marks is more than what the programs mark entries with that are being removed, in LastSeen: FLOW_MARKS. Conntrack's
// are marked alike.
const Marks = 1 << 29

// Map is the open map, either half.
type Map = typed.Map[Key, Value]

// Open opens the half pinned at path.
func Open(path string) (*Map, error) { return typed.Open[Key, Value](path) }

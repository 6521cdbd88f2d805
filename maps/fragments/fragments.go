// Package fragments is the array of fragmented datagrams with the ports that the
// first fragment of each carried. The programs write it.
package fragments

import (
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Name is the map's name in the object and below the pin directory.
const Name = "fragments"

// OfWorld and OfOthers are how many places there are for what the world sends to
// the node, and for all else; Each is how many of those a pod has.
const (
	OfWorld  = 8192
	OfOthers = 57344
	Each     = 64
)

// Who holds a record, where it is no pod.
const (
	World = 0
	Node  = 1
)

// Key is the array index.
type Key struct {
	Place uint32
}

// Value is struct fragment. LastSeen is 0 in a record never used.
type Value struct {
	Src      wire.Addr
	Dst      wire.Addr
	ID       uint32
	Proto    wire.Protocol
	_        [3]byte
	Sport    wire.Port
	Dport    wire.Port
	Ifindex  uint32
	LastSeen uint64
}

// Map is the open map.
type Map = typed.Map[Key, Value]

// Open opens the map pinned at path.
func Open(path string) (*Map, error) { return typed.Open[Key, Value](path) }

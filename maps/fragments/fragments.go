// Package fragments is the LRU map from a fragmented datagram to the ports that
// its first fragment carried. The programs write it.
package fragments

import (
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Name is the map's name in the object and below the pin directory.
const Name = "fragments"

// Key is struct fragment_key.
type Key struct {
	Src   wire.Addr
	Dst   wire.Addr
	ID    uint32
	Proto wire.Protocol
	_     [3]byte
}

// Value is struct fragment.
type Value struct {
	Sport wire.Port
	Dport wire.Port
}

// Map is the open map.
type Map = typed.Map[Key, Value]

// Open opens the map pinned at path.
func Open(path string) (*Map, error) { return typed.Open[Key, Value](path) }

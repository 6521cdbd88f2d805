// Package ports is the array that counts the ports that masqueraded flows hold
// towards each destination. The programs write it.
package ports

import "github.com/ebpf-cni/ebpf-cni/maps/typed"

// Name is the map's name in the object and below the pin directory.
const Name = "ports"

// Bits is how many bits of a hash make a key: PORTS_BITS.
const Bits = 17

// Key is the array index.
type Key struct {
	Cell uint32
}

// Value is struct port_count.
type Value struct {
	Flows uint32
}

// Map is the open map.
type Map = typed.Map[Key, Value]

// Open opens the map pinned at path.
func Open(path string) (*Map, error) { return typed.Open[Key, Value](path) }

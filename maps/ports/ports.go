// Package ports is the array that counts the ports that masqueraded flows use
// towards each destination, in total and for each pod. The programs write it.
package ports

//go:generate go run ../../tools/enums

import "github.com/ebpf-cni/ebpf-cni/maps/typed"

// Name is the map's name in the object and below the pin directory.
const Name = "ports"

// Key is the array index.
type Key struct {
	// Cell is the hash of a destination, and of a pod's ifindex or 0 for all.
	Cell uint32
}

// Value is struct port_count.
type Value struct {
	Flows uint32
}

// Definition defines the map.
var Definition = typed.Define[Key, Value](typed.Definition{Name: Name, Content: typed.Learned})

// Map is the open map.
type Map = typed.Map[Key, Value]

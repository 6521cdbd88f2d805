// Package ports is the array that counts the ports that masqueraded flows use
// towards each destination, in total and for each pod, and the array of the ports
// that they have ever got. The programs write both.
package ports

//go:generate go run ../../tools/enums

import "github.com/ebpf-cni/ebpf-cni/maps/typed"

// The maps' names in the object and below the pin directory.
const (
	Name      = "ports"
	GivenName = "given_ports"
)

// Key is the array index.
type Key struct {
	// Cell is the hash of a destination, and of a pod's ifindex or 0 for all.
	Cell uint32
}

// Value is struct port_count.
type Value struct {
	Flows uint32
}

// GivenKey is the array index.
type GivenKey struct {
	// Word is the port divided by GivenBits.
	Word uint32
}

// GivenValue is struct given_ports.
type GivenValue struct {
	// TCP, UDP and Others have a bit for each of GivenBits ports, the lowest first.
	TCP, UDP, Others uint64
}

// Definition and Given define the maps. What Given has must not be lost while there are flows, so a new build copies it.
var (
	Definition = typed.Define[Key, Value](typed.Definition{Name: Name, Content: typed.Learned})
	Given      = typed.Define[GivenKey, GivenValue](typed.Definition{Name: GivenName, Content: typed.Configured})
)

// Map is the open map.
type Map = typed.Map[Key, Value]

// GivenMap is the open map of the ports that flows have ever got.
type GivenMap = typed.Map[GivenKey, GivenValue]

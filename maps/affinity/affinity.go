// Package affinity is the backends that clients keep, for Services with
// sessionAffinity ClientIP: an array for pods, a hash for the world and the node
// itself. The programs write both.
package affinity

//go:generate go run ../../tools/enums

import (
	"cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// The maps' names in the object and below the pin directory.
const (
	Name        = "affinity"
	ClientsName = "clients"
)

// Key is the array index.
type Key struct {
	Slot uint32
}

// Value is struct affinity.
type Value struct {
	Client wire.Addr
	// Set and Backend are numbers of the maps sets and backends.
	Set        uint32
	Backend    uint32
	Generation uint32
	// Ifindex is that of the pod that holds the record.
	Ifindex uint32
	// LastSeen is when the client last opened a flow (CLOCK_MONOTONIC, ns); 1: being written, 0: never used.
	LastSeen uint64
}

// ClientKey is struct client_key.
type ClientKey struct {
	// Client is zero for the node's own processes.
	Client wire.Addr
	Set    uint32
}

// Client is struct client.
type Client struct {
	// Backend is a number of the map backends.
	Backend    uint32
	Generation uint32
	// LastSeen is when the client last opened a flow (CLOCK_MONOTONIC, ns).
	LastSeen uint64
}

// Definition defines the pods' map.
var Definition = typed.Define[Key, Value](typed.Definition{
	Name:    Name,
	Content: typed.Learned,
	View: typed.View[Key, Value]{
		Columns: typed.Columns("CLIENT", "SET#", "BACKEND#", "IFINDEX#", "AGE#"),
		Compare: func(a, b typed.Entry[Key, Value]) int {
			return cmp.Or(a.Value.Client.Compare(b.Value.Client), cmp.Compare(a.Value.Set, b.Value.Set))
		},
		Cells: func(_ Key, v Value) []any {
			return []any{v.Client, v.Set, v.Backend, typed.Number(v.Ifindex), typed.Stamp(v.LastSeen)}
		},
		Object: func(_ Key, v Value) typed.Object { return typed.ObjectOf(v) },
		Unused: func(v Value) bool { return v.LastSeen == 0 },
	},
})

// Clients defines the map of the world and the node itself.
var Clients = typed.Define[ClientKey, Client](typed.Definition{
	Name:    ClientsName,
	Content: typed.Learned,
	View: typed.View[ClientKey, Client]{
		Columns: typed.Columns("CLIENT", "SET#", "BACKEND#", "AGE#"),
		Compare: func(a, b typed.Entry[ClientKey, Client]) int {
			return cmp.Or(a.Key.Client.Compare(b.Key.Client), cmp.Compare(a.Key.Set, b.Key.Set))
		},
		Cells: func(k ClientKey, v Client) []any { return []any{k.Client, k.Set, v.Backend, typed.Stamp(v.LastSeen)} },
	},
})

// Map is the open map of pods.
type Map = typed.Map[Key, Value]

// Package sockets is the hash of the Services that sockets of the node's own
// processes talk to. The programs write it.
package sockets

import (
	"cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Name is the map's name in the object and below the pin directory.
const Name = "sockets"

// Key is struct socket_key.
type Key struct {
	// Cookie is the kernel's number of the socket.
	Cookie uint64
	// Number is the Service's among those of the socket.
	Number uint32
	_      uint32
}

// Value is struct socket_entry.
type Value struct {
	FrontendAddress wire.Addr
	BackendAddress  wire.Addr
	FrontendPort    wire.Port
	BackendPort     wire.Port
	Proto           wire.Protocol
	// Connected is 1 when the socket has been connected, else it has sent a datagram.
	Connected uint8
	_         uint16
	// Set and Backend are numbers of the maps sets and backends.
	Set        uint32
	Backend    uint32
	Generation uint32
}

// Definition defines the map.
var Definition = typed.Define[Key, Value](typed.Definition{
	Name:    Name,
	Content: typed.Learned,
	View: typed.View[Key, Value]{
		Columns: typed.Columns("COOKIE#", "PROTO", "FRONTEND", "ENDPOINT", "SET#", "BACKEND#"),
		Compare: func(a, b typed.Entry[Key, Value]) int {
			return cmp.Or(cmp.Compare(a.Key.Cookie, b.Key.Cookie), cmp.Compare(a.Key.Number, b.Key.Number))
		},
		Cells: func(k Key, v Value) []any {
			return []any{k.Cookie, v.Proto, v.FrontendAddress.With(v.FrontendPort), v.BackendAddress.With(v.BackendPort), v.Set, v.Backend}
		},
	},
})

// Map is the open map.
type Map = typed.Map[Key, Value]

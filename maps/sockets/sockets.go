// Package sockets is the hash of the Services that sockets of the node's own
// processes talk to. The programs write it.
package sockets

//go:generate go run ../../tools/enums

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
	Cookie  uint64
	Address wire.Addr
	Port    wire.Port
	Proto   wire.Protocol
	End     End
	_       uint32
}

// Value is struct socket_entry.
type Value struct {
	OtherAddress wire.Addr
	OtherPort    wire.Port
	// Connected is 1 when the socket has been connected, else it has sent a datagram.
	Connected uint16
	// Set and Backend are numbers of the maps sets and backends.
	Set        uint32
	Backend    uint32
	Generation uint32
}

// End says which of the two addresses is the key's: enum socket_end.
type End uint8

// Definition defines the map.
var Definition = typed.Define[Key, Value](typed.Definition{
	Name:    Name,
	Content: typed.Learned,
	View: typed.View[Key, Value]{
		Columns: typed.Columns("COOKIE#", "PROTO", "FRONTEND", "ENDPOINT", "SET#", "BACKEND#"),
		Compare: func(a, b typed.Entry[Key, Value]) int {
			return cmp.Or(cmp.Compare(a.Key.Cookie, b.Key.Cookie), a.Key.Address.Compare(b.Key.Address), cmp.Compare(a.Key.End, b.Key.End))
		},
		Cells: func(k Key, v Value) []any {
			frontend, backend := v.OtherAddress.With(v.OtherPort), k.Address.With(k.Port)
			if k.End == Frontend {
				frontend, backend = backend, frontend
			}
			return []any{k.Cookie, k.Proto, frontend, backend, v.Set, v.Backend}
		},
	},
})

// Map is the open map.
type Map = typed.Map[Key, Value]

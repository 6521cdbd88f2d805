// Package hostports is the map of the host ports of this node's pods. The plugin
// writes it.
package hostports

import (
	"cmp"
	"fmt"
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Name is the map's name in the object and below the pin directory.
const Name = "hostports"

// Key is struct host_port_key. The unspecified address of a family stands for all addresses of the node's in it.
type Key struct {
	Address wire.Addr
	Port    wire.Port
	Proto   wire.Protocol
	_       byte
}

// KeyFrom is the key of a port of a host's address, or of all of its family if that is unspecified.
func KeyFrom(host netip.Addr, port uint16, proto wire.Protocol) Key {
	return Key{Address: wire.AddrFrom(host), Port: wire.PortFrom(port), Proto: proto}
}

// Host is the host's address, unspecified for all of its family.
func (k Key) Host() netip.Addr { return netip.AddrFrom16(k.Address).Unmap() }

// String is such as "192.0.2.1:80/tcp" or, of all addresses, "0.0.0.0:80/tcp".
func (k Key) String() string {
	return fmt.Sprintf("%s/%v", netip.AddrPortFrom(k.Host(), k.Port.Host()), k.Proto)
}

// Everywhere is the same port at all addresses of the family.
func (k Key) Everywhere() Key {
	if k.Host().Is4() {
		return KeyFrom(netip.IPv4Unspecified(), k.Port.Host(), k.Proto)
	}
	return KeyFrom(netip.IPv6Unspecified(), k.Port.Host(), k.Proto)
}

// Compare sorts by port, then protocol, then address.
func (k Key) Compare(o Key) int {
	return cmp.Or(cmp.Compare(k.Port.Host(), o.Port.Host()), cmp.Compare(k.Proto, o.Proto), k.Address.Compare(o.Address))
}

// Value is struct host_port. Ifindex is the generation of the pod, as in the map endpoints.
type Value struct {
	PodAddress wire.Addr
	PodPort    wire.Port
	_          uint16
	Ifindex    uint32
}

// Definition defines the map.
var Definition = typed.Define[Key, Value](typed.Definition{
	Name:    Name,
	Content: typed.Configured,
	View: typed.View[Key, Value]{
		Columns: typed.Columns("PROTO", "HOST", "POD", "IFINDEX#"),
		Compare: func(a, b typed.Entry[Key, Value]) int { return a.Key.Compare(b.Key) },
		Cells: func(k Key, v Value) []any {
			return []any{k.Proto, netip.AddrPortFrom(k.Host(), k.Port.Host()), v.PodAddress.With(v.PodPort), v.Ifindex}
		},
		Object: func(k Key, v Value) typed.Object {
			o := typed.ObjectOf(k, v)
			for i, f := range o {
				if f.Name == "address" && k.Address == (wire.Addr{}) { // which is more than none here
					o[i].Value = netip.IPv6Unspecified().String()
				}
			}
			return o
		},
	},
})

// Map is the open map.
type Map = typed.Map[Key, Value]

// Open opens the map pinned at path.
func Open(path string) (*Map, error) { return typed.Open[Key, Value](path) }

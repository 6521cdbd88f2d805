// Package devices is the map of this node's pods by the index of their
// host-side veth: the addresses each may send from, and its counters.
package devices

import (
	"cmp"
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Name is the map's name in the object and below the pin directory.
const Name = "devices"

// Key is struct device_key.
type Key struct {
	Ifindex uint32
}

// Value is struct device. The counters belong to the programs: who restores an
// entry inserts it (typed.Map.Insert) and never overwrites a live one.
type Value struct {
	IPv4           wire.Addr
	IPv6           wire.Addr
	PodMAC         wire.MAC
	HostMAC        wire.MAC
	SnatFlows      uint32 `map:"counter"`
	Packets        uint64 `map:"counter"`
	Bytes          uint64 `map:"counter"`
	ConntrackFlows uint32 `map:"counter"`
	_              uint32
	ResetAt        uint64
}

// SetAddresses says what the pod may send from: at most one address of each family.
func (v *Value) SetAddresses(addresses []netip.Addr) {
	v.IPv4, v.IPv6 = wire.Addr{}, wire.Addr{}
	for _, a := range addresses {
		if a.Is4() {
			v.IPv4 = wire.AddrFrom(a)
		} else {
			v.IPv6 = wire.AddrFrom(a)
		}
	}
}

// Definition is what there is to know about the map.
var Definition = typed.Define[Key, Value](typed.Definition{
	Name:    Name,
	Content: typed.Configured,
	View: typed.View[Key, Value]{
		Columns: typed.Columns("IFINDEX#", "IPV4", "IPV6", "POD MAC", "HOST MAC", "SNAT#", "CONNTRACK#", "PACKETS#", "BYTES#"),
		Compare: func(a, b typed.Entry[Key, Value]) int { return cmp.Compare(a.Key.Ifindex, b.Key.Ifindex) },
		Cells: func(k Key, v Value) []any {
			return []any{k.Ifindex, v.IPv4, v.IPv6, v.PodMAC, v.HostMAC, v.SnatFlows, v.ConntrackFlows, v.Packets, v.Bytes}
		},
	},
})

// Map is the open map.
type Map = typed.Map[Key, Value]

// Open opens the map pinned at path.
func Open(path string) (*Map, error) { return typed.Open[Key, Value](path) }

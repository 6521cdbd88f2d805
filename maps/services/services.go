// Package services is the maps of Services: the frontends by address, port and
// protocol, the sets of backends of each Service's port, and the Services' names.
// The agent writes them; which backends are in a set stands in maps/backends.
package services

//go:generate go run ../../tools/enums

import (
	"bytes"
	"cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// The maps' names in the object and below the pin directory.
const (
	Name      = "services"
	SetsName  = "sets"
	NamesName = "set_names"
)

// Key is struct service_key: a frontend or, with port and protocol 0, an address that some Service has.
type Key struct {
	Address wire.Addr
	Port    wire.Port
	Proto   wire.Protocol
	_       byte
}

// Value is struct service.
type Value struct {
	// Set is the index in the map sets; 0 in the entry of an address.
	Set   uint32
	Flags Flags
}

// Flags are properties of a frontend or an address: enum service_flags.
type Flags uint32

// SetKey is the index of a set; 0 is none.
type SetKey struct {
	Set uint32
}

// Set is struct service_set.
type Set struct {
	Block Block
	// Affinity is for how many seconds a client keeps its backend; 0: it does not.
	Affinity uint32
	_        uint32
}

// Block is where the backends of a set stand in the map slots: enum set_layout.
type Block uint64

// BlockOf makes a block of its first slot and the numbers of backends in Cluster and, behind them, in Local.
func BlockOf(first, cluster, local uint32) Block {
	return Block(first)<<FirstShift | Block(cluster)<<ClusterShift | Block(local)
}

// First is the block's first slot.
func (b Block) First() uint32 { return uint32(b >> FirstShift) }

// Cluster is how many backends any node may use.
func (b Block) Cluster() uint32 { return uint32(b>>ClusterShift) & CountMask }

// Local is how many of this node a local traffic policy leaves.
func (b Block) Local() uint32 { return uint32(b) & CountMask }

// ServiceName is struct service_name: a port of a Service.
type ServiceName struct {
	Namespace [NameLen]byte
	Name      [NameLen]byte
	PortName  [NameLen]byte
	Port      wire.Port
	Proto     wire.Protocol
	_         byte
}

// Text is what a zero-terminated field of ServiceName says.
func Text(field [NameLen]byte) string {
	text, _, _ := bytes.Cut(field[:], []byte{0})
	return string(text)
}

// The definitions of the three maps.
var (
	Definition = typed.Define[Key, Value](typed.Definition{
		Name:    Name,
		Content: typed.Configured,
		View: typed.View[Key, Value]{
			Columns: typed.Columns("PROTO", "FRONTEND", "SET#", "FLAGS"),
			Compare: func(a, b typed.Entry[Key, Value]) int {
				return cmp.Or(
					a.Key.Address.Compare(b.Key.Address), cmp.Compare(a.Key.Port.Host(), b.Key.Port.Host()),
					cmp.Compare(a.Key.Proto, b.Key.Proto),
				)
			},
			Cells: func(k Key, v Value) []any {
				if k.Port == (wire.Port{}) {
					return []any{"-", k.Address, typed.Number(v.Set), v.Flags}
				}
				return []any{k.Proto, k.Address.With(k.Port), typed.Number(v.Set), v.Flags}
			},
			Object: func(k Key, v Value) typed.Object {
				o := typed.ObjectOf(k, v)
				for i, f := range o {
					if f.Name == "proto" && k.Proto == 0 { // of an address
						o[i].Value = ""
					}
				}
				return o
			},
		},
	})
	Sets  = typed.Define[SetKey, Set](typed.Definition{Name: SetsName, Content: typed.Configured})
	Names = typed.Define[SetKey, ServiceName](typed.Definition{Name: NamesName, Content: typed.Configured})
)

// The open maps.
type (
	// Map is that of frontends.
	Map = typed.Map[Key, Value]
	// SetsMap is that of sets.
	SetsMap = typed.Map[SetKey, Set]
	// NamesMap is that of Services' names.
	NamesMap = typed.Map[SetKey, ServiceName]
)

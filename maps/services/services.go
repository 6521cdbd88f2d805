// Package services is the maps of Services: the frontends by address, port and
// protocol, the sets of backends of each Service's port, the Services' names, and who
// may ask a load balancer. The agent writes them; which backends are in a set
// stands in maps/backends.
package services

//go:generate go run ../../tools/enums

import (
	"bytes"
	"cmp"
	"fmt"
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// The maps' names in the object and below the pin directory.
const (
	Name       = "services"
	SetsName   = "sets"
	NamesName  = "set_names"
	RangesName = "source_range"
)

// Key is struct service_key: a frontend or, with port and protocol 0, an address that some Service has, or this node. The
// address of a NodePort is the unspecified one of its family.
type Key struct {
	Address wire.Addr
	Port    wire.Port
	Proto   wire.Protocol
	_       byte
}

// NodePort is the key of a NodePort.
func NodePort(f wire.Family, port wire.Port, proto wire.Protocol) Key {
	return Key{Address: AnyAddress(f), Port: port, Proto: proto}
}

// AnyAddress is what stands in NodePorts for all addresses of a family with the flag Node.
func AnyAddress(f wire.Family) wire.Addr {
	if f == wire.IPv4 {
		return wire.AddrFrom(netip.IPv4Unspecified())
	}
	return wire.Addr{}
}

// IsNodePort reports whether it is the key of a NodePort.
func (k Key) IsNodePort() bool {
	return k.Address == AnyAddress(wire.IPv4) || k.Address == AnyAddress(wire.IPv6)
}

// Frontend is such as "10.96.0.1:443", or "*:30080" for a NodePort.
func (k Key) Frontend() string {
	if k.IsNodePort() {
		return fmt.Sprintf("*:%v", k.Port)
	}
	return k.Address.With(k.Port)
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

// RangeKey is struct source_range_key: an LPM trie key.
type RangeKey struct {
	// PrefixLen counts the 32 bits of the set, then those of the 16-byte address: an IPv4 /24 is 152.
	PrefixLen uint32
	Set       uint32
	Source    wire.Addr
}

// RangeKeyFrom is the key of a valid prefix; host bits are cleared.
func RangeKeyFrom(set uint32, p netip.Prefix) RangeKey {
	bits := setBits + p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	return RangeKey{PrefixLen: uint32(bits), Set: set, Source: wire.AddrFrom(p.Masked().Addr())}
}

// Netip returns the prefix, IPv4 unmapped.
func (k RangeKey) Netip() netip.Prefix {
	a, bits := netip.AddrFrom16(k.Source), int(k.PrefixLen)-setBits
	if a.Is4In6() && bits >= 96 {
		return netip.PrefixFrom(a.Unmap(), bits-96)
	}
	return netip.PrefixFrom(a, bits)
}

// setBits is how long the set is, which stands before the address.
const setBits = 32

// Range is struct source_range.
type Range struct {
	// Set is that of the key.
	Set uint32
}

// The definitions of the maps.
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
				return []any{k.Proto, k.Frontend(), typed.Number(v.Set), v.Flags}
			},
			Object: func(k Key, v Value) typed.Object {
				o := typed.ObjectOf(k, v)
				for i, f := range o {
					switch {
					case f.Name == "proto" && k.Proto == 0: // of an address
						o[i].Value = ""
					case f.Name == "address" && k.Address == (wire.Addr{}): // of a NodePort, where it is more than none
						o[i].Value = netip.IPv6Unspecified().String()
					}
				}
				return o
			},
		},
	})
	Sets         = typed.Define[SetKey, Set](typed.Definition{Name: SetsName, Content: typed.Configured})
	Names        = typed.Define[SetKey, ServiceName](typed.Definition{Name: NamesName, Content: typed.Configured})
	SourceRanges = typed.Define[RangeKey, Range](typed.Definition{
		Name:    RangesName,
		Content: typed.Configured,
		View: typed.View[RangeKey, Range]{
			Columns: typed.Columns("SET#", "SOURCE"),
			Compare: func(a, b typed.Entry[RangeKey, Range]) int {
				return cmp.Or(
					cmp.Compare(a.Key.Set, b.Key.Set), a.Key.Source.Compare(b.Key.Source), cmp.Compare(a.Key.PrefixLen, b.Key.PrefixLen),
				)
			},
			Cells: func(k RangeKey, _ Range) []any { return []any{k.Set, k.Netip()} },
			Object: func(k RangeKey, _ Range) typed.Object {
				return typed.Object{{Name: "set", Value: k.Set}, {Name: "source", Value: k.Netip().String()}}
			},
		},
	})
)

// The open maps.
type (
	// Map is that of frontends.
	Map = typed.Map[Key, Value]
	// SetsMap is that of sets.
	SetsMap = typed.Map[SetKey, Set]
	// NamesMap is that of Services' names.
	NamesMap = typed.Map[SetKey, ServiceName]
	// RangesMap is that of source ranges.
	RangesMap = typed.Map[RangeKey, Range]
)

// Package config is the array of one entry that holds what is the same for the
// whole node, and the constants that programs are loaded with. The agent
// writes it; the programs and the plugin read it.
package config

//go:generate go run ../../tools/enums

import (
	"cmp"
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Name is the map's name in the object and below the pin directory.
const Name = "config"

// Key is the array index; the one entry has the zero key.
type Key struct {
	Index uint32
}

// Value is struct config.
type Value struct {
	// Layout is wire.LayoutVersion of the agent that made the maps.
	Layout uint32
	// The lengths are of the prefixes in their own family: 24, not 120.
	PodCIDRIPv4Len uint32
	PodCIDRIPv6Len uint32
	// The addresses are zero where the node has none of the family.
	NodeIPv4    wire.Addr
	NodeIPv6    wire.Addr
	PodCIDRIPv4 wire.Addr
	PodCIDRIPv6 wire.Addr
	Flags       Flags
	// TunnelIfindex is the tunnel device; 0: there is none.
	TunnelIfindex uint32
	// TunnelSource is the outer source address; zero: the kernel chooses.
	TunnelSource wire.Addr
	// TunnelAddress is the tunnel device's: the host's, though in the podCIDR; zero: none.
	TunnelAddress wire.Addr
}

// Flags say what is left to the host's stack, and what the loader is doing: enum config_flags.
type Flags uint32

// PodCIDRs returns the node's podCIDRs, IPv4 first.
func (v Value) PodCIDRs() []netip.Prefix {
	var out []netip.Prefix
	if a := v.PodCIDRIPv4.Netip(); a.IsValid() {
		out = append(out, netip.PrefixFrom(a, int(v.PodCIDRIPv4Len)))
	}
	if a := v.PodCIDRIPv6.Netip(); a.IsValid() {
		out = append(out, netip.PrefixFrom(a, int(v.PodCIDRIPv6Len)))
	}
	return out
}

// NodeConfig is struct node_config: constants of a loaded program.
type NodeConfig struct {
	// Masquerade is 1 when what pods send to the world is masqueraded.
	Masquerade uint32
	// Mark is the skb mark bit of packets that our programs have sent out or translated.
	Mark uint32
	// SnatPortLow and SnatPortHigh bound the ports to masquerade to, inclusive, in host order.
	SnatPortLow  uint32
	SnatPortHigh uint32
	// SnatEntries and ConntrackEntries are the capacities of those tables.
	SnatEntries      uint32
	ConntrackEntries uint32
	// PathLifetime is how long a path is cached, in ns; 0: not at all.
	PathLifetime uint32
	// NetfilterNat is 1 when netfilter translates flows on this node, for kube-proxy, portmap or other rules.
	NetfilterNat uint32
	// TunnelPort is the UDP port of all nodes' tunnels, in host order.
	TunnelPort uint32
	// TunnelVNI is the VXLAN network identifier of the cluster, 24 bits (RFC 7348).
	TunnelVNI uint32
	// TunnelChecksum is 1 when the outer UDP checksum over IPv4 is computed, not 0; over IPv6 it always is.
	TunnelChecksum uint32
}

// Definition defines the map.
var Definition = typed.Define[Key, Value](typed.Definition{
	Name:    Name,
	Content: typed.Configured,
	View: typed.View[Key, Value]{
		Columns: typed.Columns("LAYOUT#", "NODE IPV4", "NODE IPV6", "POD CIDR IPV4", "POD CIDR IPV6", "FLAGS", "TUNNEL#", "TUNNEL SOURCE", "TUNNEL ADDRESS"),
		Compare: func(a, b typed.Entry[Key, Value]) int { return cmp.Compare(a.Key.Index, b.Key.Index) },
		Cells: func(_ Key, v Value) []any {
			return []any{
				v.Layout, v.NodeIPv4, v.NodeIPv6, prefixText(v.PodCIDRIPv4, v.PodCIDRIPv4Len), prefixText(v.PodCIDRIPv6, v.PodCIDRIPv6Len), v.Flags,
				typed.Number(v.TunnelIfindex), v.TunnelSource, v.TunnelAddress,
			}
		},
		// Each podCIDR as one prefix instead of address and length.
		Object: func(_ Key, v Value) typed.Object {
			return typed.Object{
				{Name: "layout", Value: v.Layout},
				{Name: "node_ipv4", Value: typed.OrEmpty(v.NodeIPv4.String())},
				{Name: "node_ipv6", Value: typed.OrEmpty(v.NodeIPv6.String())},
				{Name: "pod_cidr_ipv4", Value: typed.OrEmpty(prefixText(v.PodCIDRIPv4, v.PodCIDRIPv4Len))},
				{Name: "pod_cidr_ipv6", Value: typed.OrEmpty(prefixText(v.PodCIDRIPv6, v.PodCIDRIPv6Len))},
				{Name: "flags", Value: typed.OrEmpty(v.Flags.String())},
				{Name: "tunnel_ifindex", Value: v.TunnelIfindex},
				{Name: "tunnel_source", Value: typed.OrEmpty(v.TunnelSource.String())},
				{Name: "tunnel_address", Value: typed.OrEmpty(v.TunnelAddress.String())},
			}
		},
	},
})

func prefixText(a wire.Addr, bits uint32) string {
	if a == (wire.Addr{}) {
		return "-"
	}
	return netip.PrefixFrom(a.Netip(), int(bits)).String()
}

// Map is the open map.
type Map = typed.Map[Key, Value]

// Open opens the map pinned at path.
func Open(path string) (*Map, error) { return typed.Open[Key, Value](path) }

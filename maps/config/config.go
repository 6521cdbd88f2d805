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
	// PodCIDRLens are of the prefixes in their own family: 24, not 120.
	PodCIDRLens [wire.Families]uint32
	// NodeAddresses are the InternalIPs of this node.
	NodeAddresses    wire.Addresses
	PodCIDRAddresses wire.Addresses
	Flags            Flags
	// TunnelIfindex is the tunnel device; 0: there is none.
	TunnelIfindex uint32
	// Tunnel is what the tunnel has of each family.
	Tunnel [wire.Families]TunnelAddresses
}

// TunnelAddresses is struct tunnel_addresses.
type TunnelAddresses struct {
	// Source is of outer packets of the family; zero: the kernel chooses.
	Source wire.Addr
	// Address is the tunnel device's: the host's, though in the podCIDR; zero: none.
	Address wire.Addr
}

// Flags say what is left to the host's stack, and what the loader is doing: enum config_flags.
type Flags uint32

// PodCIDRs returns the node's podCIDRs, IPv4 first.
func (v Value) PodCIDRs() []netip.Prefix {
	var out []netip.Prefix
	for f := range wire.Families {
		if p := v.PodCIDR(f); p.IsValid() {
			out = append(out, p)
		}
	}
	return out
}

// PodCIDR returns the node's podCIDR of a family; invalid: it has none.
func (v Value) PodCIDR(f wire.Family) netip.Prefix {
	return netip.PrefixFrom(v.PodCIDRAddresses[f].Netip(), int(v.PodCIDRLens[f]))
}

// SetPodCIDR sets the node's podCIDR of its family.
func (v *Value) SetPodCIDR(p netip.Prefix) {
	f := wire.FamilyOf(p.Addr())
	v.PodCIDRAddresses[f], v.PodCIDRLens[f] = wire.AddrFrom(p.Addr()), uint32(p.Bits())
}

// PortRange is struct port_range: ports in host order, beginning with First.
type PortRange struct {
	First, Count uint32
}

// NodeConfig is struct node_config: constants of a loaded program.
type NodeConfig struct {
	// Masquerade has a bit for each wire.Family in which what pods send to the world is masqueraded.
	Masquerade uint32
	// Mark is the skb mark bit of packets that our programs have sent out or translated.
	Mark uint32
	// SnatPorts are the ports to masquerade to.
	SnatPorts [PortRanges]PortRange
	// SnatHeld are the ports that flows of older builds may hold, which do not note them in given_ports.
	SnatHeld PortRange
	// SnatPrivileged are the ports to masquerade to for a flow that begins with one below 1024, as NFS servers want it. From its end to 1023
	// lie those for the node's own flows. None: these get any.
	SnatPrivileged PortRange
	// SnatEntries and ConntrackEntries are the capacities of those tables.
	SnatEntries      uint32
	ConntrackEntries uint32
	// PathLifetime is how long a path is cached, in ns; 0: not at all.
	PathLifetime uint32
	// NetfilterNat is Masquerades or Translates where netfilter does that on this node, for kube-proxy, Docker or others; 0: it does not.
	NetfilterNat uint32
	// TunnelPort is the UDP port of all nodes' tunnels, in host order.
	TunnelPort uint32
	// TunnelVNI is the VXLAN network identifier of the cluster, 24 bits (RFC 7348).
	TunnelVNI uint32
	// TunnelChecksum is 1 when the outer UDP checksum over IPv4 is computed, not 0; over IPv6 it always is.
	TunnelChecksum uint32
	// Services is 1 when the programs translate pods' packets to Services.
	Services uint32
	// Loopback has a bit for each wire.Family in which NodePorts answer the node's own processes on loopback addresses.
	Loopback uint32
	// Bridges is 1 when containers behind bridges of somebody else's are endpoints as well.
	Bridges uint32
	// HostNetns is the cookie of the host's network namespace, whose sockets reach Services; 0: none do. Load fills it in.
	HostNetns uint64
}

// Definition defines the map.
var Definition = typed.Define[Key, Value](typed.Definition{
	Name:    Name,
	Content: typed.Configured,
	View: typed.View[Key, Value]{
		Columns: typed.Columns("LAYOUT#", "NODE IPV4", "NODE IPV6", "POD CIDR IPV4", "POD CIDR IPV6", "FLAGS", "TUNNEL#",
			"TUNNEL SOURCE IPV4", "TUNNEL ADDRESS IPV4", "TUNNEL SOURCE IPV6", "TUNNEL ADDRESS IPV6"),
		Compare: func(a, b typed.Entry[Key, Value]) int { return cmp.Compare(a.Key.Index, b.Key.Index) },
		Cells: func(_ Key, v Value) []any {
			return []any{
				v.Layout, v.NodeAddresses[wire.IPv4], v.NodeAddresses[wire.IPv6], prefixText(v.PodCIDR(wire.IPv4)), prefixText(v.PodCIDR(wire.IPv6)), v.Flags,
				typed.Number(v.TunnelIfindex), v.Tunnel[wire.IPv4].Source, v.Tunnel[wire.IPv4].Address, v.Tunnel[wire.IPv6].Source, v.Tunnel[wire.IPv6].Address,
			}
		},
		// Each podCIDR as one prefix instead of address and length.
		Object: func(_ Key, v Value) typed.Object {
			return typed.Object{
				{Name: "layout", Value: v.Layout},
				{Name: "node_ipv4", Value: typed.OrEmpty(v.NodeAddresses[wire.IPv4].String())},
				{Name: "node_ipv6", Value: typed.OrEmpty(v.NodeAddresses[wire.IPv6].String())},
				{Name: "pod_cidr_ipv4", Value: typed.OrEmpty(prefixText(v.PodCIDR(wire.IPv4)))},
				{Name: "pod_cidr_ipv6", Value: typed.OrEmpty(prefixText(v.PodCIDR(wire.IPv6)))},
				{Name: "flags", Value: typed.OrEmpty(v.Flags.String())},
				{Name: "tunnel_ifindex", Value: v.TunnelIfindex},
				{Name: "tunnel_source_ipv4", Value: typed.OrEmpty(v.Tunnel[wire.IPv4].Source.String())},
				{Name: "tunnel_address_ipv4", Value: typed.OrEmpty(v.Tunnel[wire.IPv4].Address.String())},
				{Name: "tunnel_source_ipv6", Value: typed.OrEmpty(v.Tunnel[wire.IPv6].Source.String())},
				{Name: "tunnel_address_ipv6", Value: typed.OrEmpty(v.Tunnel[wire.IPv6].Address.String())},
			}
		},
	},
})

func prefixText(p netip.Prefix) string {
	if !p.IsValid() {
		return "-"
	}
	return p.String()
}

// Map is the open map.
type Map = typed.Map[Key, Value]

// Open opens the map pinned at path.
func Open(path string) (*Map, error) { return typed.Open[Key, Value](path) }

package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// way is how packets get to another node's pods.
type way struct {
	kind  destinations.Way
	index uint32 // of the uplink, or of the tunnel device
	mtu   uint32 // in bytes of IP packet
}

// way finds how to get to the node with that InternalIP.
func (b *builder) way(via netip.Addr) way {
	link, onLink := b.reach(via)
	if onLink && b.in.Mode != RouteVXLAN {
		return way{destinations.Direct, link.Index, link.MTU}
	}
	mtu := b.underlayMTU(via)
	if !b.mayTunnel() || b.in.Facts.Tunnel == 0 || mtu <= overhead(via) {
		return way{kind: destinations.None}
	}
	return way{destinations.Tunnel, b.in.Facts.Tunnel, mtu - overhead(via)}
}

// mayTunnel reports whether the mode has nodes that are reached by the tunnel.
func (b *builder) mayTunnel() bool { return b.in.Mode == RouteVXLAN || b.in.Mode == RouteAuto }

// underlayMTU is what fits every way to an address over uplinks; 0: there is none.
func (b *builder) underlayMTU(via netip.Addr) (least uint32) {
	mask := b.masks.around(host(via))
	for _, l := range b.in.Facts.Uplinks {
		if mask&(1<<l.Bit) != 0 && (least == 0 || l.MTU < least) {
			least = l.MTU
		}
	}
	if r, found := b.route(via); found && r.MTU != 0 && r.MTU < least {
		least = r.MTU
	}
	return least
}

// overhead is what the tunnel adds to an IP packet, in bytes: an Ethernet header, VXLAN (RFC 7348), UDP and the outer IP header.
func overhead(via netip.Addr) uint32 {
	const header, vxlan, udp, ipv4, ipv6 = 14, 8, 8, 20, 40
	if via.Is4() {
		return header + vxlan + udp + ipv4
	}
	return header + vxlan + udp + ipv6
}

// InnerMTU is what fits through the tunnel where the underlay, of IPv4, has that MTU; for none, Ethernet's. In bytes of IP packet.
func InnerMTU(underlay uint32) int {
	if underlay == 0 {
		underlay = ethernet
	}
	return int(underlay) - int(overhead(netip.IPv4Unspecified()))
}

// whyNone says why packets can't get to the node with that InternalIP.
func (b *builder) whyNone(via netip.Addr) string {
	switch {
	case !b.mayTunnel():
		return fmt.Sprintf("InternalIP %s is not on the link of an uplink (%s), so its pods can't be reached by direct routing", via, b.uplinkNames())
	case b.in.Facts.Tunnel == 0:
		return fmt.Sprintf("InternalIP %s is to be reached by the tunnel (--routing-mode=%s), and there is no tunnel device that works", via, b.in.Mode)
	}
	return fmt.Sprintf("no route over an uplink (%s), or none with room for the tunnel's headers, leads to InternalIP %s, so its pods can't be reached by the tunnel",
		b.uplinkNames(), via)
}

// tunnel tells the programs of the tunnel, whatever the mode. The device gets the podCIDR's network address, so that
// netfilter masquerades to an address that the far end knows as this node's. No pod gets it; where another ipam plugin has
// given it to a pod before, the device has none.
func (b *builder) tunnel() {
	if b.in.Facts.Tunnel == 0 {
		return
	}
	b.r.Config.TunnelIfindex = b.in.Facts.Tunnel
	b.r.Config.Tunnel[wire.IPv4].Source = wire.AddrFrom(b.r.Source)
	const pointToPoint = 31 // of so small a podCIDR every address may be a pod's
	if own := b.r.Standing.Own4(); own.IsValid() && own.Bits() < pointToPoint && !slices.Contains(b.in.Facts.Endpoints, own.Addr()) {
		b.r.Config.Tunnel[wire.IPv4].Address = wire.AddrFrom(own.Addr())
	}
}

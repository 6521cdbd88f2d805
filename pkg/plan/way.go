package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// way is how packets of a family get to another node's pods.
type way struct {
	kind  destinations.Way
	index uint32 // of the uplink, or of the tunnel device
	mtu   uint32 // in bytes of IP packet
	// via is the InternalIP that packets are sent to, the next hop or the far end; without a way the one that they would be.
	// alias is the node's one of the other family; it may be invalid.
	via, alias netip.Addr
	mac        wire.MAC // what inner frames are addressed to, through the tunnel; zero: anything
}

// ways finds how to get to the node with these InternalIPs, of which there is at least one, and MAC addresses of the tunnel's end.
func (b *builder) ways(internal []netip.Addr, macs [wire.Families]wire.MAC) (all [wire.Families]way) {
	for f := range wire.Families {
		if !b.used[f] {
			continue
		}
		w := b.way(f, internal)
		w.alias = firstOf(other(w.via), internal)
		if w.alias.IsValid() && !b.used[wire.FamilyOf(w.alias)] {
			w.alias = netip.Addr{}
		}
		w.mac = macs[wire.FamilyOf(w.via)]
		all[f] = w
	}
	return all
}

// way finds the way of one family: directly to the InternalIP of that family, or through the tunnel to whichever this node can
// send outer packets to.
func (b *builder) way(f wire.Family, internal []netip.Addr) way {
	near, far := firstOf(f, internal), b.farEnd(internal)
	if link, onLink := b.reach(near); onLink && b.in.Mode != RouteVXLAN {
		return way{kind: destinations.Direct, index: link.Index, mtu: link.MTU, via: near}
	}
	mtu := b.underlay(far).MTU
	if !b.mayTunnel() || b.in.Facts.Tunnel == 0 || !b.used[wire.FamilyOf(far)] || mtu <= overhead(far) || b.tooNarrowFor(far) != "" {
		return way{kind: destinations.None, via: far}
	}
	return way{kind: destinations.Tunnel, index: b.in.Facts.Tunnel, mtu: mtu - overhead(far), via: far}
}

// tooNarrowFor says which link without an Ethernet header leaves pods of IPv6 too little towards an InternalIP. A Node that names one behind
// such a link, as a VPN's often is, must not take IPv6 from all pods: they have one MTU for all ways.
func (b *builder) tooNarrowFor(far netip.Addr) string {
	bare, _ := b.notEthernet(far)
	if bare.Name == "" || !b.used[wire.IPv6] || bare.MTU >= uint32(leastMTUOf[wire.IPv6])+overhead(far) {
		return ""
	}
	return fmt.Sprintf("InternalIP %s is reached over %s, whose MTU of %d is less than the %d bytes that IPv6 needs in the tunnel; give it that MTU, or both nodes other InternalIPs (kubelet --node-ip)",
		far, bare.Name, bare.MTU, uint32(leastMTUOf[wire.IPv6])+overhead(far))
}

// farEnd is the first InternalIP of another node of which family this node has one as well; without any, the first that can be used.
func (b *builder) farEnd(internal []netip.Addr) netip.Addr {
	for _, a := range internal {
		if f := wire.FamilyOf(a); b.used[f] && b.r.Standing.NodeIP(f).IsValid() {
			return a
		}
	}
	for f := range wire.Families {
		if a := firstOf(f, internal); a.IsValid() && b.used[f] {
			return a
		}
	}
	return internal[0]
}

// mainFamily is the one that stands for a node: that of its first podCIDR, else of what it is reached by.
func (b *builder) mainFamily(c candidate) wire.Family {
	if len(c.pods) > 0 {
		return wire.FamilyOf(c.pods[0].Addr())
	}
	if f := wire.FamilyOf(b.farEnd(c.internal)); b.used[f] {
		return f
	}
	return wire.IPv4
}

// other is the family that an address is not of.
func other(a netip.Addr) wire.Family { return wire.Families - 1 - wire.FamilyOf(a) }

// worse is the one of two ways that less can be done by.
func worse(a, b destinations.Way) destinations.Way {
	order := []destinations.Way{destinations.Direct, destinations.Tunnel, destinations.None}
	return order[max(slices.Index(order, a), slices.Index(order, b))]
}

// mayTunnel reports whether the mode has nodes that are reached by the tunnel.
func (b *builder) mayTunnel() bool { return b.in.Mode == RouteVXLAN || b.in.Mode == RouteAuto }

// underlay is the narrowest link on the ways to an address, with the MTU of the route if that is less; without a way it has none. The
// kernel sends outer packets, so that a link without an Ethernet header will do.
func (b *builder) underlay(via netip.Addr) (least Link) {
	if bare, _ := b.notEthernet(via); bare.Name != "" {
		return bare
	}
	mask := b.masks.around(host(via), 0)
	for _, l := range b.in.Facts.Uplinks {
		if !l.Bare && mask&(1<<l.Bit) != 0 && (least.MTU == 0 || l.MTU < least.MTU) {
			least = l
		}
	}
	if r, found := b.route(via); found && r.MTU != 0 && r.MTU < least.MTU {
		least.MTU = r.MTU
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

// InnerMTU is what fits through the tunnel where the underlay, of that family, has that MTU; for none, Ethernet's. In bytes of IP
// packet.
func InnerMTU(underlay uint32, f wire.Family) int {
	if underlay == 0 {
		underlay = ethernet
	}
	return int(underlay) - int(overhead(everything[f].Addr()))
}

// TunnelMTU is that of the tunnel's device: what fits the widest uplink. Routes and destinations have what fits each way.
func TunnelMTU(uplinks []Link) int {
	widest := uint32(0)
	for _, l := range uplinks {
		widest = max(widest, l.MTU)
	}
	return InnerMTU(widest, wire.IPv4)
}

// whyNone says why packets of a family can't get to the node with these InternalIPs.
func (b *builder) whyNone(f wire.Family, w way, internal []netip.Addr) string {
	near := firstOf(f, internal)
	bare, _ := b.notEthernet(near)
	switch {
	case !b.mayTunnel() && !near.IsValid():
		return fmt.Sprintf("it has no %s InternalIP, so its %[1]s pods can't be reached by direct routing", f.Name())
	case !b.mayTunnel() && bare.Name != "":
		return fmt.Sprintf("InternalIP %s is reached over %s, which is no Ethernet interface, so its pods can't be reached by direct routing; use --routing-mode=auto, or give both nodes InternalIPs on an Ethernet interface (kubelet --node-ip)",
			near, bare.Name)
	case !b.mayTunnel():
		return fmt.Sprintf("InternalIP %s is not on the link of an uplink (%s), so its pods can't be reached by direct routing", near, b.uplinkNames())
	case !b.used[wire.FamilyOf(w.via)]:
		return fmt.Sprintf("it has no %s InternalIP, and this node, which has one, sends to no other in a cluster of %[1]s", f.Name())
	case b.in.Facts.Tunnel == 0:
		return fmt.Sprintf("InternalIP %s is to be reached by the tunnel (--routing-mode=%s), and there is no tunnel device that works", w.via, b.in.Mode)
	case b.tooNarrowFor(w.via) != "":
		return b.tooNarrowFor(w.via)
	}
	return fmt.Sprintf("no route over an uplink (%s), or none with room for the tunnel's headers, leads to InternalIP %s, so its pods can't be reached by the tunnel",
		b.uplinkNames(), w.via)
}

// tunnel tells the programs of the tunnel, whatever the mode. The device gets the podCIDRs' network addresses, so that
// netfilter masquerades to an address that the far end knows as this node's. No pod gets one; where another ipam plugin has
// given it to a pod before, the device has none.
func (b *builder) tunnel() {
	if b.in.Facts.Tunnel == 0 {
		return
	}
	b.r.Config.TunnelIfindex = b.in.Facts.Tunnel
	for f := range wire.Families {
		t := &b.r.Config.Tunnel[f]
		t.Source = b.r.Sources[f]
		own := b.r.Standing.PodCIDR(f)
		tiny := own.Bits() >= own.Addr().BitLen()-1 // of so small a podCIDR every address may be a pod's
		narrow := TunnelMTU(b.in.Facts.Uplinks) < leastMTUOf[f]
		if b.used[f] && own.IsValid() && !tiny && !narrow && !slices.Contains(b.in.Facts.Endpoints, own.Addr()) {
			t.Address = wire.AddrFrom(own.Addr())
		}
	}
}

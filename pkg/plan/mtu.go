package plan

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// ethernet is the MTU of pods on a node without uplinks.
const ethernet = 1500

// Ways are the uplinks, by index, that pods' packets leave by.
type Ways struct {
	World [wire.Families][]uint32 // the default routes'
	All   []uint32                // these, and those to other nodes and their pods
	// Tunnel says that some packets go, or will go, through the tunnel.
	Tunnel bool
}

// mtu plans the MTU of new pods: what fits every way to other nodes and to the world; without any, every uplink. What is
// missing only for a moment counts as it did, an uplink that is away or the default route: a pod that starts meanwhile
// keeps its MTU. An uplink that was away already when the agent started counts in any case.
func (b *builder) mtu() {
	before := b.in.Before.Ways
	var world [wire.Families]uint64
	all := uint64(0)
	for f := range wire.Families {
		world[f] = b.masks.around(everything[f], 0)
		all |= world[f]
	}
	for _, v := range b.r.Destinations {
		if v.Kind == destinations.PodCIDR { // not all addresses of a node, by some of which nothing may go
			all |= v.Uplinks
		}
	}
	var now Ways
	for _, l := range b.in.Facts.Uplinks {
		toWorld := false
		for f := range wire.Families {
			if world[f]&(1<<l.Bit) != 0 || world[f] == 0 && slices.Contains(before.World[f], l.Index) {
				now.World[f], toWorld = append(now.World[f], l.Index), true
			}
		}
		away := l.Away && (before.All == nil || slices.Contains(before.All, l.Index))
		if toWorld || away || all&(1<<l.Bit) != 0 {
			now.All = append(now.All, l.Index)
		}
	}
	b.r.MTU = ethernet
	if b.narrowest = b.narrowestOf(now.All); b.narrowest.MTU != 0 {
		b.r.MTU = int(b.narrowest.MTU)
	}
	t := b.throughTunnel()
	now.Tunnel = t.any || t.missing && (before.All == nil || before.Tunnel)
	switch {
	case t.mtu != 0 && t.mtu < b.r.MTU:
		b.r.MTU, b.narrowest = t.mtu, b.underlay(t.far.Netip())
	case t.mtu != 0:
	case now.Tunnel:
		b.r.MTU = InnerMTU(uint32(b.r.MTU), b.outerFamily())
	}
	b.r.Standing.Ways = now
}

// narrowestOf is the narrowest of the uplinks with these indexes, without any of all. One without an Ethernet header, as a VPN has, counts only
// where there is no other: by its MTU, which may be below what IPv6 needs, pods would have less towards each other, too. Pods hear from the
// programs what does not fit such an uplink; where other nodes lie behind it, the tunnel's MTU counts.
func (b *builder) narrowestOf(indexes []uint32) Link {
	isBare := func(l Link) bool { return l.Bare }
	uplinks := slices.DeleteFunc(slices.Clone(b.in.Facts.Uplinks), isBare)
	of := slices.DeleteFunc(slices.Clone(indexes), func(i uint32) bool {
		return !slices.ContainsFunc(uplinks, func(l Link) bool { return l.Index == i })
	})
	if len(uplinks) == 0 {
		return leastMTU(b.in.Facts.Uplinks, indexes)
	}
	return leastMTU(uplinks, of)
}

// outerFamily is that of outer packets to nodes that are still to come, as far as it depends on this one.
func (b *builder) outerFamily() wire.Family {
	if ips := b.r.Standing.NodeIPs; len(ips) > 0 && b.used[wire.FamilyOf(ips[0])] {
		return wire.FamilyOf(ips[0])
	}
	return wire.IPv4
}

// podMTU is what pods get, in bytes of IP packet: --mtu, or what fits.
func (b *builder) podMTU() int { return cmp.Or(b.in.MTU, b.r.MTU) }

// tooNarrow says what leaves pods less than so many bytes.
func (b *builder) tooNarrow(least int) string {
	if b.in.MTU != 0 && b.in.MTU < least {
		return fmt.Sprintf("--mtu=%d gives pods' interfaces less than the %d bytes that IPv6 needs", b.in.MTU, least)
	}
	return fmt.Sprintf("uplink %s (MTU %d) leaves %d bytes for pods' packets, and IPv6 needs %d",
		cmp.Or(b.narrowest.Name, "none"), b.narrowest.MTU, b.r.MTU, least)
}

// tunnelled is about the podCIDRs that packets get to through the tunnel.
type tunnelled struct {
	any     bool      // there are some, or will be once there are other nodes
	missing bool      // some have no way now that may get one by the tunnel
	mtu     int       // the least, in bytes of IP packet; 0: there is none yet
	far     wire.Addr // to which it is that; of several the lowest
}

func (b *builder) throughTunnel() (t tunnelled) {
	t.any = b.in.Mode == RouteVXLAN || b.in.Tunnelled
	for _, v := range b.r.Destinations {
		switch {
		case v.Kind != destinations.PodCIDR:
		case v.Way() == destinations.Tunnel:
			least := cmp.Or(cmp.Compare(int(v.MTU), t.mtu), v.Node.Compare(t.far))
			if t.any = true; t.mtu == 0 || least < 0 {
				t.mtu, t.far = int(v.MTU), v.Node
			}
		case v.Way() == destinations.None:
			t.missing = b.mayTunnel()
		}
	}
	return t
}

// leastMTU is the uplink with the least MTU of those with these indexes; without any, of all. If there is none, it has no MTU.
func leastMTU(uplinks []Link, of []uint32) (least Link) {
	for _, l := range uplinks {
		if (len(of) == 0 || slices.Contains(of, l.Index)) && (least.MTU == 0 || l.MTU < least.MTU) {
			least = l
		}
	}
	return least
}

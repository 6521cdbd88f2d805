package plan

import (
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
)

// ethernet is the MTU of pods on a node without uplinks.
const ethernet = 1500

// Ways are the uplinks, by index, that pods' packets leave by.
type Ways struct {
	World []uint32 // the default routes'
	All   []uint32 // these, and those to other nodes and their pods
	// Tunnel says that some packets go, or will go, through the tunnel.
	Tunnel bool
}

// mtu plans the MTU of new pods: what fits every way to other nodes and to the world; without any, every uplink. What is
// missing only for a moment counts as it did, an uplink that is away or the default route: a pod that starts meanwhile
// keeps its MTU. An uplink that was away already when the agent started counts in any case.
func (b *builder) mtu() {
	before := b.in.Before.Ways
	world := b.masks.around(everything)
	all := world
	for _, v := range b.r.Destinations {
		if v.Kind == destinations.PodCIDR { // not all addresses of a node, by some of which nothing may go
			all |= v.Uplinks
		}
	}
	var now Ways
	for _, l := range b.in.Facts.Uplinks {
		toWorld := world&(1<<l.Bit) != 0 || world == 0 && slices.Contains(before.World, l.Index)
		away := l.Away && (before.All == nil || slices.Contains(before.All, l.Index))
		if toWorld {
			now.World = append(now.World, l.Index)
		}
		if toWorld || away || all&(1<<l.Bit) != 0 {
			now.All = append(now.All, l.Index)
		}
	}
	b.r.MTU = leastMTU(b.in.Facts.Uplinks, now.All)
	t := b.throughTunnel()
	now.Tunnel = t.any || t.missing && (before.All == nil || before.Tunnel)
	switch {
	case t.mtu != 0:
		b.r.MTU = min(b.r.MTU, t.mtu)
	case now.Tunnel:
		b.r.MTU = InnerMTU(uint32(b.r.MTU))
	}
	b.r.Standing.Ways = now
}

// tunnelled is about the podCIDRs that packets get to through the tunnel.
type tunnelled struct {
	any     bool // there are some, or will be once there are other nodes
	missing bool // some have no way now that may get one by the tunnel
	mtu     int  // the least, in bytes of IP packet; 0: there is none yet
}

func (b *builder) throughTunnel() (t tunnelled) {
	t.any = b.in.Mode == RouteVXLAN
	for _, v := range b.r.Destinations {
		switch {
		case v.Kind != destinations.PodCIDR:
		case v.Way() == destinations.Tunnel:
			if t.any = true; t.mtu == 0 || int(v.MTU) < t.mtu {
				t.mtu = int(v.MTU)
			}
		case v.Way() == destinations.None:
			t.missing = b.mayTunnel()
		}
	}
	return t
}

// leastMTU is the least MTU of the uplinks with these indexes; without any, of all.
func leastMTU(uplinks []Link, of []uint32) int {
	least := uint32(0)
	for _, l := range uplinks {
		if (len(of) == 0 || slices.Contains(of, l.Index)) && (least == 0 || l.MTU < least) {
			least = l.MTU
		}
	}
	if least == 0 {
		return ethernet
	}
	return int(least)
}

package plan

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// policies leaves to the host's stack what an IPsec policy may apply to: the far side
// of each that pods' packets can meet, in either direction. One for the node's own
// address is met by what is masqueraded, too late for the stack to protect it: its far
// side is marked Protected.
func (b *builder) policies() {
	far := map[netip.Prefix]destinations.Flags{}
	for _, p := range b.in.Facts.Policies {
		fromPods, toPods := b.ofPods(p.Src), b.ofPods(p.Dst)
		if fromPods {
			far[p.Dst] |= destinations.ToStack
		} else if p.Out && p.Required && b.ofUplinks(p.Src) {
			far[p.Dst] |= destinations.ToStack | destinations.Protected
		}
		if toPods {
			far[p.Src] |= destinations.ToStack
		}
	}
	if len(far) == 0 {
		return
	}
	b.r.Config.Flags |= config.Policies
	b.parts(far)
	b.flag(far)
}

// ofPods says whether pods of this node have addresses in it.
func (b *builder) ofPods(p netip.Prefix) bool {
	_, own := overlapsAny(p, b.r.Standing.Own)
	return own || slices.ContainsFunc(b.in.Facts.Endpoints, p.Contains)
}

// ofUplinks says whether something may be masqueraded to an address in it.
func (b *builder) ofUplinks(p netip.Prefix) bool {
	has := func(a wire.Addr) bool { return a != wire.Addr{} && p.Contains(a.Netip()) }
	for _, u := range b.r.Uplinks {
		if has(u.Addresses[wire.IPv4]) || has(u.Addresses[wire.IPv6]) {
			return true
		}
	}
	for _, s := range b.r.Exceptions {
		if has(s.Address) {
			return true
		}
	}
	// Live flows may have any other of an uplink's, and keep a lost one, which may be back at any moment.
	return slices.ContainsFunc(b.in.Facts.Recent, func(r Recent) bool { return p.Contains(r.Addr) }) ||
		slices.ContainsFunc(b.in.Facts.Addresses, func(a Address) bool {
			return p.Contains(a.Prefix.Addr()) && b.holder(host(a.Prefix.Addr())) != 0
		})
}

// parts makes an entry for each prefix that has none: a part of the next wider one, or
// of the world. This node's own podCIDRs are never split, its pods are not found by them.
func (b *builder) parts(far map[netip.Prefix]destinations.Flags) {
	prefixes := make([]netip.Prefix, 0, len(far))
	for p := range far {
		prefixes = append(prefixes, p)
	}
	// The widest first: a part may have parts.
	slices.SortFunc(prefixes, func(p, q netip.Prefix) int { return cmp.Compare(p.Bits(), q.Bits()) })
	for _, p := range prefixes {
		if own, overlaps := overlapsAny(p, b.r.Standing.Own); overlaps {
			b.r.Config.Flags |= config.PodCIDRToStack
			if own.Bits() <= p.Bits() {
				continue
			}
		}
		key := destinations.KeyFrom(p)
		if _, there := b.r.Destinations[key]; !there {
			v := wider(b.r.Destinations, p)
			v.Flags |= destinations.Part
			b.destination(p, v)
		}
	}
}

// wider is the destination that a prefix falls under if it has none of its own.
func wider(all map[destinations.Key]destinations.Value, p netip.Prefix) destinations.Value {
	for bits := p.Bits() - 1; bits >= 0; bits-- {
		if v, ok := all[destinations.KeyFrom(netip.PrefixFrom(p.Addr(), bits))]; ok {
			return v
		}
	}
	return destinations.Value{}
}

// flag gives every entry the flags of the prefixes that contain it.
func (b *builder) flag(far map[netip.Prefix]destinations.Flags) {
	lengths := map[int]bool{}
	for p := range far {
		lengths[p.Bits()] = true
	}
	for key, v := range b.r.Destinations {
		p := key.Netip()
		for bits := range lengths {
			if bits <= p.Bits() {
				v.Flags |= far[netip.PrefixFrom(p.Addr(), bits).Masked()]
			}
		}
		b.r.Destinations[key] = v
	}
}

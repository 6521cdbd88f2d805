package plan

import (
	"net/netip"
	"slices"

	"github.com/gaissmai/bart"
)

// routeMasks says through which uplinks this host has routes to a prefix, as masks of
// the uplinks' bits, for each table of routes: rules decide which of them a packet
// meets. Routes to the same prefix, of whatever metric, count together, and those that
// lead over no uplink hide wider ones.
type routeMasks map[int]*bart.Table[uint64]

func newRouteMasks(f Facts) routeMasks {
	bits := make(map[uint32]uint64, len(f.Uplinks))
	for _, l := range f.Uplinks {
		bits[l.Index] = 1 << l.Bit
	}
	tables := routeMasks{}
	for _, routes := range [][]KernelRoute{f.Routes, f.Others} {
		for _, r := range routes {
			if tables[r.Table] == nil {
				tables[r.Table] = &bart.Table[uint64]{}
			}
			if r.Unreachable && r.Dst.Bits() == 0 { // many hosts have one of IPv6 for when there is no default route
				continue
			}
			mask := bits[r.Index]
			for _, hop := range r.Hops {
				mask |= bits[hop]
			}
			tables[r.Table].Modify(r.Dst, func(others uint64, _ bool) (uint64, bool) { return others | mask, false })
		}
	}
	return tables
}

// keepDefault lets the uplinks of a family's last default route count while there is none, and reports whether it does. Mostly it is
// missing for a moment, as while a lease is renewed. Uplinks that are away don't count: their other routes are gone as well.
func (m routeMasks) keepDefault(route netip.Prefix, uplinks []Link, world []uint32) (kept bool) {
	for _, t := range m {
		if _, there := t.Get(route); there {
			return false
		}
	}
	var mask uint64
	for _, l := range uplinks {
		if !l.Away && slices.Contains(world, l.Index) {
			mask |= 1 << l.Bit
		}
	}
	if mask == 0 {
		return false
	}
	if m[0] == nil {
		m[0] = &bart.Table[uint64]{}
	}
	m[0].Insert(route, mask)
	return true
}

// around is what leads to all of p: the routes of the longest prefix that contains it, unless that is shorter than least.
func (m routeMasks) around(p netip.Prefix, least int) (mask uint64) {
	for _, t := range m {
		if longest, found, _ := t.LookupPrefixLPM(p); longest.Bits() >= least {
			mask |= found
		}
	}
	return mask
}

// onlyByDefault reports whether no route but the default one leads to all of p.
func (m routeMasks) onlyByDefault(p netip.Prefix) bool {
	for _, t := range m {
		if longest, _, found := t.LookupPrefixLPM(p); found && longest.Bits() > 0 {
			return false
		}
	}
	return true
}

// within is what leads to p itself, or to a part of it.
func (m routeMasks) within(p netip.Prefix) (mask uint64) {
	for _, t := range m {
		for _, found := range t.Subnets(p) {
			mask |= found
		}
	}
	return mask
}

package plan

import (
	"net/netip"

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
			mask := bits[r.Index]
			for _, hop := range r.Hops {
				mask |= bits[hop]
			}
			tables[r.Table].Modify(r.Dst, func(others uint64, _ bool) (uint64, bool) { return others | mask, false })
		}
	}
	return tables
}

// around is what leads to all of p: the routes of the longest prefix that contains it.
func (m routeMasks) around(p netip.Prefix) (mask uint64) {
	for _, t := range m {
		found, _ := t.LookupPrefix(p)
		mask |= found
	}
	return mask
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

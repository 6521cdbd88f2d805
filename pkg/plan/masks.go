package plan

import (
	"net/netip"
	"slices"
)

// routeMasks says through which uplinks this host has routes to a prefix, as masks of
// the uplinks' bits, for each table of routes: rules decide which of them a packet
// meets.
type routeMasks []tableMasks

// tableMasks are one table's: routes to the same prefix, of whatever metric, count
// together, and those that lead over no uplink hide wider ones.
type tableMasks struct {
	of     map[netip.Prefix]uint64
	sorted []netip.Prefix // by address
}

func newRouteMasks(f Facts) routeMasks {
	bits := make(map[uint32]uint64, len(f.Uplinks))
	for _, l := range f.Uplinks {
		bits[l.Index] = 1 << l.Bit
	}
	tables := map[int]map[netip.Prefix]uint64{}
	for _, routes := range [][]KernelRoute{f.Routes, f.Others} {
		for _, r := range routes {
			if tables[r.Table] == nil {
				tables[r.Table] = map[netip.Prefix]uint64{}
			}
			mask := bits[r.Index]
			for _, hop := range r.Hops {
				mask |= bits[hop]
			}
			tables[r.Table][r.Dst] |= mask
		}
	}
	var all routeMasks
	for _, of := range tables {
		t := tableMasks{of: of}
		for p := range of {
			t.sorted = append(t.sorted, p)
		}
		slices.SortFunc(t.sorted, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
		all = append(all, t)
	}
	return all
}

// around is what leads to all of p: the routes of the longest prefix that contains it.
func (m routeMasks) around(p netip.Prefix) (mask uint64) {
	for _, t := range m {
		for bits := p.Bits(); bits >= 0; bits-- {
			if found, ok := t.of[netip.PrefixFrom(p.Addr(), bits).Masked()]; ok {
				mask |= found
				break
			}
		}
	}
	return mask
}

// within is what leads to p itself, or to a part of it.
func (m routeMasks) within(p netip.Prefix) (mask uint64) {
	for _, t := range m {
		begin, _ := slices.BinarySearchFunc(t.sorted, p.Addr(), func(q netip.Prefix, a netip.Addr) int { return q.Addr().Compare(a) })
		for _, q := range t.sorted[begin:] {
			if !p.Contains(q.Addr()) {
				break
			}
			if q.Bits() >= p.Bits() {
				mask |= t.of[q]
			}
		}
	}
	return mask
}

package agent

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// exits sums up, by family, which links packets leave by, however many routes there are.
type exits [wire.Families]struct {
	// links are those that routes lead over, each with the destination of one that leads to a part of the world; invalid: none does.
	links map[int]netip.Prefix
	// singles are the links that routes to single addresses lead over.
	singles map[int]bool
	// encapsulated says that a route hides packets from programs on the link that it leads over.
	encapsulated bool
	// defaults are, by table, the default routes with the lowest priority value.
	defaults map[int]defaultExit
}

type defaultExit struct {
	priority int
	links    []int
	encap    device.Encap // of one that hides packets
}

// add counts a route, unless it is ours or leads nowhere. Destinations in native are no part of the world. It reports whether the sum is
// another one.
func (e *exits) add(r device.Route, native []netip.Prefix) (changed bool) {
	if r.Protocol == device.Protocol || r.Unreachable || isOfLink(r.Dst.Addr()) {
		return false
	}
	of := &e[wire.FamilyOf(r.Dst.Addr())]
	if of.links == nil {
		of.links, of.singles, of.defaults = map[int]netip.Prefix{}, map[int]bool{}, map[int]defaultExit{}
	}
	if r.Encap.Hides() && !of.encapsulated {
		of.encapsulated, changed = true, true
	}
	if r.Dst.IsSingleIP() {
		for _, index := range r.Links() {
			changed = changed || !of.singles[index]
			of.singles[index] = true
		}
		return changed
	}
	toWorld := r.Dst
	if r.Dst.Bits() == 0 || slices.ContainsFunc(native, func(wider netip.Prefix) bool { return wider.Bits() <= r.Dst.Bits() && wider.Overlaps(r.Dst) }) {
		toWorld = netip.Prefix{}
	}
	for _, index := range r.Links() {
		if have, known := of.links[index]; !known || !have.IsValid() && toWorld.IsValid() {
			of.links[index], changed = toWorld, true
		}
	}
	if r.Dst.Bits() != 0 {
		return changed
	}
	best, has := of.defaults[r.Table]
	if !has || r.Priority < best.priority {
		best = defaultExit{priority: r.Priority}
	}
	if r.Priority == best.priority {
		best.links = append(best.links, r.Links()...)
		if r.Encap.Hides() {
			best.encap = r.Encap
		}
	}
	of.defaults[r.Table] = best
	return true
}

// has reports whether routes of a family lead over a link.
func (e *exits) has(f wire.Family, link int) bool {
	_, has := e[f].links[link]
	return has
}

// byDefault are the links of a family's best default routes.
func (e *exits) byDefault(f wire.Family) (links []int) {
	for _, table := range slices.Sorted(maps.Keys(e[f].defaults)) {
		for _, index := range e[f].defaults[table].links {
			if !slices.Contains(links, index) {
				links = append(links, index)
			}
		}
	}
	return links
}

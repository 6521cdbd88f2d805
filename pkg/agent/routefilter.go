package agent

import (
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/gaissmai/bart"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// fewRoutes is how many routes a look keeps whatever they are. Of more routes it keeps those that decide on something.
const fewRoutes = 10_000

// routeFilter reads routes one by one and keeps those that decide on something: routes of ours and default routes, routes that the plan
// asks about, and of each kind of the others the first one. From the kept ones follows the same as from all.
type routeFilter struct {
	// asked are the prefixes that the plan asks about; made when there are more than a few routes.
	asked    *bart.Lite
	askedNow func() *bart.Lite
	// native are destinations that are no part of the world.
	native  []netip.Prefix
	sources *routeSources

	kept        []device.Route
	number, few int
	// active says that there are more than a few, so that routes have been left out.
	active bool

	seen     map[routeSample]bool
	gateways map[gateway]netip.Prefix // the narrowest prefix that contains what the routes by a gateway lead to
	exits    exits
	counts   map[linkFamily]*routeCount
	// dropped are the newest routes that were left out, all to one destination.
	dropped []device.Route
	// usual is a route that most others are like, usualCount counts them; nil: there is none.
	usual      device.Route
	usualCount *routeCount
}

// gateway is a next hop on a link.
type gateway struct {
	link int
	addr netip.Addr
}

// linkFamily is a link in one family.
type linkFamily struct {
	link   int
	family wire.Family
}

// routeCount counts the routes over a link in one family: those that a look has found, and those that events have deleted since.
type routeCount struct {
	found int
	gone  atomic.Int64
}

// routeSample is a kind of routes of which the first one is kept.
type routeSample struct {
	kind   routeSampleKind
	link   int
	table  int
	family wire.Family
	within netip.Prefix
	source sourceKey
	encap  device.Encap
}

type routeSampleKind uint8

const (
	ofLink      routeSampleKind = iota // in the main table over a link
	advertised                         // learnt from a router on a link
	forTOS                             // for a TOS value
	inPrefix                           // to a part of a prefix that the plan asks about
	bySourceKey                        // with a choice of source
	single                             // to an address that the plan does not ask about, over a link
	hiding                             // to a part of the world, with an encapsulation
)

// filterRoutes reads all routes, again while those that decide on sources cannot be told otherwise.
func filterRoutes(few int, asked func() *bart.Lite, native []netip.Prefix, sources *routeSources, each func(take func(device.Route)) error) (f *routeFilter, err error) {
	for again := true; again && err == nil; again = f.active && sources.next() {
		err = device.Repeat(func() error {
			sources.restart()
			f = newRouteFilter(few, asked, native, sources)
			return each(f.add)
		})
	}
	return f, err
}

// newRouteFilter makes a filter for reading all routes once.
func newRouteFilter(few int, asked func() *bart.Lite, native []netip.Prefix, sources *routeSources) *routeFilter {
	return &routeFilter{
		few: few, askedNow: asked, native: native, sources: sources,
		seen: map[routeSample]bool{}, gateways: map[gateway]netip.Prefix{}, counts: map[linkFamily]*routeCount{},
	}
}

// add takes the next route, in the kernel's order.
func (f *routeFilter) add(r device.Route) {
	f.number++
	switch {
	case f.active:
		f.sift(r)
	case f.number <= f.few:
		f.kept = append(f.kept, r)
	default:
		all := f.kept
		f.active, f.kept, f.asked = true, nil, f.askedNow()
		for _, r := range append(all, r) {
			f.sift(r)
		}
	}
}

// sift keeps a route if it decides on something. Of routes to one destination the first one counts for a link: it is kept with them.
func (f *routeFilter) sift(r device.Route) {
	if len(f.dropped) > 0 && (f.dropped[0].Dst != r.Dst || f.dropped[0].Table != r.Table) {
		f.dropped = f.dropped[:0]
	}
	const most = 8
	switch {
	case f.isUsual(r):
		f.usualCount.found++
	case f.decides(r):
		for _, before := range f.dropped {
			if slices.ContainsFunc(before.Links(), func(index int) bool { return slices.Contains(r.Links(), index) }) {
				f.kept = append(f.kept, before)
			}
		}
		f.kept, f.dropped = append(f.kept, r), f.dropped[:0]
		return
	default:
		f.remember(r)
	}
	if len(f.dropped) < most {
		f.dropped = append(f.dropped, r)
	}
}

// remember has routes like this one, which has just been found to decide on nothing, be told at a glance: most are alike.
func (f *routeFilter) remember(r device.Route) {
	f.usualCount = nil
	if r.Index != 0 && r.Gateway.IsValid() && !r.Dst.IsSingleIP() && !isOfLink(r.Dst.Addr()) && r.TOS == 0 && r.Encap == 0 && r.Protocol != unix.RTPROT_RA && len(r.Hops) == 0 &&
		!f.isInCluster(r.Gateway) && !f.asked.OverlapsPrefix(r.Dst) && !f.sources.gathers() {
		f.usual, f.usualCount = r, f.counts[linkFamily{r.Index, wire.FamilyOf(r.Dst.Addr())}]
	}
}

// isUsual reports whether a route differs from the remembered one in nothing but the destination, which nothing asks about.
func (f *routeFilter) isUsual(r device.Route) bool {
	u := &f.usual
	return f.usualCount != nil && r.Index == u.Index && r.Gateway == u.Gateway && r.Source == u.Source && r.Protocol == u.Protocol && r.Table == u.Table &&
		r.TOS == 0 && r.Encap == 0 && len(r.Hops) == 0 && r.Unreachable == u.Unreachable && r.Dst.Addr().Is4() == u.Dst.Addr().Is4() && !r.Dst.IsSingleIP() && r.Dst.Bits() != 0 && !isOfLink(r.Dst.Addr()) &&
		!f.asked.OverlapsPrefix(r.Dst)
}

// decides reports whether a route has to be kept. Each reason takes note of the route, so all are asked.
func (f *routeFilter) decides(r device.Route) bool {
	keep := r.Protocol == device.Protocol || r.Dst.Bits() == 0
	keep = f.isAskedAbout(r) || keep
	keep = f.hasGatewayInCluster(r) || keep
	keep = f.isFirstExit(r) || keep
	keep = f.isFirstOfWorld(r) || keep
	keep = r.TOS != 0 && f.isFirst(routeSample{kind: forTOS}) || keep
	return f.sources.matter(r, f.isFirst) || keep
}

func (f *routeFilter) isFirst(s routeSample) bool {
	if f.seen[s] {
		return false
	}
	f.seen[s] = true
	return true
}

// isAskedAbout is for the routes that lead to all of a prefix that the plan asks about. Of those that lead to a part, only the links count.
func (f *routeFilter) isAskedAbout(r device.Route) (keep bool) {
	if !f.asked.OverlapsPrefix(r.Dst) {
		return false
	}
	for range f.asked.Subnets(r.Dst) {
		return true
	}
	within, _ := f.asked.LookupPrefixLPM(r.Dst)
	for _, index := range r.Links() {
		keep = f.isFirst(routeSample{kind: inPrefix, link: index, table: r.Table, within: within}) || keep
	}
	return keep
}

// hasGatewayInCluster is for the routes by a gateway that a podCIDR may contain. That is a fault unless all routes by it lead into the
// podCIDR as well, which those tell that widen what they lead to.
func (f *routeFilter) hasGatewayInCluster(r device.Route) bool {
	if !r.Gateway.IsValid() || !f.asked.Lookup(r.Gateway) {
		return false
	}
	key := gateway{r.Index, r.Gateway}
	have, known := f.gateways[key]
	if known && isWithin(r.Dst, have) {
		return false
	}
	wider := r.Dst
	for known && !isWithin(have, wider) {
		wider, _ = wider.Addr().Prefix(wider.Bits() - 1)
	}
	f.gateways[key] = wider
	return true
}

func isWithin(p, wider netip.Prefix) bool {
	return wider.Bits() <= p.Bits() && wider.Contains(p.Addr())
}

// isFirstExit is for the routes by which links are found: uplinks, others that packets leave by, and those with routers.
func (f *routeFilter) isFirstExit(r device.Route) (keep bool) {
	if r.Protocol == device.Protocol {
		return false
	}
	keep = f.exits.add(r, f.native)
	family := wire.FamilyOf(r.Dst.Addr())
	leadsOn := !r.Dst.IsSingleIP() && !isOfLink(r.Dst.Addr())
	for _, index := range append([]int{r.Index}, r.Hops...) {
		if r.Protocol == unix.RTPROT_RA && r.Table == 0 {
			keep = f.isFirst(routeSample{kind: advertised, link: index}) || keep
		}
		if !leadsOn || index == 0 {
			continue
		}
		if r.Table == 0 {
			keep = f.isFirst(routeSample{kind: ofLink, link: index}) || keep
		}
		key := linkFamily{index, family}
		if f.counts[key] == nil {
			f.counts[key] = &routeCount{}
		}
		f.counts[key].found++
	}
	return keep
}

// isFirstOfWorld is for the routes that stand for all of their kind in a problem.
func (f *routeFilter) isFirstOfWorld(r device.Route) (keep bool) {
	if r.Protocol == device.Protocol || r.Unreachable || isOfLink(r.Dst.Addr()) || f.asked.OverlapsPrefix(r.Dst) {
		return false
	}
	family := wire.FamilyOf(r.Dst.Addr())
	if r.Encap.Hides() {
		keep = f.isFirst(routeSample{kind: hiding, family: family, encap: r.Encap})
	}
	if r.Dst.IsSingleIP() {
		for _, index := range r.Links() {
			keep = f.isFirst(routeSample{kind: single, link: index, family: family}) || keep
		}
	}
	return keep
}

// ignores reports whether an event about a route changes nothing that follows from the routes: it is one of very many. A nil filter
// ignores none. One goroutine at a time may call it.
func (f *routeFilter) ignores(r device.Route, gone bool) bool {
	switch {
	case f == nil, r.TOS != 0, r.Encap != 0, r.Dst.Bits() == 0, r.Protocol == unix.RTPROT_RA, f.asked.OverlapsPrefix(r.Dst), f.isInCluster(r.Gateway), slices.ContainsFunc(r.HopGateways, f.isInCluster):
		return false
	case !f.sources.isUsual(r):
		return false
	}
	family := wire.FamilyOf(r.Dst.Addr())
	if r.Dst.IsSingleIP() {
		return !slices.ContainsFunc(r.Links(), func(index int) bool { return !f.exits[family].singles[index] })
	}
	for _, index := range r.Links() {
		// A look may miss what is deleted meanwhile, so a link with few routes may lose the last one unnoticed.
		const many = 1000
		n := f.counts[linkFamily{index, family}]
		if n == nil || n.found < many || !f.exits[family].links[index].IsValid() {
			return false
		}
		if gone && n.gone.Add(1) > int64(n.found/2) {
			return false
		}
	}
	return true
}

func (f *routeFilter) isInCluster(a netip.Addr) bool { return a.IsValid() && f.asked.Lookup(a) }

// ignoresLike reports whether two filters ignore the same events.
func (f *routeFilter) ignoresLike(o *routeFilter) bool {
	if f == nil || o == nil {
		return f == o
	}
	return f.asked.Equal(o.asked) && f.sources.like(o.sources)
}

// covers reports whether all that is asked about is known of.
func (f *routeFilter) covers(asked *bart.Lite) bool {
	for p := range asked.All() {
		if !f.asked.Get(p) {
			return false
		}
	}
	return true
}

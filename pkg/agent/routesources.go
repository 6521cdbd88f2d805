package agent

import (
	"cmp"
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"

	"github.com/gaissmai/bart"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// sourceKey is what the choice of a source depends on, of a route over a link. Routes with one key have one source, except that the
// source of IPv6 depends on the destination as well, for which the plan divides destinations itself.
type sourceKey struct {
	table  int
	source netip.Addr   // that the route names
	near   netip.Prefix // the subnet of this node's that the next hop is in, of IPv4
}

// anyTable is the key without the table, where the choice does not depend on that.
func (k sourceKey) anyTable() sourceKey {
	if !k.source.IsValid() && !k.near.IsValid() {
		k.table = 0
	}
	return k
}

// mostSourceChanges is how many routes of a link are kept because their source is not that of the next wider route. The map of such
// destinations has room for fewer.
const mostSourceChanges = 16384

// routeSources finds the routes by which packets get another source than by the next wider route. On most links all routes have one
// key, so that there are none. Of a link with several keys, routes are gathered in a compact form, and a second look keeps those that count.
type routeSources struct {
	subnets *bart.Lite // of this node's addresses
	// only is the only address of a link that may be chosen, an invalid one where there are several; chosen are the links on
	// which the administrator has chosen; links are those that packets may be masqueraded on.
	only   map[linkFamily]netip.Addr
	chosen map[linkFamily]bool
	links  map[int]bool

	first      map[linkFamily]sourceKey
	hasDefault map[linkFamily]bool
	several    map[linkFamily]bool
	// gather are the links whose routes are gathered.
	gather   map[linkFamily]bool
	gathered map[linkFamily]*gathered
	// wanted are the routes that the newest look has found to count; nil: they have not been looked for.
	wanted map[tableRoute]bool
}

// tableRoute is a destination in a table.
type tableRoute struct {
	table int
	dst   netip.Prefix
}

// newRouteSources gathers the routes of links that are known to have several keys.
func newRouteSources(v *view, cfg Config, several map[linkFamily]bool) *routeSources {
	s := &routeSources{subnets: &bart.Lite{}, only: map[linkFamily]netip.Addr{}, chosen: map[linkFamily]bool{}, links: map[int]bool{}}
	for _, a := range v.addresses {
		if a.Secondary || a.Host || a.Link {
			continue
		}
		s.subnets.Insert(a.Prefix.Masked())
		key := linkFamily{a.Index, wire.FamilyOf(a.Prefix.Addr())}
		if _, another := s.only[key]; another {
			s.only[key] = netip.Addr{}
		} else {
			s.only[key] = a.Prefix.Addr()
		}
	}
	for _, l := range v.links {
		s.links[l.Index] = leadsOut(l) || slices.Contains(cfg.Uplinks, l.Name)
		for f := range wire.Families {
			s.chosen[linkFamily{l.Index, f}] = plan.SnatAddressOf(cfg.SnatAddresses, l.Name, f).IsValid()
		}
	}
	s.gather = several
	return s
}

// restart forgets what reading the routes has found, but for what it has to look for.
func (s *routeSources) restart() {
	s.first, s.hasDefault, s.several, s.gathered = map[linkFamily]sourceKey{}, map[linkFamily]bool{}, map[linkFamily]bool{}, map[linkFamily]*gathered{}
	if s.wanted != nil {
		return
	}
	for key := range s.gather {
		s.gathered[key] = &gathered{numbers: map[sourceKey]uint32{}}
	}
}

// gathers reports whether every route has to be seen.
func (s *routeSources) gathers() bool { return s.wanted != nil || len(s.gathered) > 0 }

// keyOf is the key of a route over a link by a gateway, which may be invalid.
func (s *routeSources) keyOf(of linkFamily, table int, dst, source, via netip.Addr) sourceKey {
	if s.chosen[of] || !s.links[of.link] {
		return sourceKey{}
	}
	k := sourceKey{table: table, source: source}
	only := s.only[of]
	if only.IsValid() && source == only {
		k.source = netip.Addr{}
	}
	if source.IsValid() || only.IsValid() || of.family == wire.IPv6 {
		return k
	}
	if !via.IsValid() {
		via = dst
	}
	k.near, _ = s.subnets.LookupPrefixLPM(netip.PrefixFrom(via, via.BitLen()))
	return k
}

// eachKey calls do with the key of each next hop of a route.
func (s *routeSources) eachKey(r device.Route, do func(linkFamily, sourceKey)) {
	of := linkFamily{r.Index, wire.FamilyOf(r.Dst.Addr())}
	if r.Index != 0 {
		do(of, s.keyOf(of, r.Table, r.Dst.Addr(), r.Source, r.Gateway))
	}
	for i, index := range r.Hops {
		var via netip.Addr
		if i < len(r.HopGateways) {
			via = r.HopGateways[i]
		}
		of.link = index
		do(of, s.keyOf(of, r.Table, r.Dst.Addr(), r.Source, via))
	}
}

// matter takes note of a route and reports whether it has to be kept for its source.
func (s *routeSources) matter(r device.Route, isFirst func(routeSample) bool) (keep bool) {
	s.eachKey(r, func(of linkFamily, k sourceKey) {
		first, known := s.first[of]
		if !known {
			first, s.first[of], keep = k, k, true
		}
		if r.Dst.Bits() == 0 {
			s.hasDefault[of] = true
		}
		if k != first {
			if k.anyTable() != first.anyTable() {
				s.several[of] = true
			}
			keep = isFirst(routeSample{kind: bySourceKey, link: of.link, family: of.family, source: k}) || keep
		}
		if g := s.gathered[of]; g != nil {
			g.add(r.Dst, k)
		}
	})
	return keep || s.wanted[tableRoute{r.Table, r.Dst}]
}

// next says, when a look has ended, whether another one has to keep more routes.
func (s *routeSources) next() bool {
	missed := false
	for of, k := range s.first {
		if !s.hasDefault[of] && k.anyTable() != s.withoutRoute(of).anyTable() {
			s.several[of] = true
		}
		missed = missed || s.several[of] && s.gathered[of] == nil
	}
	if s.wanted != nil || len(s.several) == 0 {
		return false
	}
	if missed {
		s.gather = s.several
		return true
	}
	s.wanted = map[tableRoute]bool{}
	for of := range s.several {
		s.gathered[of].changes(s.withoutRoute(of), of.family, s.wanted)
	}
	s.gathered = nil
	return len(s.wanted) > 0
}

// withoutRoute is the key of packets that no route is known for.
func (s *routeSources) withoutRoute(of linkFamily) sourceKey {
	unspecified := netip.IPv6Unspecified()
	if of.family == wire.IPv4 {
		unspecified = netip.IPv4Unspecified()
	}
	return s.keyOf(of, 0, unspecified, netip.Addr{}, netip.Addr{})
}

// isUsual reports whether a route has the one key that all routes of its links have.
func (s *routeSources) isUsual(r device.Route) bool {
	usual := true
	s.eachKey(r, func(of linkFamily, k sourceKey) {
		first, known := s.first[of]
		usual = usual && known && !s.several[of] && k.anyTable() == first.anyTable()
	})
	return usual
}

func (s *routeSources) like(o *routeSources) bool {
	return maps.Equal(s.first, o.first) && maps.Equal(s.several, o.several)
}

// gathered are routes of a link, by their length, in few bytes.
type gathered struct {
	numbers map[sourceKey]uint32
	keys    []sourceKey
	byBits  [129][]compactRoute
}

// compactRoute is an address of a destination, and the number of a key.
type compactRoute struct {
	high, low uint64
	key       uint32
}

func (g *gathered) add(dst netip.Prefix, k sourceKey) {
	number, known := g.numbers[k]
	if !known {
		number = uint32(len(g.keys))
		g.numbers[k], g.keys = number, append(g.keys, k)
	}
	c := compactRoute{key: number}
	if dst.Addr().Is4() {
		b := dst.Addr().As4()
		c.low = uint64(binary.BigEndian.Uint32(b[:]))
	} else {
		b := dst.Addr().As16()
		c.high, c.low = binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])
	}
	g.byBits[dst.Bits()] = append(g.byBits[dst.Bits()], c)
}

func (c compactRoute) addr(f wire.Family) netip.Addr {
	if f == wire.IPv4 {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], uint32(c.low))
		return netip.AddrFrom4(b)
	}
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], c.high)
	binary.BigEndian.PutUint64(b[8:], c.low)
	return netip.AddrFrom16(b)
}

func (c compactRoute) compare(o compactRoute) int {
	return cmp.Or(cmp.Compare(c.high, o.high), cmp.Compare(c.low, o.low))
}

// changes adds the routes whose key is not that of the next wider one, the widest first. Of several to one destination the plan takes
// the first, so those before it are added as well.
func (g *gathered) changes(usual sourceKey, f wire.Family, wanted map[tableRoute]bool) {
	wider := &bart.Table[sourceKey]{}
	n := 0
	for bits, routes := range g.byBits {
		if !slices.IsSortedFunc(routes, compactRoute.compare) { // several tables
			slices.SortStableFunc(routes, compactRoute.compare)
		}
		var same []sourceKey // of the routes to this destination, one for each table
		for i, c := range routes {
			if i == 0 || routes[i-1].compare(c) != 0 {
				same = same[:0]
			}
			k := g.keys[c.key]
			if slices.ContainsFunc(same, func(o sourceKey) bool { return o.table == k.table }) {
				continue
			}
			same = append(same, k)
			p := netip.PrefixFrom(c.addr(f), bits)
			parent, known := wider.LookupPrefix(p)
			if !known {
				parent = usual
			}
			if parent == k {
				continue
			}
			if n++; n > mostSourceChanges {
				return
			}
			for _, o := range same {
				wanted[tableRoute{o.table, p}] = true
			}
			wider.Insert(p, same[0])
		}
	}
}

package plan

import (
	"cmp"
	"fmt"
	"maps"
	"math/bits"
	"net/netip"
	"slices"

	"github.com/gaissmai/bart"

	"github.com/ebpf-cni/ebpf-cni/maps/sources"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// mostSources is how many destinations may have an address of their own: half of map sources, so that new ones can be
// written before old ones go.
const mostSources = 2048

// mostChoices is how many of IPv6 a source is chosen from, since each is compared with each: the uplink's first ones.
const mostChoices = 64

// labels are the prefixes of RFC 6724, section 2.1, that have a label of their own. A source with the destination's label is preferred.
var labels = []netip.Prefix{
	netip.MustParsePrefix("fc00::/7"), netip.MustParsePrefix("2001::/32"), netip.MustParsePrefix("2002::/16"),
}

// Address is an address of an interface that packets can have as their source: of global scope, and proven to be this node's.
type Address struct {
	// Prefix is the address with the length of its subnet.
	Prefix netip.Prefix
	Index  uint32
	// VRF is the index of the VRF device that the interface belongs to; 0: none.
	VRF uint32
	// Secondary is set for an IPv4 address that is not its subnet's first.
	Secondary bool
	// Deprecated and Temporary are those of IPv6 (RFC 4862, RFC 8981).
	Deprecated, Temporary bool
}

// Recent is an address that packets on an uplink were masqueraded to a moment ago, and that the node has lost.
type Recent struct {
	Addr  netip.Addr
	Index uint32
}

// SnatAddress is the only address that packets on an uplink may be masqueraded to, in its family.
type SnatAddress struct {
	Uplink string // its name; empty: any uplink that no other SnatAddress of the family names
	Addr   netip.Addr
}

// SnatAddressOf returns the one for an uplink and a family, or an invalid address.
func SnatAddressOf(all []SnatAddress, uplink string, f wire.Family) (addr netip.Addr) {
	for _, a := range all {
		if wire.FamilyOf(a.Addr) == f && (a.Uplink == uplink || a.Uplink == "" && !addr.IsValid()) {
			addr = a.Addr
		}
	}
	return addr
}

// chooser chooses the address that the kernel would take for packets of a family that leave by an uplink.
type chooser struct {
	link   Link
	family wire.Family
	// addresses are those to choose from, in the kernel's order.
	addresses []Address
	// main is the choice for the uplink's default route, and without one for no route at all.
	main    netip.Addr
	byRoute bool // whether there is a default route
	fixed   bool // whether the administrator has chosen
	// choices are those for the other routes; of IPv6, where they do not depend on the route, only their sources.
	choices map[netip.Addr]bool
	sourced bool        // whether a route names its source
	last    KernelRoute // the last one, whose choice is in choices
}

// uplinks adds the uplinks with the addresses to masquerade to, and the destinations for which the kernel's choice is another.
func (b *builder) uplinks() {
	choosers := map[uint32]*[wire.Families]*chooser{}
	for _, l := range b.in.Facts.Uplinks {
		c := &[wire.Families]*chooser{}
		for f := range wire.Families {
			c[f] = b.chooser(l, f)
		}
		choosers[l.Index] = c
	}
	b.eachHop(func(r KernelRoute) {
		if c := choosers[r.Index]; c != nil {
			c[wire.FamilyOf(r.Dst.Addr())].see(r)
		}
	})
	for _, l := range b.in.Facts.Uplinks {
		v := l.Entry()
		for f, c := range choosers[l.Index] {
			v.Addresses[f] = wire.AddrFrom(c.main)
			b.exceptions(c)
		}
		b.r.Uplinks[uplinks.Key{Ifindex: l.Index}] = v
	}
	if b.unkept > 0 {
		b.notes = append(b.notes, fmt.Sprintf("%d destinations too many have a source address of their own; packets to them are masqueraded to the one of a wider prefix", b.unkept))
	}
}

// IsForPods reports whether a rule may lead packets of pods with addresses in own to a table. Sources are as in Facts.
func IsForPods(table int, sources map[int][]netip.Prefix, own []netip.Prefix) bool {
	only, selected := sources[table]
	return !selected || slices.ContainsFunc(only, func(from netip.Prefix) bool { return slices.ContainsFunc(own, from.Overlaps) })
}

// eachHop calls do for each route and next hop that packets of pods may take, those of the main table first, with Index and Via of the
// next hop.
func (b *builder) eachHop(do func(KernelRoute)) {
	tables := map[int]bool{}
	for _, routes := range [][]KernelRoute{b.in.Facts.Routes, b.in.Facts.Others} {
		for _, r := range routes {
			forPods, known := tables[r.Table]
			if !known {
				forPods = IsForPods(r.Table, b.in.Facts.Sources, b.r.Standing.Own)
				tables[r.Table] = forPods
			}
			if !forPods {
				continue
			}
			if r.Index != 0 {
				do(r)
			}
			for i, index := range r.Hops {
				r.Index, r.Via = index, netip.Addr{}
				if i < len(r.HopVias) {
					r.Via = r.HopVias[i]
				}
				do(r)
			}
		}
	}
}

// chooser finds the addresses to choose from: the administrator's if there is one, else the uplink's, and if it has none of the
// family, those of other links. An uplink that has just lost its own may get it back, unless this node's InternalIP is on another link.
func (b *builder) chooser(l Link, f wire.Family) *chooser {
	c := &chooser{link: l, family: f, choices: map[netip.Addr]bool{}}
	if fixed := SnatAddressOf(b.in.SnatAddresses, l.Name, f); fixed.IsValid() {
		if c.fixed = true; slices.ContainsFunc(b.in.Facts.Addresses, func(a Address) bool { return a.Prefix.Addr() == fixed }) {
			c.main = fixed
		}
		return c
	}
	var own, others []Address
	for _, a := range b.in.Facts.Addresses {
		switch addr := a.Prefix.Addr(); {
		case wire.FamilyOf(addr) != f || a.Secondary || Contains(b.r.Standing.Own, addr):
		case a.Index == l.Index:
			own = append(own, a)
		case a.VRF == l.VRF:
			others = append(others, a)
		}
	}
	lost := func(r Recent) bool { return r.Index == l.Index && wire.FamilyOf(r.Addr) == f }
	internal := func(a Address) bool { return a.Prefix.Addr() == b.r.Standing.NodeIP(f) }
	if len(own) == 0 && (slices.ContainsFunc(others, internal) || !slices.ContainsFunc(b.in.Facts.Recent, lost)) {
		own = others
	}
	deprecated := func(a Address) bool { return a.Deprecated }
	if !slices.ContainsFunc(own, func(a Address) bool { return !a.Deprecated }) {
		deprecated = func(Address) bool { return false } // they are better than none
	}
	c.addresses = slices.DeleteFunc(own, deprecated)
	if over := len(c.addresses) - mostChoices; f == wire.IPv6 && over > 0 {
		c.addresses = c.addresses[:mostChoices]
		b.notes = append(b.notes, fmt.Sprintf("%s has %d IPv6 addresses too many to choose one to masquerade to from all of them: --snat-address names one", l.Name, over))
	}
	c.main = c.choose(everything[f], KernelRoute{})
	return c
}

// see takes note of a route over the uplink.
func (c *chooser) see(r KernelRoute) {
	if c.fixed {
		return
	}
	c.sourced = c.sourced || r.Src.IsValid()
	switch isDefault := r.Dst.Bits() == 0; {
	case isDefault && !c.byRoute:
		c.main, c.byRoute = c.choose(r.Dst, r), true
	case isDefault:
	case c.family == wire.IPv6 && !r.Src.IsValid():
	case r.Via.IsValid() && r.Src == c.last.Src && r.Via == c.last.Via: // most of very many routes
	default:
		c.last, c.choices[c.choose(r.Dst, r)] = r, true
	}
}

// choose is the kernel's choice for packets to a prefix by a route.
func (c *chooser) choose(to netip.Prefix, r KernelRoute) (best netip.Addr) {
	switch {
	case r.Src.IsValid():
		return r.Src
	case len(c.addresses) == 0:
		return netip.Addr{}
	case c.family == wire.IPv6:
		return slices.MinFunc(c.addresses, func(a, b Address) int { return byRules(a, b, to) }).Prefix.Addr()
	}
	near := to.Addr()
	if r.Via.IsValid() {
		near = r.Via
	}
	for _, a := range c.addresses {
		if a.Prefix.Contains(near) {
			return a.Prefix.Addr()
		}
	}
	return c.addresses[0].Prefix.Addr()
}

// byRules compares two sources by the rules 6 to 8 of RFC 6724, section 5, as far as the destination's bits are known.
func byRules(a, b Address, to netip.Prefix) int {
	label := func(x netip.Addr) int {
		return slices.IndexFunc(labels, func(p netip.Prefix) bool { return p.Contains(x) })
	}
	first := func(x, y bool) int {
		switch {
		case x == y:
			return 0
		case x:
			return -1
		}
		return 1
	}
	match := func(x Address) int { return min(common(x.Prefix.Addr(), to.Addr()), x.Prefix.Bits(), to.Bits()) }
	same := func(x Address) bool { return label(x.Prefix.Addr()) == label(to.Addr()) }
	return cmp.Or(first(same(a), same(b)), first(!a.Temporary, !b.Temporary), cmp.Compare(match(b), match(a)))
}

// common is how many bits two addresses of IPv6 begin with in common.
func common(a, b netip.Addr) (n int) {
	x, y := a.As16(), b.As16()
	for i := range x {
		if d := x[i] ^ y[i]; d != 0 {
			return n + bits.LeadingZeros8(d)
		}
		n += 8
	}
	return n
}

// exceptions adds the prefixes for which the choice is not that of the next wider one.
func (b *builder) exceptions(c *chooser) {
	prefixes, routes := c.parts(), &bart.Table[KernelRoute]{}
	if delete(c.choices, c.main); len(c.choices) > 0 || c.sourced && len(prefixes) > 0 {
		b.eachHop(func(r KernelRoute) {
			if _, there := routes.Get(r.Dst); r.Index == c.link.Index && wire.FamilyOf(r.Dst.Addr()) == c.family && !there {
				routes.Insert(r.Dst, r)
				prefixes = append(prefixes, r.Dst)
			}
		})
	}
	slices.SortFunc(prefixes, func(p, q netip.Prefix) int { return cmp.Or(cmp.Compare(p.Bits(), q.Bits()), p.Compare(q)) })
	choices := &bart.Table[netip.Addr]{}
	choices.Insert(everything[c.family], c.main)
	for _, p := range prefixes {
		route, _ := routes.LookupPrefix(p)
		choice := c.choose(p, route)
		if wider, _ := choices.LookupPrefix(p); p.Bits() == 0 || choice == wider {
			continue
		}
		if len(b.r.Exceptions) == mostSources {
			b.unkept++
			continue
		}
		choices.Insert(p, choice)
		b.r.Exceptions[sources.KeyFrom(c.link.Index, p)] = sources.Value{Address: wire.AddrFrom(choice)}
	}
}

// parts are the prefixes of destinations for which the rules of IPv6 may choose another of several addresses: those with a label,
// and those that match one address in more bits than another.
func (c *chooser) parts() (parts []netip.Prefix) {
	if c.family != wire.IPv6 || len(c.addresses) < 2 {
		return nil
	}
	all := map[netip.Prefix]bool{}
	for _, a := range c.addresses {
		for _, other := range c.addresses {
			if n := min(common(a.Prefix.Addr(), other.Prefix.Addr()), other.Prefix.Bits()); n < a.Prefix.Bits() {
				all[netip.PrefixFrom(a.Prefix.Addr(), n+1).Masked()] = true
			}
		}
	}
	return slices.AppendSeq(slices.Clone(labels), maps.Keys(all))
}

package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// parsePodCIDR reads a podCIDR and refuses what can't be one on any node.
func parsePodCIDR(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("podCIDR %.60q is not a prefix (address/length)", s)
	}
	p = p.Masked()
	a := p.Addr()
	switch {
	case p.Bits() == 0:
		return netip.Prefix{}, fmt.Errorf("podCIDR %s contains every address", p)
	case a.Is4In6():
		return netip.Prefix{}, fmt.Errorf("podCIDR %s is IPv4 mapped into IPv6", p)
	case p.Bits() < widest[wire.FamilyOf(a)]:
		return netip.Prefix{}, fmt.Errorf("podCIDR %s is wider than any private range: it would take addresses of the Internet", p)
	}
	for _, special := range notForPods {
		if p.Overlaps(special) {
			return netip.Prefix{}, fmt.Errorf("podCIDR %s overlaps %s, which is reserved", p, special)
		}
	}
	return p, nil
}

// widest is the length of the widest range that is private, 10.0.0.0/8 and fc00::/7.
var widest = [wire.Families]int{wire.IPv4: 8, wire.IPv6: 7}

// notForPods are ranges that the kernel or the protocols reserve.
var notForPods = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("224.0.0.0/4"),
	netip.MustParsePrefix("255.255.255.255/32"),
	netip.MustParsePrefix("::/96"), // contains ::1
	netip.MustParsePrefix("fe80::/10"),
	netip.MustParsePrefix("ff00::/8"),
}

// parseNodeIP reads an address under which a node can be reached.
func parseNodeIP(kind, s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	if err != nil || a.Zone() != "" || a.Is4In6() {
		return netip.Addr{}, fmt.Errorf("%s %.60q is not an address", kind, s)
	}
	for _, special := range notForPods {
		if special.Contains(a) {
			return netip.Addr{}, fmt.Errorf("%s %s is in %s, which is reserved", kind, a, special)
		}
	}
	return a, nil
}

// isShared reports whether an address is everybody's on a link with that prefix: the broadcast address of IPv4, whose lowest one is an
// ordinary one since Linux 5.14, and in IPv6 that of all routers (RFC 4291, section 2.6.1). Links of two addresses have neither
// (RFC 3021, RFC 6164).
func isShared(a netip.Addr, link netip.Prefix) bool {
	switch {
	case link.Bits() >= a.BitLen()-1 || !link.Contains(a):
		return false
	case a.Is4():
		return !link.Contains(a.Next())
	}
	return a == link.Masked().Addr()
}

// addressSet finds the addresses inside a prefix in logarithmic time.
type addressSet struct {
	sorted []ownedAddr
}

type ownedAddr struct {
	addr  netip.Addr
	owner int // index of the node, or of the route, that it stands in
}

func newAddressSet(all []ownedAddr) addressSet {
	slices.SortStableFunc(all, func(a, b ownedAddr) int { return a.addr.Compare(b.addr) })
	return addressSet{all}
}

// in returns the addresses inside p.
func (s addressSet) in(p netip.Prefix) []ownedAddr {
	begin, _ := slices.BinarySearchFunc(s.sorted, p.Addr(), func(o ownedAddr, a netip.Addr) int { return o.addr.Compare(a) })
	end := begin
	for end < len(s.sorted) && p.Contains(s.sorted[end].addr) {
		end++
	}
	return s.sorted[begin:end]
}

// prefixSet finds an overlap among thousands of prefixes by looking up the few
// prefix lengths that occur.
type prefixSet struct {
	lengths []length
	member  map[netip.Prefix]string // prefix -> owner
	covers  map[netip.Prefix]string // a shorter prefix that has a member inside
}

type length struct {
	bits int
	is4  bool
}

// newPrefixSet makes a set for prefixes of the lengths that occur in all.
func newPrefixSet(all []netip.Prefix) *prefixSet {
	s := &prefixSet{member: make(map[netip.Prefix]string, len(all)), covers: make(map[netip.Prefix]string, len(all))}
	seen := map[length]bool{}
	for _, p := range all {
		l := length{p.Bits(), p.Addr().Is4()}
		if !seen[l] {
			seen[l] = true
			s.lengths = append(s.lengths, l)
		}
	}
	return s
}

// overlap returns the owner of a member that p overlaps.
func (s *prefixSet) overlap(p netip.Prefix) (owner string, found bool) {
	if owner, found = s.covers[p]; found {
		return owner, true
	}
	for _, wider := range s.wider(p) {
		if owner, found = s.member[wider]; found {
			return owner, true
		}
	}
	return "", false
}

func (s *prefixSet) add(p netip.Prefix, owner string) {
	s.member[p] = owner
	for _, wider := range s.wider(p) {
		if _, taken := s.covers[wider]; !taken {
			s.covers[wider] = owner
		}
	}
}

// wider lists p and the prefixes around it of the lengths that occur.
func (s *prefixSet) wider(p netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, l := range s.lengths {
		if l.is4 == p.Addr().Is4() && l.bits <= p.Bits() {
			out = append(out, netip.PrefixFrom(p.Addr(), l.bits).Masked())
		}
	}
	return out
}

func overlapsAny(p netip.Prefix, all []netip.Prefix) (netip.Prefix, bool) {
	for _, q := range all {
		if p.Overlaps(q) {
			return q, true
		}
	}
	return netip.Prefix{}, false
}

// Contains reports whether an address is in one of the prefixes.
func Contains(all []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(all, func(p netip.Prefix) bool { return p.Contains(a) })
}

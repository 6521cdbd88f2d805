package lease

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// mostChoices bounds how often a subnet is drawn, and where few are free from how many. By chance, since nodes that start at once would
// all take the first.
const mostChoices = 100

// errFull says that no subnet is free.
var errFull = errors.New("no subnet is free")

// choose returns a free subnet of the network: of each family the first of the preferred ones that can be had, else any.
func (n Network) choose(prefer []Subnet, taken []Subnet) (s Subnet, err error) {
	for f, r := range n.Ranges {
		if !r.Prefix.IsValid() {
			continue
		}
		t := newTaken(wire.Family(f), r.Bits, taken)
		i := slices.IndexFunc(prefer, func(p Subnet) bool { _, is := t.overlap(p[f]); return r.fits(p[f]) && !is })
		if i >= 0 {
			s[f] = prefer[i][f]
			continue
		}
		if s[f] = r.draw(t); s[f].IsValid() {
			continue
		}
		free := r.free(t)
		if len(free) == 0 {
			return s, fmt.Errorf("%w between %s and %s (/%d)", errFull, r.First, r.Last, r.Bits)
		}
		s[f] = free[rand.IntN(len(free))] //nolint:gosec // no secret
	}
	return s, nil
}

// draw returns a subnet of all that are free; none if that takes too long, since few are.
func (r Range) draw(t taken) netip.Prefix {
	for range mostChoices {
		octets := r.Prefix.Addr().AsSlice()
		for i := r.Prefix.Bits(); i < r.Bits; i++ {
			octets[i/8] |= byte(rand.IntN(2)) << (7 - i%8) //nolint:gosec // no secret
		}
		a, _ := netip.AddrFromSlice(octets)
		p := netip.PrefixFrom(a, r.Bits)
		if _, over := t.overlap(p); !over && r.fits(p) {
			return p
		}
	}
	return netip.Prefix{}
}

// free are the first subnets of a range that nobody has.
func (r Range) free(t taken) (free []netip.Prefix) {
	for a := r.First; len(free) < mostChoices; {
		p := netip.PrefixFrom(a, r.Bits)
		over, is := t.overlap(p)
		if !is {
			free = append(free, p)
		} else if over.Bits() < r.Bits {
			a = lastSubnet(over, r.Bits) // one step over a prefix that has room for a great many
		}
		if !a.Less(r.Last) {
			break
		}
		a = next(a, r.Bits)
	}
	return free
}

// fits reports whether a subnet is one of the network's.
func (n Network) fits(s Subnet) bool {
	for f, r := range n.Ranges {
		if !r.fits(s[f]) {
			return false
		}
	}
	return true
}

// taken are the prefixes of a family that can't be had: those of the usual length, and the others.
type taken struct {
	usual map[netip.Prefix]bool
	odd   []netip.Prefix
}

func newTaken(f wire.Family, bits int, all []Subnet) taken {
	t := taken{usual: make(map[netip.Prefix]bool, len(all))}
	for _, s := range all {
		switch p := s[f]; {
		case !p.IsValid():
		case p.Bits() == bits:
			t.usual[p] = true
		default:
			t.odd = append(t.odd, p)
		}
	}
	return t
}

// overlap returns the prefix that a subnet of the usual length overlaps.
func (t taken) overlap(p netip.Prefix) (over netip.Prefix, is bool) {
	if t.usual[p] {
		return p, true
	}
	if i := slices.IndexFunc(t.odd, p.Overlaps); i >= 0 {
		return t.odd[i], true
	}
	return netip.Prefix{}, false
}

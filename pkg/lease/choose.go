package lease

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// mostChoices bounds from how many free subnets one is drawn. By chance, since nodes that start at once would all take the first.
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
		i := slices.IndexFunc(prefer, func(p Subnet) bool { return r.fits(p[f]) && !t.overlaps(p[f]) })
		if i >= 0 {
			s[f] = prefer[i][f]
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

// free are the first subnets of a range that nobody has.
func (r Range) free(t taken) (free []netip.Prefix) {
	for a := r.First; len(free) < mostChoices; a = next(a, r.Bits) {
		if p := netip.PrefixFrom(a, r.Bits); !t.overlaps(p) {
			free = append(free, p)
		}
		if a == r.Last {
			break
		}
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

func (t taken) overlaps(p netip.Prefix) bool {
	return t.usual[p] || slices.ContainsFunc(t.odd, p.Overlaps)
}

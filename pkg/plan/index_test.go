package plan

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestIndexesAnswerAsListsDo asks for the same by a walk over everything.
func TestIndexesAnswerAsListsDo(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	address := func() netip.Addr { // few, so that much overlaps
		return netip.AddrFrom4([4]byte{10, byte(random.IntN(3)), byte(random.IntN(4)), byte(random.IntN(256))})
	}
	prefix := func() netip.Prefix { return netip.PrefixFrom(address(), random.IntN(33)).Masked() }
	for range 200 {
		var f Facts
		for i := range uint32(4) {
			f.Uplinks = append(f.Uplinks, Link{Index: i + 1, Bit: i})
		}
		for range random.IntN(40) {
			r := KernelRoute{Dst: prefix(), Index: uint32(random.IntN(6)), OnLink: random.IntN(2) == 0, Table: random.IntN(2)}
			if random.IntN(4) == 0 {
				r.Hops = []uint32{uint32(random.IntN(6)), uint32(random.IntN(6))}
			}
			if r.Table == 0 {
				f.Routes = append(f.Routes, r)
			} else {
				f.Others = append(f.Others, r)
			}
			f.Local = append(f.Local, netip.PrefixFrom(address(), 32))
		}
		j, masks := newJudge(Input{Facts: f}), newRouteMasks(f)
		for range 50 {
			a, p := address(), prefix()
			got, found := j.route(a)
			want, there := longest(f.Routes, a)
			if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" || found != there {
				t.Fatalf("route to %s: %v, want %v\n%s", a, found, there, diff)
			}
			if got, want := j.local.Contains(a), Contains(f.Local, a); got != want {
				t.Fatalf("%s local: %v", a, got)
			}
			_, overlaps := overlapsAny(p, f.Local)
			if got := j.local.OverlapsPrefix(p); got != overlaps {
				t.Fatalf("%s has a local address: %v", p, got)
			}
			around, within := f.walk(p)
			if masks.around(p, 0) != around || masks.within(p) != within {
				t.Fatalf("%s: masks %b and %b, want %b and %b", p, masks.around(p, 0), masks.within(p), around, within)
			}
		}
	}
}

// longest is the first of the routes with the longest prefix.
func longest(routes []KernelRoute, a netip.Addr) (best KernelRoute, found bool) {
	for _, r := range routes {
		if r.Dst.Contains(a) && (!found || r.Dst.Bits() > best.Dst.Bits()) {
			best, found = r, true
		}
	}
	return best, found
}

// walk is around and within.
func (f Facts) walk(p netip.Prefix) (around, within uint64) {
	for _, routes := range [][]KernelRoute{f.Routes, f.Others} {
		bits, masks := -1, map[int]uint64{}
		for _, r := range routes {
			var mask uint64
			for _, index := range append([]uint32{r.Index}, r.Hops...) {
				for _, l := range f.Uplinks {
					if l.Index == index {
						mask |= 1 << l.Bit
					}
				}
			}
			if p.Overlaps(r.Dst) && r.Dst.Bits() >= p.Bits() {
				within |= mask
			}
			if p.Overlaps(r.Dst) && r.Dst.Bits() <= p.Bits() {
				bits = max(bits, r.Dst.Bits())
				masks[r.Dst.Bits()] |= mask
			}
		}
		around |= masks[bits]
	}
	return around, within
}

package service

import (
	"fmt"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/services"
)

// restrict gives a set the ranges of who may use its frontends with the flag Ranges. One that finds no room is kept out.
func (s *State) restrict(p *placed, t *set, w wantedSet, frontends []frontend) {
	var want []services.RangeKey
	if restricted(frontends) {
		for _, r := range w.ranges {
			want = append(want, services.RangeKeyFrom(t.number, r))
		}
		slices.SortFunc(want, compareRanges)
		want = slices.Compact(want)
	}
	for _, k := range t.ranges {
		if _, stays := slices.BinarySearchFunc(want, k, compareRanges); !stays {
			s.ranges.remove(k)
		}
	}
	t.ranges = nil
	refused := 0
	for _, k := range want {
		if s.ranges.costs(k) && s.rangesLeft() < 1 {
			refused++
			continue
		}
		s.ranges.put(k, services.Range{Set: t.number})
		t.ranges = append(t.ranges, k)
	}
	if refused > 0 {
		s.refuse(p, services.RangesName, fmt.Sprintf("who is in %d of the loadBalancerSourceRanges can't use port %d", refused, w.port))
	}
}

// rangesLeft is how many entries the map source_range has room for.
func (s *State) rangesLeft() int {
	return int(s.options.Capacities.Ranges) - len(s.ranges.have) - s.ranges.gone - s.room.leavingRanges
}

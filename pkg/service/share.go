package service

import (
	"fmt"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/services"
)

// shareFloor is how many entries of a small map one Service may have all the same.
const shareFloor = 1024

// share is how many of a map's entries one Service may have. Else one with many ports, endpoints or ranges, or one that grows,
// would leave no room for those of others.
func share(capacity uint32) int { return max(int(capacity)/4, shareFloor) }

// keepToShare takes from a Service's sets what exceeds its share, the last ports first, and says from which port on; empty: nothing.
func keepToShare(sets []wantedSet, c Capacities) (kept []wantedSet, refused string) {
	frontends, members, ranges := share(c.Services), share(c.Backends), share(c.Ranges)
	refuse := func(format string, args ...any) {
		if refused == "" {
			refused = fmt.Sprintf(format, args...)
		}
	}
	for _, w := range sets {
		if len(kept) == share(c.Sets) {
			refuse("port %d and others are not served: a Service may have %d ports, counted for each family", w.port, share(c.Sets))
			break
		}
		if len(w.frontends) > frontends {
			refuse("port %d and others are not served: a Service may have %d frontends, one for each port of each address", w.port, share(c.Services))
			continue
		}
		if len(w.backends) > members {
			refuse("some endpoints of port %d and others get no connections: a Service may have %d, counted for each port", w.port, share(c.Backends))
			w.backends = w.backends[:members]
		}
		if !restricted(w.frontends) {
			w.ranges = nil
		} else if len(w.ranges) > ranges {
			refuse("who is in some of the loadBalancerSourceRanges can't use port %d and others: a Service may have %d, counted for each port", w.port, share(c.Ranges))
			w.ranges = w.ranges[:ranges]
		}
		frontends, members, ranges = frontends-len(w.frontends), members-len(w.backends), ranges-len(w.ranges)
		kept = append(kept, w)
	}
	return kept, refused
}

// restricted says whether ranges matter to any of the frontends.
func restricted(all []frontend) bool {
	return slices.ContainsFunc(all, func(f frontend) bool { return f.flags&services.Ranges != 0 })
}

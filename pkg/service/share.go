package service

import "fmt"

// shareFloor is how many entries of a small map one Service may have all the same.
const shareFloor = 1024

// share is how many of a map's entries one Service may have. Else one with many ports and endpoints, or one that grows, would leave
// no room for those of others.
func share(capacity uint32) int { return max(int(capacity)/4, shareFloor) }

// keepToShare takes from a Service's sets what exceeds its share, the last ports first, and says from which port on; empty: nothing.
func keepToShare(sets []wantedSet, c Capacities) (kept []wantedSet, refused string) {
	frontends, members := share(c.Services), share(c.Backends)
	refuse := func(format string, args ...any) {
		if refused == "" {
			refused = fmt.Sprintf(format, args...)
		}
	}
	for _, w := range sets {
		if len(w.frontends) > frontends {
			refuse("port %d and others are not served: a Service may have %d frontends, one for each port of each address", w.port, share(c.Services))
			continue
		}
		if len(w.backends) > members {
			refuse("some endpoints of port %d and others get no connections: a Service may have %d, counted for each port", w.port, share(c.Backends))
			w.backends = w.backends[:members]
		}
		frontends, members = frontends-len(w.frontends), members-len(w.backends)
		kept = append(kept, w)
	}
	return kept, refused
}

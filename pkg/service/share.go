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

// looks is how many endpoints are looked at for each that a Service may have: most are not of the port's family, or are
// there twice. It has to do with time, and what has been refused costs none.
const looks = 8

// allowance is what is left of the share that a Service may have. Its last ports are refused.
type allowance struct {
	capacities                              Capacities
	sets, frontends, backends, ranges, look int
	// refused says what is refused, from which port on; empty: nothing is.
	refused string
}

func newAllowance(c Capacities) *allowance {
	return &allowance{
		capacities: c, sets: share(c.Sets), frontends: share(c.Services),
		backends: share(c.Backends), ranges: share(c.Ranges), look: looks * share(c.Backends),
	}
}

func (a *allowance) refuse(format string, args ...any) {
	if a.refused == "" {
		a.refused = fmt.Sprintf(format, args...)
	}
}

// admits says whether a port may have another set, with so many frontends.
func (a *allowance) admits(p Port, frontends int) bool {
	switch {
	case a.sets == 0:
		a.refuse("port %d and others are not served: a Service may have %d ports, counted for each family", p.Port, share(a.capacities.Sets))
	case frontends > a.frontends:
		a.refuse("port %d and others are not served: a Service may have %d frontends, one for each port of each address", p.Port, share(a.capacities.Services))
	default:
		return true
	}
	return false
}

// looksAt says whether the endpoints of a port are to be looked at.
func (a *allowance) looksAt(p Port, all mentions) bool {
	n := 0
	for _, s := range all.of(p) {
		n += len(s.Endpoints)
	}
	if n > 0 && (a.backends == 0 || n > a.look) {
		a.refuseBackends(p.Port)
		return false
	}
	a.look -= n
	return true
}

func (a *allowance) refuseBackends(port uint16) {
	a.refuse("some endpoints of port %d and others get no connections: a Service may have %d, counted for each port", port, share(a.capacities.Backends))
}

// take gives a set what is left, and less than that to the next.
func (a *allowance) take(w *wantedSet) {
	if len(w.backends) > a.backends {
		a.refuseBackends(w.port)
		w.backends = slices.Clone(w.backends[:a.backends])
	}
	if !restricted(w.frontends) {
		w.ranges = nil
	} else if len(w.ranges) > a.ranges {
		a.refuse("who is in some of the loadBalancerSourceRanges can't use port %d and others: a Service may have %d, counted for each port", w.port, share(a.capacities.Ranges))
		w.ranges = w.ranges[:a.ranges]
	}
	a.sets--
	a.frontends, a.backends, a.ranges = a.frontends-len(w.frontends), a.backends-len(w.backends), a.ranges-len(w.ranges)
}

// restricted says whether ranges matter to any of the frontends.
func restricted(all []frontend) bool {
	return slices.ContainsFunc(all, func(f frontend) bool { return f.flags&services.Ranges != 0 })
}

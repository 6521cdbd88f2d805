package plan

import (
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
)

// notOfPolicies are the flags that say nothing of the host's policies.
const notOfPolicies = destinations.Part | destinations.ByTunnel

// Essential reports whether packets go the wrong way without a destination, whatever else is there: an address or pod of
// this node, what is never masqueraded, the ranges of Services, and what a policy applies to that does not apply to the next wider destination. A POD_CIDR or
// NODE that is missing is treated as what contains it is, most often the world: packets to it are masqueraded.
func Essential(all map[destinations.Key]destinations.Value, k destinations.Key) bool {
	switch v := all[k]; {
	case v.Kind == destinations.Host, v.Kind == destinations.Local, v.Kind == destinations.Native, v.Kind == destinations.Service:
		return true
	case v.Flags&^notOfPolicies == 0:
		return false
	default:
		return v.Flags&^notOfPolicies&^wider(all, k.Netip()).Flags != 0
	}
}

// precedence is how much a destination is needed, the lowest the most.
func precedence(all map[destinations.Key]destinations.Value, k destinations.Key) int {
	switch v := all[k]; {
	case Essential(all, k):
		return 0
	case v.Kind == destinations.PodCIDR && v.Way() != destinations.None:
		return 1
	case v.Kind == destinations.PodCIDR:
		return 2
	}
	return 3
}

// Fit chooses which destinations a map should contain that has room for so many, and returns those that are left: all that
// are essential, then podCIDRs that are reachable, podCIDRs that are not, and nodes' addresses; of each kind first what is there.
func Fit(want, have map[destinations.Key]destinations.Value, room int) (fit map[destinations.Key]destinations.Value, left []destinations.Key) {
	if len(want) <= room {
		return want, nil
	}
	var byNeed [8][]destinations.Key
	for k := range want {
		r := 2 * precedence(want, k)
		if _, there := have[k]; !there {
			r++
		}
		byNeed[r] = append(byNeed[r], k)
	}
	essential := len(byNeed[0]) + len(byNeed[1])
	order := slices.Concat(byNeed[:]...)
	room = max(room, essential)
	fit = make(map[destinations.Key]destinations.Value, room)
	for _, k := range order[:min(room, len(order))] {
		fit[k] = want[k]
	}
	return fit, order[len(fit):]
}

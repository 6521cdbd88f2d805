package observe

import (
	"fmt"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// conflicts looks for pods that have one address. They can send from it, and one of
// them gets what is sent to it.
func (s *survey) conflicts() {
	having := map[wire.Addr][]string{}
	for _, d := range s.devices {
		if interfaceName(d.Key.Ifindex) == "" {
			continue // a pod that has ended
		}
		for _, a := range []wire.Addr{d.Value.IPv4, d.Value.IPv6} {
			if a != (wire.Addr{}) {
				having[a] = append(having[a], interfaceText(d.Key.Ifindex))
			}
		}
	}
	var shared []wire.Addr
	for a, pods := range having {
		if len(pods) > 1 {
			shared = append(shared, a)
		}
	}
	slices.SortFunc(shared, wire.Addr.Compare)
	for _, a := range shared {
		pods := having[a]
		slices.Sort(pods)
		s.problemOf("address "+a.String(), "the pods on the interfaces %s have one address, %s: packets to it go to %s; delete all but one of them",
			strings.Join(pods, " and "), a, s.leadsTo(a))
	}
}

func (s *survey) leadsTo(a wire.Addr) string {
	for _, e := range s.endpoints {
		if e.Key.Address == a {
			return "interface " + interfaceText(e.Value.Ifindex)
		}
	}
	return "none"
}

func interfaceText(ifindex uint32) string {
	return fmt.Sprintf("%d (%s)", ifindex, interfaceName(ifindex))
}

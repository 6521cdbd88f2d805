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
	for index, d := range s.devices {
		if s.interfaces[index] == "" {
			continue // a pod that has ended
		}
		for _, a := range d.Addresses {
			if a != (wire.Addr{}) {
				having[a] = append(having[a], s.interfaceText(index))
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
			return "interface " + s.interfaceText(e.Value.Ifindex)
		}
	}
	return "none"
}

// interfaceText is such as "42 (ecdd93b9ef1ca of pod shop/web)".
func (s *survey) interfaceText(ifindex uint32) string {
	of := ""
	if name := s.names.byLink[ifindex].String(); name != "" {
		of = " of pod " + name
	}
	return fmt.Sprintf("%d (%s%s)", ifindex, s.interfaces[ifindex], of)
}

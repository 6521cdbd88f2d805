package service

import (
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// ReadyOn is how many endpoints of a Service are ready on a node, as its load balancer is told: by their addresses, whichever of the
// Service's ports they are for. One of both families is one.
func ReadyOn(node string, all []*Slice) (most int) {
	var ready [wire.Families]map[netip.Addr]bool
	for f := range ready {
		ready[f] = map[netip.Addr]bool{}
	}
	for _, s := range all {
		if len(s.Ports) == 0 {
			continue
		}
		for _, e := range s.Endpoints {
			if a := e.Address.Unmap(); a.IsValid() && e.Ready && e.Node != "" && e.Node == node {
				ready[wire.FamilyOf(a)][a] = true
			}
		}
	}
	for _, addresses := range ready {
		most = max(most, len(addresses))
	}
	return most
}

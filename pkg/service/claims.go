package service

import (
	"net/netip"
	"slices"
)

// claims are the Services that have an address.
type claims map[netip.Addr][]Name

func (c claims) add(a netip.Addr, n Name) { c[a] = append(c[a], n) }

func (c claims) remove(a netip.Addr, n Name) {
	if c[a] = slices.DeleteFunc(c[a], func(o Name) bool { return o == n }); len(c[a]) == 0 {
		delete(c, a)
	}
}

// external are the addresses of a Service that the API has not given it: somebody says that they are its own.
func (s *Service) external() []netip.Addr { return slices.Concat(s.ExternalIPs, s.LoadBalancerIPs) }

// index says of a Service's addresses that it has them, by add, or has them no more, by remove. Who else claims a ClusterIP of it
// has changed as well.
func (m *Model) index(s *Service, change func(claims, netip.Addr, Name), changed map[Name]bool) {
	for _, a := range s.external() {
		change(m.claimed, a, s.Name)
	}
	for _, a := range s.ClusterIPs {
		change(m.clusterIPs, a, s.Name)
		for _, n := range m.claimed[a] {
			changed[n] = true
		}
	}
}

// otherClusterIP returns another Service whose ClusterIP the address is.
func (m *Model) otherClusterIP(a netip.Addr, n Name) (Name, bool) {
	i := slices.IndexFunc(m.clusterIPs[a], func(o Name) bool { return o != n })
	if i < 0 {
		return Name{}, false
	}
	return m.clusterIPs[a][i], true
}

package service

import (
	"iter"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
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

// noteSlice says that a slice is new or gone: its Service has changed and, if it is the API server's, who claims an address of it.
func (m *Model) noteSlice(s *Slice, changed map[Name]bool) {
	changed[s.owner()] = true
	if s.owner() != apiServer {
		return
	}
	for _, e := range s.Endpoints {
		for _, n := range m.claimed[e.Address] {
			changed[n] = true
		}
	}
}

// APIServerPorts are where the API server answers: by its own word, and where the agent reaches it.
func (m *Model) APIServerPorts(reached []netip.AddrPort) iter.Seq2[netip.AddrPort, wire.Protocol] {
	return func(yield func(netip.AddrPort, wire.Protocol) bool) {
		for _, at := range reached {
			if !yield(at, wire.TCP) {
				return
			}
		}
		for _, s := range m.Slices(apiServer) {
			for _, p := range s.Ports {
				for _, e := range s.Endpoints {
					if !yield(netip.AddrPortFrom(e.Address.Unmap(), p.Port), p.Protocol) {
						return
					}
				}
			}
		}
	}
}

// isAPIServers says whether the API server answers at a frontend.
func (m *Model) isAPIServers(f frontend, o Options) bool {
	want := netip.AddrPortFrom(f.Address.Netip(), f.Port.Host())
	for at, proto := range m.APIServerPorts(o.APIServers) {
		if at == want && proto == f.Proto {
			return true
		}
	}
	return false
}

// APIServer is the name of the API server's Service.
func APIServer() Name { return apiServer }

// APIServers are where the API server is ready, as its Service has it.
func (m *Model) APIServers() (all []netip.AddrPort) {
	for _, s := range m.Slices(apiServer) {
		for _, p := range s.Ports {
			if p.Protocol != wire.TCP || p.Name != "https" {
				continue
			}
			for _, e := range s.Endpoints {
				if e.Ready {
					all = append(all, netip.AddrPortFrom(e.Address.Unmap(), p.Port))
				}
			}
		}
	}
	return all
}

// otherClusterIP returns another Service whose ClusterIP the address is.
func (m *Model) otherClusterIP(a netip.Addr, n Name) (Name, bool) {
	i := slices.IndexFunc(m.clusterIPs[a], func(o Name) bool { return o != n })
	if i < 0 {
		return Name{}, false
	}
	return m.clusterIPs[a][i], true
}

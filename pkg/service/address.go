package service

import (
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// use notes at which addresses a Service has frontends now. Their entries, and those that it has left, are looked at later,
// since many Services may share one.
func (s *State) use(p *placed) {
	var now []wire.Addr
	for _, k := range p.keys {
		if !k.IsNodePort() && !slices.Contains(now, k.Address) {
			now = append(now, k.Address)
		}
	}
	for _, a := range p.addresses {
		s.touched[a] = true
		if !slices.Contains(now, a) {
			s.users[a] = slices.DeleteFunc(s.users[a], func(o *placed) bool { return o == p })
		}
	}
	for _, a := range now {
		s.touched[a] = true
		if !slices.Contains(p.addresses, a) {
			s.users[a] = append(s.users[a], p)
		}
	}
	p.addresses = now
}

// admitNodeAddresses gives this node's own addresses their room before Services have any: without one's entry no NodePort and no
// host port answers there.
func (s *State) admitNodeAddresses() {
	for a := range s.touched {
		k := services.Key{Address: a}
		if own := s.options.ownFlags(a); own != 0 && s.services.costs(k) && s.keysLeft() > 0 {
			s.services.put(k, services.Value{Flags: own})
		}
	}
}

// ownFlags says what answers on an address because it is the node's own.
func (o *Options) ownFlags(a wire.Addr) services.Flags {
	switch addr := a.Netip(); {
	case o.NodeAddresses[addr]:
		return services.Node | services.Own
	case o.OwnAddresses[addr]:
		return services.Own
	}
	return 0
}

// touchAddresses brings the entries of addresses in line with who uses them. One of this node's that finds no room has it looked
// for again.
func (s *State) touchAddresses() {
	left := map[wire.Addr]bool{}
	for a := range s.touched {
		k := services.Key{Address: a}
		if len(s.users[a]) == 0 {
			delete(s.users, a)
		}
		switch {
		case len(s.users[a]) == 0 && s.options.ownFlags(a) == 0:
			s.services.remove(k)
		case s.services.costs(k) && s.keysLeft() < 1:
			left[a] = true
		default:
			s.services.put(k, services.Value{Flags: s.addressFlags(a)})
		}
	}
	s.touched = left
}

// addressFlags says what an address is. One that the node itself holds answers for itself.
func (s *State) addressFlags(a wire.Addr) (f services.Flags) {
	f = s.options.ownFlags(a)
	for _, p := range s.users[a] {
		if slices.Contains(p.clusterIPs, a) {
			f |= services.ClusterIP
		}
		if !s.options.HeldAddresses[a.Netip()] && s.answersAt(p, a) {
			f |= services.Answers
		}
	}
	return f
}

// answersAt says whether a port of the Service has backends at that address.
func (s *State) answersAt(p *placed, a wire.Addr) bool {
	return slices.ContainsFunc(p.keys, func(k services.Key) bool {
		return k.Address == a && s.sets.have[s.services.have[k].Set].Block.Cluster() > 0
	})
}

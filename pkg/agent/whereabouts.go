package agent

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/pkg/guard"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// whereabouts are what this node's choice of endpoints depends on beside Services: where it is, and what addresses it has.
type whereabouts struct {
	known bool
	zone  string
	// held are the node's own addresses but for the tunnel's, own those of them that others may ask, both sorted.
	held, own []netip.Addr
	// broadcast are the IPv4 addresses of everybody on a link of this node, sorted.
	broadcast []netip.Addr
	// hostPorts are who has a NodePort as a host port.
	hostPorts map[services.Key]string
	// yields says that kube-proxy has the ports of Services, or may be about to.
	yields bool
}

func (s whereabouts) equal(o whereabouts) bool {
	return s.known == o.known && s.yields == o.yields && s.zone == o.zone && slices.Equal(s.held, o.held) && slices.Equal(s.own, o.own) && slices.Equal(s.broadcast, o.broadcast) && maps.Equal(s.hostPorts, o.hostPorts)
}

func (c *serviceController) options(s whereabouts) service.Options {
	o := service.Options{
		NodeName: c.cfg.Node, Zone: s.zone, HeldAddresses: setOf(s.held), OwnAddresses: setOf(s.own), NodeAddresses: setOf(nil), HostPorts: s.hostPorts,
		ExternalIPs: c.cfg.ExternalIPs, APIServers: slices.Concat(c.addressesOfAPI(), c.guarded.servers), Guarded: append(guard.Fixed(), c.cfg.guardedByConfig()...),
		Broadcast: setOf(s.broadcast), Capacities: c.maps.capacities(),
	}
	for _, a := range s.own {
		o.NodeAddresses[a] = len(c.cfg.NodePortAddresses) == 0 || c.cfg.narrows(a)
	}
	return o
}

func setOf(all []netip.Addr) map[netip.Addr]bool {
	set := make(map[netip.Addr]bool, len(all))
	for _, a := range all {
		set[a] = true
	}
	return set
}

// narrows says whether --nodeport-addresses names an address.
func (c Config) narrows(a netip.Addr) bool {
	return slices.ContainsFunc(c.NodePortAddresses, func(p netip.Prefix) bool { return p.Contains(a) })
}

// locate tells where this node is, for the loop.
func (c *serviceController) locate(s *state, self string) {
	if c == nil || !s.known || s.view == nil {
		return
	}
	now := whereaboutsOf(s, self)
	now.yields = c.status.waits()
	if now.equal(c.told) {
		return
	}
	c.told = now
	select { // what has not been taken yet is not needed any more
	case <-c.around:
	default:
	}
	c.around <- now
}

// whereaboutsOf reads this node's zone from its Node, and its own addresses from the newest look.
func whereaboutsOf(s *state, self string) whereabouts {
	now := whereabouts{known: true}
	for _, n := range s.nodes {
		if n.Name == self {
			now.zone = n.Zone
		}
	}
	tunnels, ipvs := s.view.onlyOn(tunnelName), s.view.onlyOn(ipvsName) // where nobody asks for a Service, and where each has its addresses
	now.held = slices.DeleteFunc(heldBy(s.view), func(a netip.Addr) bool { return tunnels[a] })
	// Those of loopback are the node's own processes' alone.
	now.own = slices.DeleteFunc(slices.Clone(now.held), func(a netip.Addr) bool { return a.IsLoopback() || isOfLink(a) || ipvs[a] })
	for _, p := range s.view.broadcast {
		if p.Addr().Is4() && p.IsSingleIP() {
			now.broadcast = append(now.broadcast, p.Addr())
		}
	}
	slices.SortFunc(now.broadcast, netip.Addr.Compare)
	now.broadcast = slices.Compact(now.broadcast)
	now.hostPorts = s.inTheWay(now.own)
	return now
}

// ipvsName is the link on which kube-proxy, in its mode ipvs, puts the addresses of all Services.
const ipvsName = "kube-ipvs0"

// onlyOn are the addresses of a link that no other one has.
func (v *view) onlyOn(name string) map[netip.Addr]bool {
	on, elsewhere := map[netip.Addr]bool{}, map[netip.Addr]bool{}
	for _, a := range v.addresses {
		if v.links[a.Index].Name == name {
			on[a.Prefix.Addr()] = true
		} else {
			elsewhere[a.Prefix.Addr()] = true
		}
	}
	maps.DeleteFunc(on, func(a netip.Addr, _ bool) bool { return elsewhere[a] })
	return on
}

// heldBy are the node's own addresses, sorted.
func heldBy(v *view) []netip.Addr {
	held := map[netip.Addr]bool{}
	for _, a := range v.addresses {
		if v.of(a.Prefix.Addr()) {
			held[a.Prefix.Addr()] = true
		}
	}
	for _, p := range v.local {
		if p.IsSingleIP() && v.of(p.Addr()) {
			held[p.Addr()] = true
		}
	}
	return slices.SortedFunc(maps.Keys(held), netip.Addr.Compare)
}

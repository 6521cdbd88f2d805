package agent

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strconv"

	"k8s.io/client-go/rest"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// whereabouts are what this node's choice of endpoints depends on beside Services: where it is, and what addresses it has.
type whereabouts struct {
	known bool
	zone  string
	// held are the node's own addresses but for the tunnel's, sorted.
	held []netip.Addr
}

func (s whereabouts) equal(o whereabouts) bool {
	return s.known == o.known && s.zone == o.zone && slices.Equal(s.held, o.held)
}

func (c *serviceController) options(s whereabouts) service.Options {
	held, answers := make(map[netip.Addr]bool, len(s.held)), map[netip.Addr]bool{}
	for _, a := range s.held {
		held[a] = true
		if c.cfg.answersNodePorts(a) {
			answers[a] = true
		}
	}
	return service.Options{
		NodeName: c.cfg.Node, Zone: s.zone, HeldAddresses: held, NodeAddresses: answers, ExternalIPs: c.cfg.ExternalIPs,
		APIServer: c.cfg.apiServer(), Capacities: c.maps.capacities(),
	}
}

// apiServer is the address and port of the API server; not valid: it is reached by a name, or not at all.
func (c Config) apiServer() netip.AddrPort {
	if c.API == nil {
		return netip.AddrPort{}
	}
	at, _, err := rest.DefaultServerUrlFor(c.API)
	if err != nil {
		return netip.AddrPort{}
	}
	host, _ := netip.ParseAddr(at.Hostname())
	port, _ := strconv.ParseUint(cmp.Or(at.Port(), "443"), 10, 16)
	return netip.AddrPortFrom(host.Unmap(), uint16(port))
}

// answersNodePorts says whether NodePorts answer on an address of the node's. Those of loopback are the node's own processes' alone.
func (c Config) answersNodePorts(a netip.Addr) bool {
	if a.IsLoopback() || isOfLink(a) {
		return false
	}
	return len(c.NodePortAddresses) == 0 || c.narrows(a)
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
	now.held = slices.DeleteFunc(heldBy(s.view), s.view.isTunnels)
	return now
}

// isTunnels says whether an address is one of the tunnel device's, where nobody asks for a Service.
func (v *view) isTunnels(addr netip.Addr) bool {
	return slices.ContainsFunc(v.addresses, func(a device.Address) bool {
		return a.Prefix.Addr() == addr && v.links[a.Index].Name == tunnelName
	})
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

package agent

import (
	"log/slog"
	"net"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// view is this node's network as one pass finds it.
type view struct {
	links     map[int]device.Link
	addresses []device.Address
	local     []netip.Prefix
	routes    []device.Route
	// podRoutes are those of routes that lead to one address.
	podRoutes map[netip.Prefix][]device.Route
	endpoints []endpoint.Endpoint
	// claims are the endpoints with a link by their addresses: more than one of an
	// address that two pods have.
	claims map[netip.Addr][]endpoint.Endpoint
	// incomplete says that there are endpoints whose state can't be read.
	incomplete bool
	uplinks    []plan.Link
	// neighbours are the permanent ones.
	neighbours map[neighbour]net.HardwareAddr
}

type neighbour struct {
	index int
	addr  netip.Addr
}

// look lists everything anew.
func look(host *device.Handle, stateDir string, named []string, log *slog.Logger) (*view, error) {
	v := &view{links: map[int]device.Link{}, neighbours: map[neighbour]net.HardwareAddr{}}
	// The state files first: what they tell of was there before they were written.
	// An endpoint whose file is broken is not repaired; the others are.
	var err error
	if v.endpoints, err = endpoint.List(stateDir); err != nil {
		log.Error("some endpoints' state can't be read", "error", err)
		v.incomplete = true
	}
	links, err := host.Links()
	if err != nil {
		return nil, err
	}
	for _, l := range links {
		v.links[l.Index] = l
	}
	if v.addresses, err = host.Addresses(); err != nil {
		return nil, err
	}
	if v.local, err = host.LocalPrefixes(); err != nil {
		return nil, err
	}
	if v.routes, err = host.Routes(); err != nil {
		return nil, err
	}
	v.index()
	neighbours, err := host.Neighbours(0)
	if err != nil {
		return nil, err
	}
	for _, n := range neighbours {
		if n.Permanent {
			v.neighbours[neighbour{n.Index, n.Addr}] = n.MAC
		}
	}
	v.uplinks = v.findUplinks(named)
	return v, nil
}

// index sorts what is asked for by address.
func (v *view) index() {
	v.podRoutes, v.claims = map[netip.Prefix][]device.Route{}, map[netip.Addr][]endpoint.Endpoint{}
	for _, r := range v.routes {
		if r.Dst.IsSingleIP() {
			v.podRoutes[r.Dst] = append(v.podRoutes[r.Dst], r)
		}
	}
	for _, e := range v.endpoints {
		if e.Releasing || v.links[e.HostIndex].Name != e.HostName {
			continue
		}
		for _, a := range e.Addresses {
			v.claims[a] = append(v.claims[a], e)
		}
	}
}

// findUplinks returns the interfaces that lead out of the node, by index: the
// named ones, or all Ethernet interfaces that IPv4 routes lead to.
func (v *view) findUplinks(named []string) []plan.Link {
	chosen := map[int]bool{}
	if len(named) > 0 {
		for _, l := range v.links {
			chosen[l.Index] = slices.Contains(named, l.Name)
		}
	} else {
		for _, r := range v.routes {
			if r.Protocol == device.Protocol || !r.Dst.Addr().Is4() {
				continue
			}
			for _, index := range append([]int{r.Index}, r.Hops...) {
				chosen[index] = chosen[index] || leadsOut(v.links[index])
			}
		}
	}
	var out []plan.Link
	for index, yes := range chosen {
		if yes {
			out = append(out, v.uplink(v.links[index]))
		}
	}
	slices.SortFunc(out, func(a, b plan.Link) int { return int(a.Index) - int(b.Index) })
	return out
}

// leadsOut refuses loopback, pods' links, and what has no Ethernet header for
// our programs to read.
func leadsOut(l device.Link) bool {
	return l.Index != 0 && !l.Loopback() && !endpoint.IsHostLinkName(l.Name) && len(l.MAC) == 6
}

func (v *view) uplink(l device.Link) plan.Link {
	out := plan.Link{Index: uint32(l.Index), Name: l.Name, MTU: uint32(l.MTU)}
	for _, secondary := range []bool{false, true} {
		for _, a := range v.addresses {
			if a.Index == l.Index && !a.Host && !a.Link && a.Secondary == secondary {
				out.Addresses = append(out.Addresses, a.Prefix.Addr())
			}
		}
	}
	return out
}

// facts is the view as the planner wants it.
func (v *view) facts() plan.Facts {
	f := plan.Facts{Local: v.local, Uplinks: v.uplinks}
	for _, r := range v.routes {
		if r.Protocol != device.Protocol && r.Dst.Addr().Is4() {
			onLink := !r.Gateway.IsValid() && r.Index != 0 && !r.Unreachable
			f.Routes = append(f.Routes, plan.KernelRoute{Dst: r.Dst, Index: uint32(r.Index), OnLink: onLink, Via: r.Gateway})
		}
	}
	for _, e := range v.endpoints {
		if !e.Releasing {
			f.Endpoints = append(f.Endpoints, e.Addresses...)
		}
	}
	return f
}

func (v *view) uplinkNames() []string {
	var names []string
	for _, l := range v.uplinks {
		names = append(names, l.Name)
	}
	return names
}

// mtu is what fits through every uplink.
func (v *view) mtu() int {
	const usual = 1500
	least := 0
	for _, l := range v.uplinks {
		if least == 0 || int(l.MTU) < least {
			least = int(l.MTU)
		}
	}
	if least == 0 {
		return usual
	}
	return least
}

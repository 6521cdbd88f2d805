package agent

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// view is this node's network as one pass finds it.
type view struct {
	used      plan.FamilySet // what was looked at; of other families only our own routes, and neighbours
	lacks     plan.FamilySet // what the kernel does not have
	links     map[int]device.Link
	addresses []device.Address
	local     []netip.Prefix
	routes    []device.Route
	// podRoutes are those of our routes that lead to one address, by their link.
	podRoutes map[int][]device.Route
	settings  map[int]device.Settings // of IPv4, of each link and of all
	podView
	uplinks []plan.Link
	// bridges are those of the named ones that there are, and that are up.
	bridges []plan.Bridge
	// away is how many of the uplinks lead out no more, for a moment; recent are addresses that they had.
	away   int
	recent []plan.Recent
	// others are the routes of tables that rules lead to, but for the main one.
	others []device.Route
	// many is set where there are so many routes that routes and others are those alone that decide on something; reading is
	// the processor time that the look took then.
	many    *routeFilter
	reading time.Duration
	exits   exits // of routes and others
	rules   []device.Rule
	// marked says which rule of netfilter's marks pods' packets with what a rule here asks for; empty: none.
	marked    string
	policies  []device.Policy
	broadcast []netip.Prefix
	// tunnel is the index of the tunnel device; 0: there is none that works.
	tunnel int
}

// podView is what is looked at only when something may have changed about pods.
type podView struct {
	endpoints []endpoint.Endpoint
	// incomplete says of which endpoints the state can't be read; nil: of none.
	incomplete error
	// neighbours are those of each link.
	neighbours map[int][]device.Neighbour
}

func lookAtPods(host *device.Handle, stateDir string) (v podView, err error) {
	// An endpoint whose file is broken is not repaired; the others are.
	v.endpoints, v.incomplete = endpoint.List(stateDir)
	all, err := host.Neighbours(0)
	if err != nil {
		return v, err
	}
	v.neighbours = map[int][]device.Neighbour{}
	for _, n := range all {
		v.neighbours[n.Index] = append(v.neighbours[n.Index], n)
	}
	return v, nil
}

// look lists everything anew, or takes over what is known of pods.
func look(host *device.Handle, cfg Config, used plan.FamilySet, known earlier) (*view, error) {
	started := processorTime()
	v := &view{used: used, links: map[int]device.Link{}, podRoutes: map[int][]device.Route{}}
	var links []device.Link
	var errs [6]error
	// The state files first: what they describe was there before they were written.
	if known.pods != nil {
		v.podView = *known.pods
	} else {
		v.podView, errs[0] = lookAtPods(host, cfg.State)
	}
	links, errs[1] = host.Links()
	v.addresses, errs[2] = host.Addresses()
	v.local, v.broadcast, errs[3] = host.LocalTable(v.families()...)
	for _, l := range links {
		v.links[l.Index] = l
	}
	errs[4] = v.lookAtRoutes(host, cfg, known)
	v.settings, errs[5] = host.Settings()
	if err := errors.Join(errs[:]...); err != nil {
		return nil, err
	}
	for _, r := range v.routes {
		if r.Protocol == device.Protocol && r.Dst.IsSingleIP() {
			v.podRoutes[r.Index] = append(v.podRoutes[r.Index], r)
		}
	}
	if v.many != nil {
		v.reading = processorTime() - started
	}
	v.findExits(cfg)
	v.uplinks = v.findUplinks(cfg.Uplinks, cfg.Bridges)
	v.bridges = v.findBridges(cfg.Bridges)
	return v, nil
}

// families are those that were looked at, as the kernel numbers them.
func (v *view) families() []int { return numbersOf(v.used) }

// numbersOf are families as the kernel numbers them.
func numbersOf(used plan.FamilySet) (all []int) {
	for f, number := range [wire.Families]int{wire.IPv4: device.IPv4, wire.IPv6: device.IPv6} {
		if used[f] {
			all = append(all, number)
		}
	}
	return all
}

// familyOf is the family that the kernel gives that number.
func familyOf(number int) wire.Family {
	if number == device.IPv6 {
		return wire.IPv6
	}
	return wire.IPv4
}

// of says that an address is of a family that was looked at.
func (v *view) of(a netip.Addr) bool { return v.used[wire.FamilyOf(a)] }

// stackRoutes says why the host's stack decides on routes; empty: the programs can ask for them.
func (v *view) stackRoutes() string {
	for _, r := range v.rules {
		switch {
		case r.Unseen != "":
			return fmt.Sprintf("rule %d asks for %s", r.Priority, r.Unseen)
		case r.Marks != 0 && v.marked != "":
			return fmt.Sprintf("rule %d asks for a packet mark, and netfilter may set it in pods' packets: %s", r.Priority, v.marked)
		}
	}
	for _, r := range slices.Concat(v.routes, v.others) {
		if r.TOS != 0 && v.of(r.Dst.Addr()) {
			return fmt.Sprintf("the route to %s asks for a TOS value", r.Dst)
		}
	}
	return ""
}

// marks are the bits of packets' marks that rules ask for.
func (v *view) marks() (bits uint32) {
	for _, r := range v.rules {
		bits |= r.Marks
	}
	return bits
}

// findUplinks returns the interfaces that lead out of the node, by index: the
// named ones, or all interfaces that routes lead to. One that has only
// routes to single addresses is no way out: it leads to another network's pod or guest. Nor are those of a link's own
// prefix of IPv6, which each has. Nor are bridges whose containers are treated as pods.
func (v *view) findUplinks(named, bridges []string) []plan.Link {
	chosen := map[int]bool{}
	if len(named) > 0 {
		for _, l := range v.links {
			chosen[l.Index] = slices.Contains(named, l.Name) && canLeadOut(l)
		}
	} else {
		for _, r := range v.routes {
			if r.Protocol == device.Protocol || !v.of(r.Dst.Addr()) || r.Dst.IsSingleIP() || isOfLink(r.Dst.Addr()) {
				continue
			}
			for _, index := range append([]int{r.Index}, r.Hops...) {
				chosen[index] = chosen[index] || leadsOut(v.links[index])
			}
		}
	}
	var out []plan.Link
	for index, yes := range chosen {
		if yes && !slices.Contains(bridges, v.links[index].Name) {
			out = append(out, v.uplink(v.links[index]))
		}
	}
	slices.SortFunc(out, func(a, b plan.Link) int { return int(a.Index) - int(b.Index) })
	return out
}

// findExits sums up the routes of all tables that packets meet.
func (v *view) findExits(cfg Config) {
	v.exits = exits{}
	native := slices.Concat(cfg.NonMasquerade, cfg.Cluster)
	for _, routes := range [][]device.Route{v.routes, v.others} {
		for _, r := range routes {
			if v.of(r.Dst.Addr()) {
				v.exits.add(r, native)
			}
		}
	}
}

// findBridges returns those of the named bridges that are up, with what the host itself has there, by index.
func (v *view) findBridges(named []string) (out []plan.Bridge) {
	for _, l := range v.links {
		if l.Kind != device.KindBridge || !l.Up() || !slices.Contains(named, l.Name) {
			continue
		}
		b := plan.Bridge{Index: uint32(l.Index), Name: l.Name}
		for _, a := range v.addresses {
			if a.Index == l.Index && v.of(a.Prefix.Addr()) && !a.Host && !a.Link {
				b.Addresses = append(b.Addresses, a.Prefix)
			}
		}
		out = append(out, b)
	}
	slices.SortFunc(out, func(a, b plan.Bridge) int { return int(a.Index) - int(b.Index) })
	return out
}

// isOfLink reports whether an address of IPv6 means something on a link only. Those of IPv4 are none: hosts use them as others.
func isOfLink(a netip.Addr) bool { return a.Is6() && (a.IsLinkLocalUnicast() || a.IsMulticast()) }

// leadsOut refuses what cannot be an uplink, and pods' links.
func leadsOut(l device.Link) bool { return canLeadOut(l) && !endpoint.IsHostLinkName(l.Name) }

// canLeadOut refuses loopback, the tunnel, and what has neither an Ethernet header nor none, so that our programs cannot read it.
func canLeadOut(l device.Link) bool {
	return l.Index != 0 && !l.Loopback() && l.Name != tunnelName && (l.Ethernet() || l.Bare)
}

func (v *view) uplink(l device.Link) plan.Link {
	return plan.Link{Index: uint32(l.Index), Name: l.Name, MTU: uint32(l.MTU), VRF: v.vrf(l), Bare: !l.Ethernet()}
}

// vrf is the index of the VRF device that a link is, or belongs to; 0: none.
func (v *view) vrf(l device.Link) uint32 {
	switch {
	case l.Kind == "vrf":
		return uint32(l.Index)
	case v.links[l.Master].Kind == "vrf":
		return uint32(l.Master)
	}
	return 0
}

// sourceAddresses are those that packets can have as their source.
func (v *view) sourceAddresses() (all []plan.Address) {
	for _, a := range v.addresses {
		if v.of(a.Prefix.Addr()) && !a.Host && !a.Link && !a.Unproven {
			all = append(all, plan.Address{
				Prefix: a.Prefix, Index: uint32(a.Index), VRF: v.vrf(v.links[a.Index]), Secondary: a.Secondary, Deprecated: a.Deprecated, Temporary: a.Temporary,
			})
		}
	}
	return all
}

// ruledBySource are, of tables that rules lead to by a packet's source alone, the sources.
func (v *view) ruledBySource() map[int][]netip.Prefix {
	sources, tables := map[int][]netip.Prefix{}, v.tables() // a rule without a table, such as a blackhole, says nothing of the main one
	for _, r := range v.rules {
		sources[r.Table] = append(sources[r.Table], r.From)
		tables[r.Table] = tables[r.Table] && r.From.IsValid()
	}
	maps.DeleteFunc(sources, func(table int, _ []netip.Prefix) bool { return !tables[table] })
	return sources
}

// ruledInPart are the tables that all rules lead only a part of the host's own packets to.
func (v *view) ruledInPart() map[int]bool {
	tables := v.tables()
	for _, r := range v.rules {
		tables[r.Table] = tables[r.Table] && r.InPart
	}
	maps.DeleteFunc(tables, func(_ int, inPart bool) bool { return !inPart })
	return tables
}

// facts is the view as the planner wants it.
func (v *view) facts() plan.Facts {
	f := plan.Facts{Local: v.local, Uplinks: v.uplinks, Bridges: v.bridges, Addresses: v.sourceAddresses(), Recent: v.recent, Broadcast: v.everybodys(), RoutesToStack: v.stackRoutes() != "", Tunnel: uint32(v.tunnel), Lacks: v.lacks}
	f.Holders, f.NotEthernet = map[netip.Addr]string{}, map[uint32]plan.Link{}
	for _, l := range v.links {
		if !l.Ethernet() && !l.Loopback() {
			f.NotEthernet[uint32(l.Index)] = v.uplink(l)
		}
	}
	for _, a := range v.addresses {
		if v.of(a.Prefix.Addr()) {
			f.Holders[a.Prefix.Addr()] = v.links[a.Index].Name
		}
	}
	for _, r := range v.routes {
		if r.Protocol != device.Protocol && v.of(r.Dst.Addr()) {
			f.Routes = append(f.Routes, kernelRoute(r))
		}
	}
	for _, r := range v.others {
		f.Others = append(f.Others, kernelRoute(r))
	}
	f.Sources, f.InPart = v.ruledBySource(), v.ruledInPart()
	for _, p := range v.policies {
		f.Policies = append(f.Policies, plan.Policy{Src: p.Src.Masked(), Dst: p.Dst.Masked(), Out: p.Out, Required: p.Required})
	}
	for _, e := range v.endpoints {
		if !e.Releasing {
			f.Endpoints = append(f.Endpoints, e.Addresses...)
		}
	}
	return f
}

// everybodys are the addresses of everybody on a link of this node. Those of all its routers (RFC 4291, section 2.6.1) are among
// them also where the kernel does not forward yet: it adds them when it does, and nothing that is planned waits for that.
func (v *view) everybodys() []netip.Prefix {
	all := slices.Clone(v.broadcast)
	for _, a := range v.addresses {
		p := a.Prefix
		if !v.used[wire.IPv6] || p.Addr().Is4() || isOfLink(p.Addr()) || p.Bits() >= p.Addr().BitLen()-1 {
			continue
		}
		if routers := netip.PrefixFrom(p.Masked().Addr(), p.Addr().BitLen()); !slices.Contains(all, routers) {
			all = append(all, routers)
		}
	}
	return all
}

func kernelRoute(r device.Route) plan.KernelRoute {
	k := plan.KernelRoute{Dst: r.Dst, Index: uint32(r.Index), Via: r.Gateway, Src: r.Source, MTU: uint32(r.MTU), Table: r.Table, HopVias: r.HopGateways, Unreachable: r.Unreachable}
	k.OnLink = !r.Gateway.IsValid() && r.Index != 0 && !r.Unreachable && r.Encap == 0
	for _, hop := range r.Hops {
		k.Hops = append(k.Hops, uint32(hop))
	}
	return k
}

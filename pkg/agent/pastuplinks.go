package agent

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// singleAddressesPastUplinks finds interfaces without our programs that routes to single addresses of the world lead over, as those to
// each peer of a VPN. There may be thousands, so an interface is one problem.
func (c circumstances) singleAddressesPastUplinks(f wire.Family) (found []observe.NetworkProblem) {
	links := map[int]device.Link{}
	for index := range c.view.exits[f].singles {
		if l, past := c.isPast(index); past && !c.staysOnHost(l) && !isGuest(l) && !c.leadsPastUplinks(f, index) {
			links[index] = l
		}
	}
	if len(links) == 0 {
		return nil
	}
	first := map[int]netip.Prefix{}
	c.eachExit(f, func(r device.Route) {
		if !r.Dst.IsSingleIP() {
			return
		}
		for _, index := range r.Links() {
			if _, past := links[index]; past && !first[index].IsValid() && c.isWorld(r.Dst.Addr()) {
				first[index] = r.Dst
			}
		}
	})
	for _, index := range slices.Sorted(maps.Keys(first)) {
		l := links[index]
		found = append(found, observe.NetworkProblem{
			Reason: unmasqueraded, About: l.Name + " " + f.Name(),
			Text: fmt.Sprintf("routes to single addresses, such as %s, lead over %s, which has no programs: pods' packets leave there with pods' addresses unless netfilter masquerades them, and answers may not come back",
				first[index], l.Name),
			Remedy: fmt.Sprintf("let these routes lead over an uplink%s; or, if the hosts there have a route back to the podCIDRs, add the addresses to --non-masquerade-cidr", c.asUplink(l)),
		})
	}
	return found
}

// leadsPastUplinks reports whether a link without our programs is a problem by wider routes already.
func (c circumstances) leadsPastUplinks(f wire.Family, link int) bool {
	return c.view.exits[f].links[link].IsValid() || slices.Contains(c.view.exits.byDefault(f), link)
}

// isGuest reports whether a link is a tap device, which a single address's route leads over to a virtual machine of this host.
func isGuest(l device.Link) bool { return l.Kind == "tun" && l.Ethernet() }

// encapsulatedDefaults finds default routes that encapsulate packets. The programs leave those to the host's stack, and on the uplink
// see other packets than pods have sent.
func (c circumstances) encapsulatedDefaults(f wire.Family) (found []observe.NetworkProblem) {
	defaults, told := c.view.exits[f].defaults, map[device.Encap]bool{}
	for _, table := range slices.Sorted(maps.Keys(defaults)) {
		encap := defaults[table].encap
		if encap == 0 || told[encap] || !c.isForPods(table) {
			continue
		}
		told[encap] = true
		found = append(found, observe.NetworkProblem{
			Reason: defaultRoute, About: encap.String() + " " + f.Name(),
			Text: fmt.Sprintf("the %s default route encapsulates packets (%s), which the programs cannot do: pods' packets to the world leave encapsulated with pods' addresses, and NodePorts and host ports do not answer there",
				f.Name(), encap),
			Remedy: "let the default route lead over an uplink without encap (`ip route`)",
		})
	}
	return found
}

// encapsulatedParts finds routes to parts of the world that encapsulate packets.
func (c circumstances) encapsulatedParts(f wire.Family) (found []observe.NetworkProblem) {
	if !c.view.exits[f].encapsulated {
		return nil
	}
	first := map[device.Encap]netip.Prefix{}
	c.eachExit(f, func(r device.Route) {
		if r.Encap.Hides() && !first[r.Encap].IsValid() && r.Dst.Bits() != 0 && c.isWorld(r.Dst.Addr()) {
			first[r.Encap] = r.Dst
		}
	})
	for _, encap := range slices.SortedFunc(maps.Keys(first), cmp.Compare) {
		found = append(found, observe.NetworkProblem{
			Reason: unmasqueraded, About: encap.String() + " " + f.Name(),
			Text: fmt.Sprintf("routes, such as that to %s, encapsulate packets (%s), which the programs cannot do: pods' packets leave encapsulated with pods' addresses, and answers may not come back",
				first[encap], encap),
			Remedy: "let these routes lead over an uplink without encap (`ip route`); or, if the hosts there have a route back to the podCIDRs, add the destinations to --non-masquerade-cidr",
		})
	}
	return found
}

// isForPods reports whether rules may lead packets of pods to a table.
func (c circumstances) isForPods(table int) bool {
	return plan.IsForPods(table, c.view.ruledBySource(), c.plan.Standing.Own)
}

// eachExit calls do for each route of a family that is not ours and leads packets of pods out of the node.
func (c circumstances) eachExit(f wire.Family, do func(device.Route)) {
	forPods := map[int]bool{}
	for _, routes := range [][]device.Route{c.view.routes, c.view.others} {
		for _, r := range routes {
			if _, known := forPods[r.Table]; !known {
				forPods[r.Table] = c.isForPods(r.Table)
			}
			if forPods[r.Table] && r.Protocol != device.Protocol && !r.Unreachable && wire.FamilyOf(r.Dst.Addr()) == f && !isOfLink(r.Dst.Addr()) {
				do(r)
			}
		}
	}
}

// isWorld reports whether packets of pods to an address are masqueraded where that is on.
func (c circumstances) isWorld(a netip.Addr) bool {
	for bits := a.BitLen(); bits >= 0; bits-- {
		if v, there := c.plan.Destinations[destinations.KeyFrom(netip.PrefixFrom(a, bits).Masked())]; there {
			return v.Kind == destinations.World
		}
	}
	return true
}

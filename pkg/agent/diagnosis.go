package agent

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// A network problem is a fault of this node's surroundings that pods meet although the agent has done all that it can: the
// administrator has to mend it. The node stays ready and is not degraded.

// The reasons of network problems; the metric network_problems is labelled with them.
const (
	noUplinkAddress = "no_uplink_address"
	defaultRoute    = "default_route"
	unmasqueraded   = "unmasqueraded"
	slowPath        = "slow_path"
	podsOutside     = "pods_outside_podcidr"
	nodeMissing     = "node_missing"
	forwardDrop     = "forward_drop"

	snatPortsReduced = "snat_ports"
	portsUnreserved  = "unreserved_ports"
	ephemeralFew     = "ephemeral_ports"

	portLimit     = "port_limit"
	snatLimit     = "snat_limit"
	snatExhausted = "snat_exhausted"

	guardedHostPort = "guarded_host_port"
	hostPortShare   = "host_port_share"
	portsNearly     = "reserved_ports"
)

// networkReasons are all of them.
func networkReasons() []string {
	return []string{
		noUplinkAddress, defaultRoute, unmasqueraded, slowPath, podsOutside, nodeMissing, forwardDrop,
		snatPortsReduced, portsUnreserved, ephemeralFew, portLimit, snatLimit, snatExhausted,
		guardedHostPort, hostPortShare, portsNearly,
	}
}

// circumstances are everything that network problems are found in: the newest look and plan, and the settings.
type circumstances struct {
	*state
	cfg Config
}

// diagnose finds the network problems of a node. It is pure.
func diagnose(c circumstances) (found []observe.NetworkProblem) {
	for _, check := range []func(circumstances) []observe.NetworkProblem{
		circumstances.withoutAddress, circumstances.uselessAddresses, circumstances.waysPastUplinks, circumstances.slowPaths, circumstances.strayPods, circumstances.ownNode, circumstances.forwardDropped,
		circumstances.scarcePorts, circumstances.refusedFlows, circumstances.guardedHostPorts, circumstances.hostPortShares,
	} {
		found = append(found, check(c)...)
	}
	return found
}

// diagnose has the network problems of the newest look and plan in status, in the log and in the metric.
func (l *loop) diagnose() {
	if l.view == nil {
		return
	}
	before := l.networkProblems
	l.networkProblems = diagnose(circumstances{&l.state, l.cfg})
	l.status.set(func(f *figures) { f.networkProblems = l.networkProblems })
	for i, p := range newAmong(l.networkProblems, before) {
		if i < mostLines {
			l.log.Warn("network problem", "reason", p.Reason, "about", p.About, "detail", p.Text, "remedy", p.Remedy)
		}
	}
	for i, p := range newAmong(before, l.networkProblems) {
		if i < mostLines {
			l.log.Info("network problem is over", "reason", p.Reason, "about", p.About)
		}
	}
}

// newAmong are the problems whose subject none of the others has.
func newAmong(problems, others []observe.NetworkProblem) (news []observe.NetworkProblem) {
	known := make(map[string]bool, len(others))
	for _, p := range others {
		known[p.Subject()] = true
	}
	return slices.DeleteFunc(slices.Clone(problems), func(p observe.NetworkProblem) bool { return known[p.Subject()] })
}

// masqueradedFamilies are those that this node's pods have addresses of, and that are masqueraded.
func (c circumstances) masqueradedFamilies() (all []wire.Family) {
	for f := range wire.Families {
		if c.cfg.Masquerade[f] && c.plan.Standing.PodCIDR(f).IsValid() {
			all = append(all, f)
		}
	}
	return all
}

// withoutAddress finds uplinks that have no address of a family that is masqueraded on them.
func (c circumstances) withoutAddress() (found []observe.NetworkProblem) {
	for _, f := range c.masqueradedFamilies() {
		for _, l := range c.view.uplinks {
			v := c.plan.Uplinks[uplinks.Key{Ifindex: l.Index}]
			if !c.view.exits.has(f, int(l.Index)) || v.Addresses[f] != (wire.Addr{}) {
				continue
			}
			lacks, remedy := fmt.Sprintf("uplink %s has no %s address to masquerade to", l.Name, f.Name()), fmt.Sprintf("give %s a global %s address", l.Name, f.Name())
			if a := plan.SnatAddressOf(c.cfg.SnatAddresses, l.Name, f); a.IsValid() {
				lacks = fmt.Sprintf("this node has lost %s, which --snat-address has packets over uplink %s masqueraded to", a, l.Name)
				remedy = fmt.Sprintf("give the node %s, or start the agent with another --snat-address", a)
			}
			found = append(found, observe.NetworkProblem{
				Reason: noUplinkAddress, About: l.Name + " " + f.Name(), Remedy: remedy,
				Text: fmt.Sprintf("%s: pods' %s packets to the world over it are dropped (NO_SNAT_ADDRESS)", lacks, f.Name()),
			})
		}
	}
	return found
}

// uselessAddresses finds addresses of --snat-address that are for an interface that is no uplink.
func (c circumstances) uselessAddresses() (found []observe.NetworkProblem) {
	for _, a := range c.cfg.SnatAddresses {
		if a.Uplink == "" || slices.ContainsFunc(c.view.uplinks, func(l plan.Link) bool { return l.Name == a.Uplink }) {
			continue
		}
		found = append(found, observe.NetworkProblem{
			Reason: noUplinkAddress, About: a.Uplink + " " + a.Addr.String(),
			Text:   fmt.Sprintf("--snat-address names %s for %s, which is no uplink: it is not used", a.Addr, a.Uplink),
			Remedy: "name an uplink, of which ebpfctl status has a list, or start the agent without this address",
		})
	}
	return found
}

// waysPastUplinks finds interfaces without our programs that pods' packets leave by. One that a default route leads over is
// reported once, as that.
func (c circumstances) waysPastUplinks() (found []observe.NetworkProblem) {
	for f := range wire.Families {
		if c.plan.Standing.PodCIDR(f).IsValid() {
			found = append(found, c.defaultsPastUplinks(f)...)
			found = append(found, c.encapsulatedDefaults(f)...)
			if c.cfg.Masquerade[f] {
				found = append(found, c.unmasqueraded(f)...)
				found = append(found, c.singleAddressesPastUplinks(f)...)
				found = append(found, c.encapsulatedParts(f)...)
			}
		}
	}
	return found
}

func (c circumstances) defaultsPastUplinks(f wire.Family) (found []observe.NetworkProblem) {
	for _, index := range c.view.exits.byDefault(f) {
		if l, past := c.isPast(index); past {
			found = append(found, observe.NetworkProblem{
				Reason: defaultRoute, About: l.Name + " " + f.Name(),
				Text: fmt.Sprintf("the %s default route leads over %s, which is no uplink and has no programs: pods' packets to the world leave with pods' addresses, and NodePorts and host ports do not answer there",
					f.Name(), l.Name),
				Remedy: "let the default route lead over an uplink" + c.asUplink(l),
			})
		}
	}
	return found
}

// unmasqueraded finds interfaces without our programs that packets to a part of the world leave by.
func (c circumstances) unmasqueraded(f wire.Family) (found []observe.NetworkProblem) {
	links := c.view.exits[f].links
	for _, index := range slices.Sorted(maps.Keys(links)) {
		l, past := c.isPast(index)
		dst := links[index]
		if !past || !dst.IsValid() || c.staysOnHost(l) || slices.Contains(c.view.exits.byDefault(f), index) {
			continue
		}
		found = append(found, observe.NetworkProblem{
			Reason: unmasqueraded, About: l.Name + " " + f.Name(),
			Text:   fmt.Sprintf("pods' packets to %s leave over %s, which has no programs, with pods' addresses unless netfilter masquerades them: answers may not come back", dst, l.Name),
			Remedy: fmt.Sprintf("let the route lead over an uplink%s; or, if its hosts have a route back to the podCIDRs, add %s to --non-masquerade-cidr", c.asUplink(l), dst),
		})
	}
	return found
}

// asUplink is the part of a remedy that makes an uplink of a link: --uplink names all that the node has. Not every link can be one.
func (c circumstances) asUplink(l device.Link) string {
	if !leadsOut(l) {
		return fmt.Sprintf(" (%s is of a kind that cannot be one)", l.Name)
	}
	names := make([]string, 0, len(c.view.uplinks)+1)
	for _, u := range c.view.uplinks {
		names = append(names, u.Name)
	}
	return ", or make the interface one, together with those of now: --uplink " + strings.Join(append(names, l.Name), ",")
}

// isPast reports whether packets leave by a link without meeting our programs, as far as links are known.
func (c circumstances) isPast(index int) (device.Link, bool) {
	l, known := c.view.links[index]
	ours := !known || l.Loopback() || l.Name == tunnelName || endpoint.IsHostLinkName(l.Name) || slices.Contains(c.cfg.Bridges, l.Name)
	for _, u := range c.view.uplinks {
		ours = ours || int(u.Index) == index
	}
	return l, !ours
}

// staysOnHost reports whether a link leads to other namespaces or guests of this host alone, as a bridge of containers does.
func (c circumstances) staysOnHost(l device.Link) bool {
	within := []string{device.KindBridge, "veth", "dummy", "tun"}
	if l.Kind != device.KindBridge {
		return slices.Contains(within[:3], l.Kind)
	}
	for _, port := range c.view.links {
		if port.Master == l.Index && !slices.Contains(within, port.Kind) {
			return false
		}
	}
	return true
}

// slowPaths finds what has the host's stack decide on every packet's way.
func (c circumstances) slowPaths() []observe.NetworkProblem {
	if c.plan.Config.Flags&config.RoutesToStack == 0 {
		return nil
	}
	why := c.view.stackRoutes()
	return []observe.NetworkProblem{{
		Reason: slowPath, About: why,
		Text:   why + ": pods' packets take the slower way through the host's stack",
		Remedy: "have rules and routes select by source, destination or interface (`ip rule`, `ip route`), and set no mark in pods' packets",
	}}
}

// strayPods finds pods whose addresses of our store lie outside this node's podCIDRs, as after its Node was registered anew.
// Another ipam plugin gives such addresses on purpose.
func (c circumstances) strayPods() []observe.NetworkProblem {
	var names []string
	for _, e := range c.view.endpoints {
		for _, a := range e.Addresses {
			own := c.plan.Standing.PodCIDR(wire.FamilyOf(a))
			if e.IPAM == endpoint.HostLocal && !e.Releasing && own.IsValid() && !own.Contains(a) {
				names = append(names, fmt.Sprintf("%s (%s)", e.Short(), a))
				break
			}
		}
	}
	if len(names) == 0 {
		return nil
	}
	number, pods := len(names), strings.Join(names[:min(len(names), mostLines)], ", ")
	return []observe.NetworkProblem{{
		Reason: podsOutside,
		Text:   fmt.Sprintf("%d pods have addresses outside this node's podCIDRs (%s), as when its Node was registered anew: pods of other nodes do not reach them: %s", number, listOf(c.plan.Standing.Own), pods),
		Remedy: "delete these pods, so that their controllers make new ones",
	}}
}

// ownNode finds that this node is in no list of Nodes. Without a podCIDR it is not ready, which says so.
func (c circumstances) ownNode() []observe.NetworkProblem {
	if !c.known || len(c.plan.Standing.Own) == 0 || c.isNode(c.cfg.Node) {
		return nil
	}
	return []observe.NetworkProblem{{
		Reason: nodeMissing, About: c.cfg.Node,
		Text:   fmt.Sprintf("there is no Node %s: this node's pods keep the podCIDR %s, pods of other nodes do not reach them, and another node may get it", c.cfg.Node, listOf(c.plan.Standing.Own)),
		Remedy: "start the kubelet, which registers the Node, or give the agent the right --node-name",
	}}
}

// forwardDropped finds chains of netfilter by which the host's stack drops packets of pods.
func (c circumstances) forwardDropped() (found []observe.NetworkProblem) {
	for _, d := range c.forwardDrops {
		if d.Policy && c.cfg.ForwardAccept == ForwardAcceptOff {
			d.Remedy = "set --forward-accept=auto, or " + d.Remedy
		}
		found = append(found, observe.NetworkProblem{
			Reason: forwardDrop, About: d.Chain + ": " + d.Rule,
			Text:   fmt.Sprintf("%s: %q drops packets of pods that the host's stack forwards, such as some of those to neighbours that the node does not know yet", d.Chain, d.Rule),
			Remedy: d.Remedy,
		})
	}
	return found
}

// scarcePorts finds that the node has too few ports for all who need some.
func (c circumstances) scarcePorts() []observe.NetworkProblem {
	if c.ports == nil {
		return nil
	}
	return c.ports.problems()
}

// refusedFlows finds limits that have refused flows a moment ago.
func (c circumstances) refusedFlows() (found []observe.NetworkProblem) {
	for _, r := range c.refused {
		found = append(found, r.problem())
	}
	return found
}

// isNode reports whether a Node of that name exists.
func (s *state) isNode(name string) bool {
	return slices.ContainsFunc(s.nodes, func(n plan.Node) bool { return n.Name == name })
}

package agent

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// clusterController owns what the plan says of the cluster: this node's record in
// config, the destinations, and the kernel's routes to pods of other nodes.
type clusterController struct {
	*node
	// entries are what the destinations map contains, routes what the kernel does, as
	// far as they are ours: as found by the newest look, and as written since.
	entries map[destinations.Key]destinations.Value
	routes  map[netip.Prefix]plan.Route
	// entriesBefore and routesBefore are what they were before that look, until what it has not found is written again.
	entriesBefore map[destinations.Key]destinations.Value
	routesBefore  map[netip.Prefix]plan.Route
	// problems are those of the newest plan, and what the kernel refused of it.
	problems []plan.Problem
	reported map[string]bool // problems and notes that the log has
	// stack says why the host's stack decides although the programs could, as last logged: on routes, and on what IPsec
	// policies reach; empty: it does not.
	stack [2]string
}

// found takes what a look has found: the map, and the routes.
func (c *clusterController) found(have map[destinations.Key]destinations.Value, v *view) {
	c.entriesBefore, c.routesBefore = c.entries, c.routes
	c.entries, c.routes = have, v.ownRoutes()
}

// writeConfig writes this node's one record.
func (c *clusterController) writeConfig(s *state) error {
	have, err := c.dp.Maps.Config.Get(config.Key{})
	if err != nil {
		return err
	}
	want := s.plan.Config
	want.Flags |= s.yields.flags()
	if have == want {
		return nil
	}
	known := want
	known.PodCIDRAddresses, known.PodCIDRLens, known.NodeAddresses = have.PodCIDRAddresses, have.PodCIDRLens, have.NodeAddresses
	if known != want {
		for _, own := range s.plan.Standing.Own {
			c.log.Info("this node's podCIDR", "podCIDR", own.String(), "address", want.NodeAddresses[wire.FamilyOf(own.Addr())])
		}
	}
	return c.dp.Maps.Config.Put(config.Key{}, want)
}

// reconcile writes destinations and routes in the order in which packets need
// them: what is new before what is gone. What is gone is removed even if
// something new can't be written: it may be what stands in the way.
func (c *clusterController) reconcile(s *state) error {
	c.problems = slices.Clone(s.plan.Problems)
	err := errors.Join(c.writeAll(s)...)
	c.entriesBefore, c.routesBefore = nil, nil
	c.checkNeighbours(s)
	if err == nil && s.known && s.sourceErr == nil {
		c.status.synced(s.changed, time.Now())
	}
	c.status.describe(s.plan.Standing, c.problems, len(s.nodes))
	c.status.countWays(s.plan.Peers)
	c.report(s)
	c.sayMissing(s.plan)
	c.reportStack(s)
	return err
}

// sayMissing says which family of addresses pods do without although the cluster has it. A node that has no other is not ready.
// There is nothing to try again: it is over when a Node, or the network, has changed.
func (c *clusterController) sayMissing(p plan.Result) {
	var errs []error
	for f, why := range p.Missing {
		if why != "" && p.NotReady == "" {
			errs = append(errs, fmt.Errorf("pods get no %s address: %s", wire.Family(f).Name(), why))
		}
	}
	err := errors.Join(errs...)
	c.complaints.note("cluster/addresses", err)
	c.status.set(func(f *figures) { f.missing = err })
}

// writeAll leaves out the map as long as what is known to be in it is what the plan says.
func (c *clusterController) writeAll(s *state) (errs []error) {
	var fit map[destinations.Key]destinations.Value
	write := s.whole || !s.applied
	if write {
		var left error
		fit, left = c.fit(s)
		errs = append(errs, left, c.writeDestinations(fit))
	}
	errs = append(errs, c.writeRoutes(s))
	if write {
		errs = append(errs, c.deleteOthers(fit))
	}
	if s.known {
		errs = append(errs, c.deleteRoutes(s))
	}
	s.applied = errors.Join(errs...) == nil
	return errs
}

// ofPod says that an entry is of one pod outside the podCIDR: those are written
// by the endpoints' controller, under the endpoint's lock.
func ofPod(k destinations.Key, v destinations.Value) bool {
	return v.Kind == destinations.Local && k.PrefixLen == 128
}

func (c *clusterController) destinations() typed.Sync[destinations.Key, destinations.Value] {
	return typed.Sync[destinations.Key, destinations.Value]{Map: c.dp.Maps.Destinations, Have: c.entries, Same: destinations.Same}
}

// roomForPods is the part of the map that is left to the entries that the plugin adds: one in so many.
const roomForPods = 64

// fit is what the map should contain, and an error that says what it has no room for: what the plan says, and what can't be
// judged. That is anything before there is a list of Nodes, and a pod's entry while some pods' state can't be read.
func (c *clusterController) fit(s *state) (map[destinations.Key]destinations.Value, error) {
	want := maps.Clone(s.plan.Destinations)
	for k, have := range c.entries {
		if _, planned := want[k]; !planned && (!s.known || s.view.incomplete != nil && ofPod(k, have)) {
			want[k] = have
		}
	}
	all := c.dp.Maps.Destinations.MaxEntries()
	fit, left := plan.Fit(want, c.entries, int(all-all/roomForPods))
	if len(left) == 0 {
		return fit, nil
	}
	podCIDRs := 0
	for _, k := range left {
		if want[k].Kind == destinations.PodCIDR {
			podCIDRs++
		}
	}
	return fit, fmt.Errorf("map %s %w (%d entries): without %d podCIDRs and %d addresses of other nodes, so those are treated as the world is: what pods send there is masqueraded",
		destinations.Name, typed.ErrFull, all, podCIDRs, len(left)-podCIDRs)
}

// writeDestinations adds and changes entries, all that it can. Without an essential one no pod is carried as it should be.
func (c *clusterController) writeDestinations(fit map[destinations.Key]destinations.Value) error {
	add := maps.Clone(fit)
	maps.DeleteFunc(add, ofPod)
	lost := c.lostOf(add)
	err := c.destinations().Add(add)
	if errors.Is(err, typed.ErrFull) { // of what is to go; what fails of that is said when it is deleted
		_ = c.deleteOthers(fit)
		err = c.destinations().Add(add)
	}
	failed, some := errors.AsType[typed.Errors[destinations.Key]](err)
	if err == nil && lost > 0 {
		c.status.repaired(repairedDestination, lost)
		c.log.Warn("entries of map destinations restored", "number", lost)
	}
	if !some {
		return hinder(err)
	}
	hindering, others := failed.Split(func(k destinations.Key) bool { return plan.Essential(fit, k) })
	return errors.Join(hinder(hindering), others)
}

// lostOf is how many of the entries were in the map before the newest look, which has not found them as they were.
func (c *clusterController) lostOf(want map[destinations.Key]destinations.Value) (lost int) {
	for k, v := range want {
		before, was := c.entriesBefore[k]
		if have, is := c.entries[k]; was && destinations.Same(before, v) && (!is || !destinations.Same(have, v)) {
			lost++
		}
	}
	return lost
}

// deleteOthers removes what is not to be in the map.
func (c *clusterController) deleteOthers(fit map[destinations.Key]destinations.Value) error {
	return c.destinations().Remove(func(k destinations.Key, _ destinations.Value) bool {
		_, stays := fit[k]
		return stays
	})
}

// ownRoutes is what the kernel has of ours, but for the routes to pods. One over
// a link that the view lacks is of a pod that has come since the links were listed.
func (v *view) ownRoutes() map[netip.Prefix]plan.Route {
	have := map[netip.Prefix]plan.Route{}
	for _, route := range v.routes {
		link, there := v.links[route.Index]
		if route.Protocol != device.Protocol || endpoint.IsHostLinkName(link.Name) || !there && route.Index != 0 {
			continue
		}
		have[route.Dst] = fromKernel(route)
	}
	return have
}

func fromKernel(k device.Route) plan.Route {
	route := plan.Route{Dst: k.Dst}
	if !k.Unreachable {
		route.Via, route.Src, route.Index, route.MTU = k.Gateway, k.Source, uint32(k.Index), uint32(k.MTU)
	}
	return route
}

func toKernel(p plan.Route) device.Route {
	return device.Route{Dst: p.Dst, Index: int(p.Index), Gateway: p.Via, Source: p.Src, MTU: int(p.MTU), Unreachable: p.Index == 0}
}

// writeRoutes adds and changes routes. One of somebody else to the very same
// prefix stays; the pods' packets don't need ours. One that the kernel refuses
// becomes a problem of the node that it leads to, and of no other; but without the
// one to this node's own podCIDR no pod can be carried.
func (c *clusterController) writeRoutes(s *state) (own error) {
	foreign, disputed := s.view.foreignRoutes(), map[string]error{}
	refused := map[netip.Prefix]error{}
	for _, want := range s.plan.Routes {
		have, ok := c.routes[want.Dst]
		if ok && have == want {
			continue
		}
		if protocol, taken := foreign[want.Dst]; taken {
			disputed[want.Dst.String()] = fmt.Errorf("the route is somebody else's (protocol %d) and stays; the host itself may not reach these pods", protocol)
			continue
		}
		err := c.host.ReplaceRoute(toKernel(want))
		switch {
		case err == nil:
			c.routes[want.Dst] = want
			if c.routesBefore[want.Dst] == want {
				c.status.repaired(repairedRoute, 1)
				c.log.Warn("route to other nodes' pods restored", "podCIDR", want.Dst)
			}
		case slices.Contains(s.plan.Standing.Own, want.Dst):
			own = hinder(err)
		default:
			refused[want.Dst] = err
		}
	}
	c.blame(s.plan.Peers, refused)
	for dst, err := range refused { // of nodes that an earlier agent knew
		disputed[dst.String()] = err
	}
	c.complaints.noteEach("cluster/route ", disputed)
	return own
}

// foreignRoutes are the prefixes that have a route of somebody else where ours would
// be, with its protocol.
func (v *view) foreignRoutes() map[netip.Prefix]int {
	foreign := map[netip.Prefix]int{}
	for _, route := range v.routes {
		if route.Protocol != device.Protocol && route.HasUsualPriority() {
			foreign[route.Dst] = route.Protocol
		}
	}
	return foreign
}

// blame turns refused routes into problems of the nodes that they lead to, and
// takes them out of refused.
func (c *clusterController) blame(peers []plan.Peer, refused map[netip.Prefix]error) {
	if len(refused) == 0 {
		return
	}
	for _, peer := range peers {
		for _, p := range peer.PodCIDRs {
			if err := refused[p]; err != nil {
				text := fmt.Sprintf("%v, so this node itself can't reach the pods there by %s", err, peer.Address)
				c.problems = append(c.problems, plan.Problem{Node: peer.Name, Reason: plan.Refused, Text: text})
			}
			delete(refused, p)
		}
	}
}

// deleteRoutes removes the routes of ours that the plan does not have.
func (c *clusterController) deleteRoutes(s *state) error {
	wanted := make(map[netip.Prefix]bool, len(s.plan.Routes))
	for _, route := range s.plan.Routes {
		wanted[route.Dst] = true
	}
	for dst, route := range c.routes {
		if wanted[dst] {
			continue
		}
		if err := c.host.DeleteRoute(toKernel(route)); err != nil {
			return err
		}
		delete(c.routes, dst)
	}
	return nil
}

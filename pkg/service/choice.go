package service

import (
	"cmp"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Target is where an endpoint listens for a port of a Service.
type Target struct {
	Address wire.Addr
	Port    uint16
}

// Compare sorts by address, then by port.
func (t Target) Compare(o Target) int {
	return cmp.Or(slices.Compare(t.Address[:], o.Address[:]), cmp.Compare(t.Port, o.Port))
}

// Backend is an endpoint of a port of a Service. One that is neither in Cluster nor in Local lives but serves no new flow: it
// is not ready, it is terminating, or others are nearer.
type Backend struct {
	Target
	// Cluster and Local are the sets that it is in.
	Cluster, Local bool
	// OnNode says that it runs on a node of the cluster; Answers, that what has begun may go on to it. As kube-proxy has it,
	// no traffic policy, no hint and no end of a pod that still serves matters to that.
	OnNode, Answers bool
}

// candidate is an endpoint as a port of a Service sees it.
type candidate struct {
	Target
	*Endpoint
	local bool
}

// Choose decides which endpoints serve a port of a Service in a family, as kube-proxy does: those that are ready and, if there
// is none, those that still serve while they terminate. The sets Cluster and Local fall back one without the other. Hints
// narrow Cluster only. Local is empty unless a traffic policy asks for it. The result is sorted, each target once.
func Choose(s *Service, p Port, family wire.Family, all mentions, o Options) []Backend {
	candidates := candidatesOf(p, family, all, o.NodeName)
	near := nearness(candidates, o)
	ready := func(c candidate) bool { return c.Ready }
	lastResort := func(c candidate) bool { return !c.Ready && c.Serving && c.Terminating }
	here := func(condition func(candidate) bool) func(candidate) bool {
		return func(c candidate) bool { return c.local && condition(c) }
	}
	inCluster := firstThatAny(candidates, func(c candidate) bool { return c.Ready && near(c) }, lastResort)
	inLocal := firstThatAny(candidates, here(ready), here(lastResort))
	if !s.InternalLocal && !s.ExternalLocal {
		inLocal = never
	}
	chosen := make([]Backend, len(candidates))
	for i, c := range candidates {
		chosen[i] = Backend{Target: c.Target, Cluster: inCluster(c), Local: inLocal(c), OnNode: c.Node != "", Answers: c.Ready || c.Serving}
	}
	return chosen
}

// mention is a slice that has a port, and its number there.
type mention struct {
	*Slice
	port uint16
}

// portID is what a Service's port and a slice's have in common.
type portID struct {
	name     string
	protocol wire.Protocol
}

// mentions are the slices of a Service by the ports that they have.
type mentions map[portID][]mention

func byPort(all []*Slice) mentions {
	of := mentions{}
	for _, s := range all {
		for _, p := range s.Ports {
			if p.Port != 0 {
				id := portID{p.Name, p.Protocol}
				of[id] = append(of[id], mention{s, p.Port})
			}
		}
	}
	return of
}

// of are the slices that have a port of the Service.
func (m mentions) of(p Port) []mention { return m[portID{p.Name, p.Protocol}] }

// candidatesOf lists the endpoints of a port, sorted, each target once.
func candidatesOf(p Port, family wire.Family, all mentions, node string) (candidates []candidate) {
	for _, s := range all.of(p) {
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			if e.Address.IsValid() && wire.FamilyOf(e.Address.Unmap()) == family {
				t := Target{wire.AddrFrom(e.Address), s.port}
				candidates = append(candidates, candidate{t, e, e.Node != "" && e.Node == node})
			}
		}
	}
	slices.SortStableFunc(candidates, func(a, b candidate) int { return cmp.Or(a.Compare(b.Target), b.better(a)) })
	return slices.CompactFunc(candidates, func(a, b candidate) bool { return a.Target == b.Target })
}

// better compares two mentions of one target, as there are while it moves from one slice to another: the one that says more
// good of it counts. Where both say the same, the first slice's does.
func (c candidate) better(o candidate) int {
	return cmp.Or(compareBools(c.local, o.local), compareBools(c.Ready, o.Ready), compareBools(c.Serving, o.Serving),
		compareBools(!c.Terminating, !o.Terminating))
}

func compareBools(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

// nearness says which of the ready endpoints are meant for this node. Hints count only if all of them have one and one of
// them names this node or, failing that, its zone.
func nearness(all []candidate, o Options) func(candidate) bool {
	forNode := func(c candidate) []string { return c.ForNodes }
	forZone := func(c candidate) []string { return c.ForZones }
	switch {
	case hinted(all, forNode, o.NodeName):
		return func(c candidate) bool { return slices.Contains(c.ForNodes, o.NodeName) }
	case hinted(all, forZone, o.Zone):
		return func(c candidate) bool { return slices.Contains(c.ForZones, o.Zone) }
	}
	return func(candidate) bool { return true }
}

func hinted(all []candidate, hints func(candidate) []string, place string) (named bool) {
	if place == "" {
		return false
	}
	for _, c := range all {
		if !c.Ready {
			continue
		}
		if len(hints(c)) == 0 {
			return false
		}
		named = named || slices.Contains(hints(c), place)
	}
	return named
}

// firstThatAny returns the first of the conditions that any candidate meets.
func firstThatAny(all []candidate, conditions ...func(candidate) bool) func(candidate) bool {
	for _, condition := range conditions {
		if slices.ContainsFunc(all, condition) {
			return condition
		}
	}
	return never
}

func never(candidate) bool { return false }

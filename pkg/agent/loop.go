package agent

import (
	"context"
	"slices"
	"time"

	"github.com/gaissmai/bart"

	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
)

const (
	// resync is how often everything is looked at without a reason.
	resync = 28 * time.Second
	// inspectInterval is how often what can vanish without a notice is looked for: pins,
	// attachments, files, sysctls.
	inspectInterval = 700 * time.Millisecond
	// passDelay is how long after a change the next pass begins, minPassInterval the least time between two:
	// changes come in crowds.
	passDelay       = 20 * time.Millisecond
	minPassInterval = 250 * time.Millisecond
	// firstListTimeout is how long the first pass waits for the Nodes, which most often are about to arrive.
	firstListTimeout = 300 * time.Millisecond
	// retry is when what failed is tried again.
	retry = time.Second
)

// loop brings the node to what the Nodes say. It owns the state, the controllers
// and all that they remember: only the goroutine of run changes them, and it waits
// for no lock.
type loop struct {
	*node
	state
	standing  plan.Standing
	published observe.Cluster // what the file for ebpfctl contains
	left      stamp           // of that file, as this agent left it; zero: it has not yet
	content   []byte          // of that file, as this agent wrote it; nil: it has not yet

	cluster    *clusterController
	uplinks    *uplinkController
	tunnel     *tunnelController
	endpoints  *endpointController
	mode       *modeController
	bridge     *bridgeController
	forward    *forwardController
	containers *containerController
	handover   *handover
	services   *serviceController // nil: the programs translate to no backends
	files      *fileController
	sysctls    *sysctls
	refusals   *refusalController
	steps      []step
	errs       []error   // of each step, the newest time it was taken
	failing    time.Time // since when there has always been one; zero: there is none

	networkProblems []observe.NetworkProblem // of the newest diagnosis

	alarm   *alarm
	intent  *intent // of the newest plan
	planned *basis  // what the newest plan was made from; nil: make one
	moved   bool    // netfilter's rules are to be judged by the newest plan
}

// basis is what a plan was made from.
type basis struct {
	facts  plan.Facts
	before plan.Standing
	known  bool
	ranges ranges
}

// run works until ctx ends: after every change of the Nodes and of the network,
// and periodically.
func (l *loop) run(ctx context.Context, nodes *latest) error {
	due := newSchedule(firstListTimeout)
	defer due.timer.Stop()
	tick := time.NewTicker(inspectInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-nodes.news:
			if !l.accept(nodes.take()...) {
				l.judge()
			} else if l.view == nil || l.view.used != l.used() || !l.replan(ctx) {
				due.within(0)
			}
			due.within(l.next)
		case <-l.services.changes():
			if l.view == nil || l.rangesOfServices().equal(l.plannedRanges()) {
				l.judge()
			} else if !l.replan(ctx) {
				due.within(0)
			}
		case <-l.alarm.rings:
			due.called(l.alarm.called())
		case <-tick.C:
			l.status.set(func(f *figures) { f.alive = time.Now() })
			l.followMode(time.Now())
			if l.complaints.hasChanged() || !slices.Equal(l.networkProblems, l.published.NetworkProblems) || !l.isAsLeft() || l.describeAPI() != l.published.APIServer || l.whoServes() != l.published.Services {
				l.judge()
			}
			if l.view != nil && l.inspect(ctx) {
				due.within(max(0, l.next-time.Since(due.ended)))
			}
		case o := <-l.mode.outcomes:
			waited := l.mode.needsBare && !l.mode.bare
			l.mode.changed(ctx, o, time.Now())
			l.judge()
			if due.within(l.next); waited && l.mode.bare {
				due.within(0) // an uplink has been waiting for its programs
			}
		case <-due.timer.C:
			whole := due.begin()
			again := l.passOver(ctx, whole)
			if l.view != nil {
				due.reading = l.view.reading
			}
			due.end(again)
		}
	}
}

// accept takes what the source has said, in that order. It reports whether there are
// new Nodes.
func (l *loop) accept(said ...source.Update) (news bool) {
	for _, u := range said {
		switch {
		case u.Err != nil:
			l.log.Warn("Nodes can't be read; what was known stays", "error", u.Err, "known", l.known)
			if l.sourceErr == nil {
				l.lost = u.Changed
			}
			l.sourceErr = u.Err
			continue
		case l.sourceErr != nil:
			l.log.Info("Nodes can be read again", "nodes", len(u.Nodes), "after", u.Changed.Sub(l.lost).Round(time.Millisecond))
		case !l.known:
			l.log.Info("first complete list of Nodes", "nodes", len(u.Nodes))
		}
		l.nodes, l.known, l.changed, l.sourceErr, news = u.Nodes, true, u.Changed, nil, true
		l.planned = nil
		l.status.pending(u.Changed)
		stays := slices.ContainsFunc(u.Nodes, func(n plan.Node) bool { return n.Name == l.cfg.Node && !n.Leaving })
		l.status.set(func(f *figures) { f.stays = stays })
	}
	l.status.set(func(f *figures) { f.connected = l.known && l.sourceErr == nil })
	return news
}

// pass looks at everything and puts it right. It returns when to do so again.
func (l *loop) pass(ctx context.Context) time.Duration { return l.passOver(ctx, true) }

// passOver is a pass over the whole node, or over what events may have been about: the network, and pods if some were
// about those. It returns when the whole node should be looked at again.
func (l *loop) passOver(ctx context.Context, whole bool) time.Duration {
	started := time.Now()
	called := l.alarm.begin()
	l.whole = whole || l.view == nil
	l.pods = l.whole || called&ofPods != 0 || l.endpoints.changed()
	l.next = resync
	if l.doSteps(ctx, onLook) {
		l.makePlan()
		l.doSteps(ctx, onPass)
	}
	l.judge()
	l.services.locate(&l.state, l.cfg.Node)
	l.status.took(kindPass, started)
	l.log.Debug("pass", "took", time.Since(started), "whole", l.whole, "pods", l.pods, "destinations", len(l.cluster.entries), "routes", len(l.cluster.routes))
	return l.next
}

// replan applies new Nodes to the node as the newest look found it, which is what
// a change of one Node in a large cluster needs to be fast. It reports whether that
// is enough.
func (l *loop) replan(ctx context.Context) bool {
	defer l.status.took(kindReplan, time.Now())
	if !l.knowsRoutes() {
		l.alarm.ring(urgent)
	}
	l.makePlan()
	well := l.doSteps(ctx, onNodes)
	l.judge()
	l.services.locate(&l.state, l.cfg.Node)
	return well
}

// followMode looks at netfilter. What is around its rules is gathered here, where no new Node waits for it.
func (l *loop) followMode(now time.Time) {
	if l.moved {
		l.mode.among(l.cfg.amid(&l.state, l.standing.Own, l.plan.Destinations))
		l.moved = false
	}
	l.mode.follow(now)
	if l.view != nil && l.mode.marked(l.view, now) != l.view.marked {
		l.alarm.ring(urgent)
	}
}

// inspect looks for what can be taken away without a notice and puts it back. It
// reports whether the whole node should be looked at. Pods that come and go are seen here as well.
func (l *loop) inspect(ctx context.Context) bool {
	defer l.status.took(kindInspect, time.Now())
	l.next = resync
	if l.endpoints.changed() {
		l.alarm.ring(casual | ofPods)
	}
	well := l.doSteps(ctx, onTick)
	l.diagnose()
	if l.services != nil && l.services.told.known && l.services.told.yields != l.status.waits() {
		l.services.locate(&l.state, l.cfg.Node)
	}
	return !well || l.next == 0
}

// used are the families that the next look is about.
func (l *loop) used() plan.FamilySet {
	return plan.Used(l.cfg.Node, l.nodes, l.standing, l.sysctls.lacks())
}

// asked are the prefixes whose routes the next plan looks for.
func (l *loop) asked() *bart.Lite {
	return plan.AskedAbout(l.nodes, l.standing, slices.Concat(l.cfg.NonMasquerade, l.cfg.Cluster))
}

// knowsRoutes reports whether the newest look has kept all routes that the next plan looks for.
func (l *loop) knowsRoutes() bool { return l.view.many == nil || l.view.many.covers(l.asked()) }

// look lists what there is, and hands it to the controllers before anything is planned.
func (l *loop) look(s *state) error {
	// The map first, the state files after it: the plugin writes in the other
	// order, so an entry that no file explains belongs to nobody.
	have := l.cluster.entries
	if s.whole {
		var err error
		if have, err = l.dp.Maps.Destinations.Content(); err != nil {
			return err
		}
	}
	known := earlier{pods: l.endpoints.known, asked: l.asked}
	if s.pods {
		known.pods = nil
		l.endpoints.begin()
	}
	if s.view != nil {
		known.many = s.view.many
	}
	v, err := look(l.host, l.cfg, l.used(), known)
	if err != nil {
		return err
	}
	v.lacks = l.sysctls.lacks()
	l.endpoints.known = &v.podView
	l.complaints.note("endpoints/state files", v.incomplete)
	if lasted, incomplete := l.complaints.lasted("endpoints/state files"); incomplete {
		l.lookAgain(backOff(lasted)) // nothing tells when a file is mended
	}
	if err := l.uplinks.complete(v); err != nil {
		return err
	}
	l.tunnel.complete(v)
	l.cluster.found(have, v)
	v.marked = l.mode.marked(v, time.Now())
	s.view = v
	return nil
}

// makePlan plans for the newest look and the newest Nodes, unless the same would come out again.
func (l *loop) makePlan() {
	intentBefore := l.intent
	now := &basis{l.view.facts(), l.standing, l.known, l.rangesOfServices()}
	if p := l.planned; p == nil || p.known != now.known || !p.ranges.equal(now.ranges) || !p.before.Equal(now.before) || !p.facts.Equal(now.facts) {
		l.state.plan = plan.Make(plan.Input{
			Self: l.cfg.Node, Mode: l.cfg.RoutingMode, Known: l.known, Nodes: l.nodes, Facts: now.facts, Before: l.standing,
			SnatAddresses: l.cfg.SnatAddresses,
			MTU:           l.cfg.MTU, Tunnelled: l.network.Backend.Direct, Services: now.ranges.turned, Service: now.ranges.all, Served: now.ranges.served, Native: slices.Concat(l.cfg.NonMasquerade, l.cfg.Cluster),
		})
		l.planned, l.standing, l.intent, l.applied = now, l.plan.Standing, newIntent(l.state.plan), false
		l.moved = true
		if l.view.many == nil || !l.intent.same(intentBefore) { // of very many routes the first ones of a kind change all the time
			defer l.alarm.planned()
		}
	}
	l.alarm.found(newOutline(l.view, l.intent, l.dp.RemovalIsTold() || l.frontends(), l.endpoints.released).withBridges(l.view.bridges, l.cfg.Bridges))
}

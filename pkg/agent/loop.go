package agent

import (
	"context"
	"slices"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
)

const (
	// resync is how often everything is looked at without a reason.
	resync = 15 * time.Second
	// inspectInterval is how often what can vanish without a notice is looked for: pins,
	// attachments, files, sysctls.
	inspectInterval = 400 * time.Millisecond
	// passDelay is how long after a change the next pass begins, minPassInterval the least time between the
	// beginnings of two: changes come in crowds.
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

	cluster   *clusterController
	uplinks   *uplinkController
	endpoints *endpointController
	mode      *modeController
	files     *fileController
	sysctls   sysctls
	steps     []step
	errs      []error   // of each step, the newest time it was taken
	failing   time.Time // since when there has always been one; zero: there is none
}

// run works until ctx ends: after every change of the Nodes and of the network,
// and periodically.
func (l *loop) run(ctx context.Context, nodes *latest, network <-chan struct{}) error {
	var (
		last time.Time
		due  = time.Now().Add(firstListTimeout)
		full = time.NewTimer(firstListTimeout)
		tick = time.NewTicker(inspectInterval)
	)
	defer full.Stop()
	defer tick.Stop()
	// within brings the next pass forward and never puts it off: on a busy network
	// events may never cease.
	within := func(d time.Duration) {
		if at := time.Now().Add(d); at.Before(due) {
			due = at
			full.Reset(d)
		}
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-nodes.news:
			if !l.accept(nodes.take()...) {
				l.judge()
			} else if l.view == nil || !l.replan(ctx) {
				within(0)
			}
			within(l.next)
		case <-network:
			within(max(passDelay, minPassInterval-time.Since(last)))
		case <-tick.C:
			l.status.set(func(f *figures) { f.alive = time.Now() })
			l.mode.follow(time.Now())
			if l.complaints.hasChanged() {
				l.judge()
			}
			if l.view != nil && l.inspect(ctx) {
				within(max(0, l.next-time.Since(last)))
			}
		case o := <-l.mode.outcomes:
			l.mode.changed(ctx, o, time.Now())
			l.judge()
			within(l.next)
		case <-full.C:
			again := l.pass(ctx)
			last = time.Now()
			due = last.Add(again)
			full.Reset(again)
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
		l.status.pending(u.Changed)
	}
	l.status.set(func(f *figures) { f.connected = l.known && l.sourceErr == nil })
	return news
}

// pass looks at everything and puts it right. It returns when to do so again.
func (l *loop) pass(ctx context.Context) time.Duration {
	started := time.Now()
	l.next = resync
	if l.doSteps(ctx, onLook) {
		l.makePlan()
		l.doSteps(ctx, onPass)
	}
	l.judge()
	l.status.took(kindPass, started)
	l.log.Debug("pass", "took", time.Since(started), "destinations", len(l.cluster.applied), "routes", len(l.cluster.routes))
	return l.next
}

// replan applies new Nodes to the node as the newest look found it, which is what
// a change of one Node in a large cluster needs to be fast. It reports whether that
// is enough.
func (l *loop) replan(ctx context.Context) bool {
	defer l.status.took(kindReplan, time.Now())
	l.makePlan()
	well := l.doSteps(ctx, onNodes)
	l.judge()
	return well
}

// inspect looks for what can be taken away without a notice and puts it back. It
// reports whether the whole node should be looked at.
func (l *loop) inspect(ctx context.Context) bool {
	defer l.status.took(kindInspect, time.Now())
	l.next = resync
	return !l.doSteps(ctx, onTick) || l.next == 0
}

// look lists what there is, and hands it to the controllers before anything is planned.
func (l *loop) look(s *state) error {
	// The map first, the state files after it: the plugin writes in the other
	// order, so an entry that no file explains belongs to nobody.
	have, err := l.dp.Maps.Destinations.Content()
	if err != nil {
		return err
	}
	v, err := look(l.host, l.cfg.State, l.cfg.Uplinks)
	if err != nil {
		return err
	}
	l.complaints.note("endpoints/state files", v.incomplete)
	if err := l.uplinks.complete(v); err != nil {
		return err
	}
	l.cluster.found(have, v)
	s.view = v
	return nil
}

func (l *loop) makePlan() {
	l.state.plan = plan.Make(plan.Input{
		Self: l.cfg.Node, Known: l.known, Nodes: l.nodes, Facts: l.view.facts(), Before: l.standing,
		Service: l.cfg.Service, Native: slices.Concat(l.cfg.NonMasquerade, l.cfg.Cluster),
	})
	l.standing = l.plan.Standing
}

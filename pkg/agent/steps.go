package agent

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/datapath"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/guard"
	"github.com/ebpf-cni/ebpf-cni/pkg/lease"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
)

// node is what all controllers work with.
type node struct {
	cfg        Config
	log        *slog.Logger
	host       *device.Handle
	dp         *datapath.Datapath
	api        *source.Servers // nil: Nodes come of a file, or of a registry
	registry   *lease.Registry // nil: they do not come of it
	network    lease.Network   // of the registry
	status     *status
	complaints *complaints
	scrapes    scrapes
	// hostPortsAsked says that a pod had asked for a host port when this agent started.
	hostPortsAsked bool
	// forgone says that programs that serve Services or host ports can't be loaded here, and nobody insists.
	forgone bool
}

// state is what the controllers go by. The loop writes it; they read it.
type state struct {
	nodes     []plan.Node
	known     bool        // a complete list of Nodes has arrived
	changed   time.Time   // when the newest change in it was noticed
	sourceErr error       // why there is no newer list; nil: there is none newer
	lost      time.Time   // since when there has been a sourceErr
	view      *view       // of the newest look that succeeded; nil: none has
	hostPorts hostPorts   // as last seen
	guarded   guard.Ports // that no pod may have as a host port
	ports     *portShares // as last decided; nil: not yet
	refused   []refusal   // the limits that have refused flows a moment ago
	// forwardDrops are chains by which the host's stack drops packets of pods.
	forwardDrops []netfilter.ForwardDrop
	plan         plan.Result
	yields       yields        // to what Services are left
	applied      bool          // destinations and routes have been written as this plan has them
	next         time.Duration // until the next pass over the whole node; steps bring it forward by lookAgain
	// whole says that this pass looks at everything, pods that it looks at pods. Else it goes by what an earlier one found.
	whole, pods bool
}

// lookAgain has the next pass begin within d, at once with 0.
func (s *state) lookAgain(d time.Duration) { s.next = min(s.next, d) }

// occasion is when a step is taken.
type occasion uint

const (
	onLook  occasion = 1 << iota // when a pass begins
	onPass                       // when the node has been looked at and planned for
	onNodes                      // when Nodes have changed, planned for with the view of the newest look
	onTick                       // every inspectInterval
)

// step is a part of what one controller does. Where its error is no obstacle, in full or in part, the node is degraded by it.
type step struct {
	controller string
	when       occasion
	do         func(*state) error
}

func newLoop(n *node, m *modeController, s *sysctls, standing plan.Standing, published observe.Cluster) *loop {
	l := &loop{
		node: n, state: state{next: resync}, standing: standing, published: published, mode: m, sysctls: s,
		cluster:    &clusterController{node: n, reported: map[string]bool{}},
		uplinks:    &uplinkController{node: n, attached: map[uint32]string{}, absences: newAbsences(n.log)},
		tunnel:     &tunnelController{node: n, sysctl: s.Sysctl, mode: m},
		endpoints:  &endpointController{node: n, orphans: newOrphans()},
		files:      &fileController{node: n},
		bridge:     &bridgeController{node: n, mode: m},
		forward:    &forwardController{node: n, said: map[string]bool{}},
		containers: newContainers(n),
		refusals:   &refusalController{node: n},
		alarm:      newAlarm(),
	}
	l.handover = newHandover(n, m, func() bool { return l.services.read().filled })
	room := func(*state) error { return endpoint.HaveRoom(l.cfg.State) }
	// In the order in which packets need them. The list for the runtime comes after all of them: judge.
	l.steps = []step{
		{"network", onLook, l.look}, // which makes the tunnel's device: plans depend on its number
		{"services", onPass | onTick, l.lookAtHostPorts},
		{"tunnel", onPass | onNodes, l.tunnel.configure},
		{"uplinks", onPass, l.uplinks.attach},
		{"bridges", onPass | onNodes, l.containers.attach},
		{"sysctls", onPass | onNodes, l.sysctls.loosen},
		{"mode", onPass | onTick, l.bridge.follow},
		{"forward", onPass | onTick, l.forward.follow},
		{"services", onPass | onTick, l.handover.follow},
		{"cluster", onPass | onNodes, vital(l.cluster.writeConfig)},
		{"services", onTick, vital(l.cluster.writeConfig)}, // of which who serves is a part
		{"uplinks", onPass | onNodes, l.uplinks.writeAddresses},
		{"cluster", onPass | onNodes, l.cluster.reconcile}, // what is new before what is gone
		{"sysctls", onPass, vital(l.sysctls.forward)},      // of pods' links as well
		{"sysctls", onPass, l.sysctls.route},
		{"endpoints", onPass, l.endpoints.reconcile},
		{"uplinks", onPass, l.uplinks.detach},
		{"bridges", onPass, l.containers.detach},
		{"sysctls", onPass | onTick, func(s *state) error { return l.sysctls.inspect(s, l.services.read().nodePorts, &s.hostPorts.numbers) }},
		{"mode", onPass | onTick, l.mode.share},
		{"flows", onPass | onTick, l.refusals.look}, // from the first pass on: what is refused later is news
		{"files", onPass, vital(l.files.installPlugin)},
		{"files", onPass | onTick, vital(room)},

		{"pins", onTick, vital(l.restorePins)},
		{"uplinks", onTick, l.uplinks.inspect},
		{"bridges", onTick, l.containers.inspect},
		{"services", onPass | onTick, l.attachSockets},
		{"services", onTick, l.inspectWorld},
		{"tunnel", onTick, l.tunnel.inspect},
		{"files", onTick, vital(l.files.inspect)},
		{"endpoints", onTick, l.endpoints.inspect},
	}
	l.errs = make([]error, len(l.steps))
	return l
}

// vital is a step without which no pod can be carried.
func vital(do func(*state) error) func(*state) error {
	return func(s *state) error { return hinder(do(s)) }
}

func (l *loop) restorePins(*state) error {
	restored, err := l.dp.RestorePins()
	l.status.repaired(repairedPin, len(restored))
	for _, path := range restored {
		l.log.Warn("pin restored", "path", path)
	}
	return err
}

// doSteps takes the steps of an occasion: one that fails keeps no other from its work,
// and is soon tried again. It reports whether none has failed.
func (l *loop) doSteps(ctx context.Context, when occasion) bool {
	well := true
	for i := range l.steps {
		if s := l.steps[i]; s.when&when != 0 {
			l.errs[i] = explainFiles(s.do(&l.state))
			well = well && l.errs[i] == nil
		}
	}
	if ctx.Err() == nil {
		failed, noted := l.failures(onLook|onPass|onTick), map[string]bool{}
		for _, s := range l.steps {
			if s.when&when != 0 && !noted[s.controller] {
				noted[s.controller] = true
				l.complaints.note(s.controller+"/pass", failed[s.controller])
			}
		}
	}
	if pause := l.pause(time.Now()); !well {
		l.lookAgain(pause)
	}
	return well
}

// pause is how long to wait before what has failed is tried again: a second while no pod can be carried, otherwise for as
// long as it has been failing. A look at a large node costs more than most failures do.
func (l *loop) pause(now time.Time) time.Duration {
	err := errors.Join(l.errs...)
	switch {
	case err == nil:
		l.failing = time.Time{}
	case l.failing.IsZero():
		l.failing = now
	}
	if obstacles(err) != nil {
		return retry
	}
	return backOff(now.Sub(l.failing))
}

// backOff is when what has been failing for that long, and keeps no pod from being carried but its own, is tried again.
func backOff(failing time.Duration) time.Duration { return min(max(retry, failing), resync) }

// failures are the controllers that have failed at an occasion, with why: once, if several steps say the same.
func (l *loop) failures(when occasion) map[string]error {
	failed, said := map[string]error{}, map[[2]string]bool{}
	for i, s := range l.steps {
		if s.when&when == 0 || l.errs[i] == nil {
			continue
		}
		if what := [2]string{s.controller, l.errs[i].Error()}; !said[what] {
			said[what] = true
			failed[s.controller] = errors.Join(failed[s.controller], l.errs[i])
		}
	}
	return failed
}

// obstacle is why this node can't carry a pod; empty: it can.
func (l *loop) obstacle() string {
	switch {
	case !l.known && l.sourceErr != nil:
		return enumerate([]string{"no list of Nodes: " + l.sourceErr.Error()})
	case !l.known:
		return "no complete list of Nodes yet"
	case l.view == nil:
		return enumerate(append([]string{"the node has not been looked at yet"}, causes(l.failures(onLook))...))
	case l.plan.NotReady != "":
		return enumerate([]string{l.plan.NotReady})
	case l.services.obstacle() != "":
		return l.services.obstacle()
	}
	failed := l.failures(onLook | onPass | onTick)
	for controller, err := range failed {
		failed[controller] = obstacles(err)
	}
	return enumerate(causes(failed))
}

// causes are the parts of errors, with the controllers that have them, in order.
func causes(failed map[string]error) (lines []string) {
	for controller, err := range failed {
		if err == nil {
			continue
		}
		for line := range strings.Lines(err.Error()) {
			lines = append(lines, controller+": "+line)
		}
	}
	slices.Sort(lines)
	return slices.Compact(lines)
}

// judge decides whether this node can carry a pod, and says so to the runtime when
// it can, and to people.
func (l *loop) judge() {
	why := l.obstacle()
	if why == "" {
		if err := l.files.publish(&l.state); err != nil {
			why = enumerate([]string{"files: " + err.Error()})
			l.lookAgain(retry)
		}
	}
	l.diagnose()
	degraded := l.complaints.degraded()
	if l.known && l.sourceErr != nil {
		degraded[observe.AboutNodes] = "they can't be read, and what was known of them stays in force: " + l.sourceErr.Error()
	}
	l.status.set(func(f *figures) { f.degraded = controllersOf(degraded) })
	l.status.setNotReady(why)
	l.complaints.note("files/for ebpfctl", l.publish(why, degraded)) // no packet and no pod depends on it
}

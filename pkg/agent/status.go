package agent

import (
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/pkg/health"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// status is what the agent says of itself. Every goroutine may ask; the loop's sets it.
type status struct {
	log    *slog.Logger
	notify string // socket of the service manager that waits until the node is ready; empty: none
	activity

	mu  sync.Mutex
	now figures
}

// figures are a status at one moment.
type figures struct {
	alive    time.Time           // when the loop last went round
	notReady string              // empty: ready
	missing  error               // which family of addresses pods do without; nil: none
	nodes    int                 // in the list of Nodes
	problems map[plan.Reason]int // never changed once it is set
	// networkProblems are what diagnose has found; never changed once it is set.
	networkProblems []observe.NetworkProblem
	ways            map[destinations.Way]int // of nodes with podCIDRs; likewise
	own             []netip.Prefix           // this node's podCIDRs; likewise
	pods            []netip.Prefix           // all podCIDRs; likewise
	waiting         time.Time                // since when Nodes wait to be applied; zero: none do
	lag             time.Duration            // from the newest change of Nodes that was applied until it was
	conflicts       int                      // endpoints whose address somebody else has
	netfilter       netfilter.Level          // whose packets it may translate, as the programs have it
	degraded        map[string]bool          // of each controller; never changed once it is set
	connected       bool                     // the source of Nodes has delivered them, and answers
	heard           time.Time                // when it last said anything
	lastSync        time.Time                // when the packets' way last agreed with all Nodes; zero: not by this agent
	services        serviceReport            // of the Services that are served
	inStep          time.Time                // when nothing of what is known of Services waited to be written
	stays           bool                     // this node's Node is there, and nobody is about to delete it, as far as is known
	yields          yields                   // to what Services are left
	served          time.Time                // with --services auto: since when the programs have served them; counts while they do
	left            []string                 // our listeners whose ports kube-proxy has; never changed once it is set
}

// starting is why an agent is not ready before it has looked at anything.
const starting = "the agent is starting"

func newStatus(log *slog.Logger) *status {
	return &status{log: log, activity: newActivity(), now: figures{notReady: starting, alive: time.Now(), degraded: controllersOf(nil), stays: true}}
}

func (s *status) read() figures {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now
}

func (s *status) set(change func(*figures)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.now)
}

// setNotReady sets why the node is not ready; empty: it is.
func (s *status) setNotReady(why string) {
	before := s.reason()
	s.set(func(f *figures) { f.notReady = why })
	switch why {
	case before:
	case "":
		s.log.Info("ready")
		if err := notifyReady(s.notify); err != nil {
			s.log.Warn("what waits for this agent is not told that the node is ready", "error", err)
		}
	default:
		s.log.Warn("not ready", "reason", why)
	}
}

func (s *status) isReady() bool { return s.reason() == "" }

func (s *status) reason() string { return s.read().notReady }

// pending notes that Nodes changed at that time.
func (s *status) pending(changed time.Time) {
	s.set(func(f *figures) {
		if f.waiting.IsZero() {
			f.waiting = changed
		}
	})
}

// synced notes that the Nodes of that change are in the packets' way.
func (s *status) synced(changed, now time.Time) {
	s.set(func(f *figures) {
		if !f.waiting.IsZero() {
			f.lag, f.waiting = now.Sub(changed), time.Time{}
		}
		f.lastSync = now
	})
}

// syncLag is how long the newest change took to arrive in the packets' way, or
// how long one has been waiting for that already.
func (f figures) syncLag(now time.Time) time.Duration {
	if !f.waiting.IsZero() {
		return now.Sub(f.waiting)
	}
	return f.lag
}

// describe notes what is known of the cluster: podCIDRs, problems, the number of Nodes.
func (s *status) describe(standing plan.Standing, found []plan.Problem, nodes int) {
	problems := map[plan.Reason]int{}
	for _, p := range found {
		problems[p.Reason]++
	}
	pods := slices.Clone(standing.Own)
	for p := range standing.Claims {
		pods = append(pods, p)
	}
	s.set(func(f *figures) { f.nodes, f.problems, f.own, f.pods = nodes, problems, standing.Own, pods })
}

// countWays notes how the pods of other nodes are reached.
func (s *status) countWays(peers []plan.Peer) {
	ways := map[destinations.Way]int{}
	for _, p := range peers {
		if len(p.PodCIDRs) > 0 {
			ways[p.Way]++
		}
	}
	s.set(func(f *figures) { f.ways = ways })
}

// leaves says whether a port is left to kube-proxy until then: only while one may run.
func (s *status) leaves(until time.Time) bool {
	return time.Now().Before(until) && s.read().netfilter == netfilter.Translates
}

// waits says whether the ports on which kube-proxy answers are not ours: one serves, or may be about to.
func (s *status) waits() bool {
	f := s.read()
	return f.yields.any() || time.Since(f.served) < settle
}

// leave notes whether a listener's port is left to kube-proxy. It reports whether that is new.
func (s *status) leave(address string, leaves bool) (changed bool) {
	s.set(func(f *figures) {
		if changed = slices.Contains(f.left, address) != leaves; !changed {
			return
		}
		f.left = slices.DeleteFunc(slices.Clone(f.left), func(other string) bool { return other == address })
		if leaves {
			f.left = append(f.left, address)
			slices.Sort(f.left)
		}
	})
	return changed
}

// maxBehind is for how long changes of Services may wait until the node counts as unhealthy, as kube-proxy has it.
const maxBehind = time.Minute

// health is what kube-proxy would say of this node.
func (s *status) health() health.State {
	f := s.read()
	return health.State{Healthy: f.services.filled && time.Since(f.inStep) < maxBehind, Updated: f.inStep, Eligible: f.stays}
}

// isPod reports whether an address is a pod's, of this node or another.
func (s *status) isPod(a netip.Addr) bool {
	return slices.ContainsFunc(s.read().pods, func(p netip.Prefix) bool { return p.Contains(a) })
}

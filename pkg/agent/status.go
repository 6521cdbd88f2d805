package agent

import (
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// status is what the agent says of itself. Every goroutine may ask.
type status struct {
	log *slog.Logger

	mu        sync.Mutex
	alive     time.Time // when the loop last went round
	set       bool      // whether notReady was ever set
	notReady  string    // empty: ready
	nodes     int
	problems  map[problem]int
	pods      []netip.Prefix // all podCIDRs
	waiting   time.Time      // since when Nodes wait to be applied; zero: none do
	lag       time.Duration
	conflicts int  // endpoints whose address somebody else has
	beside    bool // the programs work beside netfilter's translation
}

type problem struct {
	node   string
	reason plan.Reason
}

// starting is why an agent is not ready before it has looked at anything.
const starting = "the agent is starting"

func newStatus(log *slog.Logger) *status {
	return &status{log: log, notReady: starting, alive: time.Now()}
}

// stuck is for how long the reconciler may be silent.
const stuck = time.Minute

// beat notes that the reconciler goes on.
func (s *status) beat(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.alive = now
}

// silence is for how long the reconciler has not gone on.
func (s *status) silence(now time.Time) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return now.Sub(s.alive)
}

// ready sets why the node is not ready; empty: it is.
func (s *status) ready(why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.set && s.notReady == why {
		return
	}
	s.set, s.notReady = true, why
	if why == "" {
		s.log.Info("ready")
	} else {
		s.log.Warn("not ready", "reason", why)
	}
}

func (s *status) isReady() bool { return s.reason() == "" }

func (s *status) reason() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.notReady
}

// besideNetfilter notes whether the programs work beside netfilter's translation.
func (s *status) besideNetfilter(beside bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.beside = beside
}

func (s *status) isBeside() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.beside
}

// setConflicts notes how many endpoints there are whose address somebody else has.
func (s *status) setConflicts(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conflicts = n
}

func (s *status) conflictCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conflicts
}

// pending notes that Nodes changed at that time.
func (s *status) pending(changed time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting.IsZero() {
		s.waiting = changed
	}
}

// synced notes that the Nodes of that change are in the packets' way.
func (s *status) synced(changed, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.waiting.IsZero() {
		s.lag, s.waiting = now.Sub(changed), time.Time{}
	}
}

// syncLag is how long the newest change took to arrive in the packets' way, or
// how long one has been waiting for that already.
func (s *status) syncLag(now time.Time) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.waiting.IsZero() {
		return now.Sub(s.waiting)
	}
	return s.lag
}

// describe notes what is known of the cluster: podCIDRs, problems, the number of Nodes.
func (s *status) describe(standing plan.Standing, found []plan.Problem, nodes int) {
	problems := map[problem]int{}
	for _, p := range found {
		problems[problem{p.Node, p.Reason}]++
	}
	pods := slices.Clone(standing.Own)
	for p := range standing.Claims {
		pods = append(pods, p)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.nodes, s.problems, s.pods = nodes, problems, pods
}

// isPod tells whether an address is a pod's, of this node or another.
func (s *status) isPod(a netip.Addr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.pods, func(p netip.Prefix) bool { return p.Contains(a) })
}

// counts returns the number of nodes, and the problems.
func (s *status) counts() (nodes int, problems map[problem]int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.nodes, maps.Clone(s.problems)
}

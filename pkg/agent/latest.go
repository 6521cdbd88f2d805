package agent

import (
	"sync"

	"github.com/ebpf-cni/ebpf-cni/pkg/source"
)

// latest keeps what the source has said until the loop takes it: of the Nodes only the newest state, since each is
// complete. So thousands that come at once cost as many plans as there is time for, and the source never waits.
type latest struct {
	news chan struct{} // readable while something waits

	mu           sync.Mutex
	nodes, fault *source.Update // nil: none waits; the fault came after the Nodes
}

func newLatest() *latest { return &latest{news: make(chan struct{}, 1)} }

// put takes what the source says.
func (l *latest) put(u source.Update) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if u.Err != nil {
		l.fault = &u
	} else {
		// The change that has waited longest says how late the state is.
		if l.nodes != nil {
			u.Changed = l.nodes.Changed
		}
		l.nodes, l.fault = &u, nil
	}
	select {
	case l.news <- struct{}{}:
	default:
	}
}

// take returns what has waited, in the order in which it came.
func (l *latest) take() (all []source.Update) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, u := range []*source.Update{l.nodes, l.fault} {
		if u != nil {
			all = append(all, *u)
		}
	}
	l.nodes, l.fault = nil, nil
	return all
}

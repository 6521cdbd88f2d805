package agent

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
)

const (
	// refusalsInterval is how often the counters of refused flows are read.
	refusalsInterval = 10 * time.Second
	// refusalsLast is how long a counter must not have grown until its limit is no problem any more.
	refusalsLast = 3 * time.Minute
)

// refusal is a limit that refuses flows: those of this node's pods and own processes, or those of clients outside.
type refusal struct {
	reason  drops.Reason
	outside bool
}

// morePorts is how a node gets more ports to masquerade to.
const morePorts = "--snat-ports auto gives all ports that the node can spare, and a smaller " + ephemeralName + " spares more"

// refusedFor says of each reason what is used up, and what mends it.
var refusedFor = map[drops.Reason]struct{ problem, lack, remedy string }{
	drops.PortLimit: {
		portLimit, "%s has used up its share of the ports towards one destination",
		morePorts,
	},
	drops.SnatLimit: {snatLimit, "%s has used up its share of the flow table", "a larger --snat-entries gives larger shares"},
	drops.SnatExhausted: {
		snatExhausted, "no port towards one destination is left to %s",
		morePorts + ", unless the problem " + snatPortsReduced + " says what takes them",
	},
}

func (r refusal) problem() observe.NetworkProblem {
	of, whose, holder := refusedFor[r.reason], "pods", "a pod"
	if r.outside {
		whose, holder = "clients outside", "a client outside, or all of them together,"
	}
	return observe.NetworkProblem{
		Reason: of.problem, About: whose,
		Text:   fmt.Sprintf("new flows of %s have been refused within the last %.0f minutes (%s): "+of.lack, whose, refusalsLast.Minutes(), r.reason, holder),
		Remedy: of.remedy + "; ebpfctl dump snat shows whose the flows are",
	}
}

// refusalController finds which limits refuse flows. The counters outlive agents: what is in them at first was there before.
type refusalController struct {
	*node
	read   time.Time // when the counters were last read
	counts map[refusal]uint64
	grown  map[refusal]time.Time // when they were last found to have grown
}

// look reads the counters now and then.
func (c *refusalController) look(s *state) error {
	now := c.complaints.now()
	if now.Sub(c.read) < refusalsInterval {
		return nil
	}
	counted, err := c.dp.Maps.Drops.All()
	if err != nil {
		return err
	}
	s.refused = c.note(now, counted)
	return nil
}

// note takes what the counters are now, and returns which limits are a problem.
func (c *refusalController) note(now time.Time, counted []drops.Counter) []refusal {
	counts := map[refusal]uint64{}
	for _, d := range counted {
		if _, limit := refusedFor[d.Slot]; limit {
			counts[refusal{d.Slot, d.Direction == wire.FromUplink || d.Direction == wire.FromTunnel}] += d.Packets
		}
	}
	if c.counts == nil {
		c.counts, c.grown = counts, map[refusal]time.Time{}
	}
	for r, n := range counts {
		if n > c.counts[r] {
			c.grown[r] = now
		}
	}
	maps.DeleteFunc(c.grown, func(_ refusal, at time.Time) bool { return now.Sub(at) >= refusalsLast })
	c.counts, c.read = counts, now
	return slices.SortedFunc(maps.Keys(c.grown), func(a, b refusal) int {
		return strings.Compare(a.problem().Subject(), b.problem().Subject())
	})
}

package e2e

import (
	"flag"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// traffic is everything that a pod can be in the middle of.
type traffic struct {
	streams []*numbered
	steady  *steadyFlows
	tcp     []*connections
}

// startTraffic has a pod talk to each of the others: in one direction without waiting, in both directions, and by TCP.
func startTraffic(t *testing.T, from *lab.Pod, to ...*lab.Namespace) *traffic {
	t.Helper()
	tr := &traffic{}
	var targets []netip.AddrPort
	for _, other := range to {
		at := serve(t, other)
		assertReaches(t, from.Namespace, at, seenAs(from, other))
		targets = append(targets, at)
		tr.tcp = append(tr.tcp, connect(t, from.Namespace, at, 1, 3))
	}
	for _, other := range to {
		tr.streams = append(tr.streams, startNumbered(t, from.Netns()+" > "+other.Netns(), from.Namespace, other))
	}
	tr.steady = startSteadyFlows(t, from.Namespace, targets...)
	return tr
}

// seenAs is the address under which a pod shows itself to another party.
func seenAs(from *lab.Pod, to *lab.Namespace) netip.Addr {
	if to.Addr() == lab.OutsideAddr[wire.FamilyOf(to.Addr())] {
		return from.Node.Addr()
	}
	return from.Addr()
}

// end ends the traffic, of which nothing may have been lost.
func (tr *traffic) end(t *testing.T) {
	t.Helper()
	for _, stream := range tr.streams {
		stream.end(t)
	}
	for _, c := range tr.tcp {
		c.assertAlive(t, "in the end")
	}
	tr.steady.end(t)
}

var kills = flag.Int("kills", 0, "points of its start at which the agent is killed; default 4, or 8 in the long form")

// The agent is killed in the middle of its work, and at any point of its start.
func TestLifeKilledAgentLosesNoPacket(t *testing.T) {
	t.Parallel()
	forEachAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 2, AgentFlags: []string{attach}})
		node := l.Nodes[0]
		a, near, far := addPod(t, node, "a"), addPod(t, node, "near"), addPod(t, l.Nodes[1], "far")
		tr := startTraffic(t, a, near.Namespace, far.Namespace, node.Namespace, l.Outside)
		tr.streams = append(tr.streams, startNumbered(t, "far > a", far.Namespace, a.Namespace))
		whole := startAfterKill(t, node)
		points := killPoints()
		for i := range points {
			if err := node.KillAgent(); err != nil {
				t.Fatal(err)
			}
			if err := node.StartAgent(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(whole * time.Duration(i) / time.Duration(points)) // when it dies is the point of the test
		}
		startAfterKill(t, node)
		assertOnlyPinned(t, node, "in the end")
		tr.end(t)
		for _, pod := range []*lab.Pod{a, near} {
			if err := pod.Check(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
}

func killPoints() int {
	switch {
	case *kills > 0:
		return *kills
	case priv.Long():
		return 8
	}
	return 4
}

// startAfterKill kills the agent, starts it and says how long it took to be ready.
func startAfterKill(t *testing.T, node *lab.Node) time.Duration {
	t.Helper()
	if err := node.KillAgent(); err != nil {
		t.Fatal(err)
	}
	started := time.Now()
	if err := node.StartAgent(); err != nil {
		t.Fatal(err)
	}
	if err := node.WaitReady(within(t, readyLimit)); err != nil {
		t.Fatal(err)
	}
	return time.Since(started)
}

// The way of attaching changes under connections. That the kernel silences an interface for some milliseconds while it
// adds or removes a clsact qdisc is not in our hands, so packets are not counted here.
func TestLifeAttachChanges(t *testing.T) {
	t.Parallel()
	priv.NeedTCX(t)
	l := startCluster(t, lab.Options{Nodes: 2, AgentFlags: []string{"--attach=tcx"}})
	node := l.Nodes[0]
	a, far := addPod(t, node, "a"), addPod(t, l.Nodes[1], "far")
	all := []*connections{
		connect(t, a.Namespace, serve(t, far.Namespace), 1, 3), connect(t, a.Namespace, serve(t, l.Outside), 1, 3), connect(t, far.Namespace, serve(t, a.Namespace), 1, 3),
	}
	for _, flag := range []string{"--attach=clsact", "--attach=auto"} {
		// Killed once on the way.
		for _, age := range []time.Duration{400 * time.Millisecond, 0} {
			if err := node.KillAgent(); err != nil {
				t.Fatal(err)
			}
			if err := node.StartAgent(flag); err != nil {
				t.Fatal(err)
			}
			time.Sleep(age)
		}
		if err := node.WaitReady(within(t, readyLimit)); err != nil {
			t.Fatal(err)
		}
		assertOnlyPinned(t, node, flag)
		for _, c := range all {
			c.assertAlive(t, flag)
		}
		pod := addPod(t, node, "new"+flag[len("--attach="):])
		assertReaches(t, pod.Namespace, serve(t, far.Namespace), pod.Addr())
		assertReaches(t, pod.Namespace, serve(t, l.Outside), node.Addr())
	}
}

// SIGTERM ends the agent within a second, and nothing of the dataplane with it.
func TestLifeStoppedAgentTouchesNothing(t *testing.T) {
	t.Parallel()
	forEachAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 2, AgentFlags: []string{attach}})
		node := l.Nodes[0]
		a, far := addPod(t, node, "a"), addPod(t, l.Nodes[1], "far")
		assertOnlyPinned(t, node, "before the stop")
		before, was := inventory(t, node), objects(t, node)
		if _, err := node.StopAgent(); err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff(was, objects(t, node)); diff != "" {
			t.Errorf("the end of the agent changed programs, links or maps:\n%s", diff)
		}
		if diff := cmp.Diff(before, inventory(t, node)); diff != "" {
			t.Errorf("the end of the agent changed the node:\n%s", diff)
		}
		assertReaches(t, a.Namespace, serve(t, far.Namespace), a.Addr())
		assertReaches(t, a.Namespace, serve(t, l.Outside), node.Addr())

		// Its next start changes the programs alone.
		startAgain(t, node)
		if diff := cmp.Diff(before, inventory(t, node)); diff != "" {
			t.Errorf("the start of the agent changed the node:\n%s", diff)
		}
		assertOnlyPinned(t, node, "after the start")
		assertStops(t, node)
	})
}

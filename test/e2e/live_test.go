package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// steadyFlows are UDP flows that exchange a datagram every two paces: a single one that is lost shows, as it is never answered.
type steadyFlows struct {
	stop      context.CancelFunc
	all       sync.WaitGroup
	exchanged atomic.Int64
	mu        sync.Mutex
	lost      []error
}

func startSteadyFlows(t *testing.T, from *lab.Namespace, to ...netip.AddrPort) *steadyFlows {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	f := &steadyFlows{stop: stop}
	for _, at := range to {
		conn, err := from.DialUDP(at, 0)
		if err != nil {
			t.Fatal(err)
		}
		f.all.Go(func() {
			defer conn.Close()
			tick := time.NewTicker(2 * *pace)
			defer tick.Stop()
			for ctx.Err() == nil {
				limited, cancel := context.WithTimeout(context.Background(), priv.Patience(answerLimit))
				_, err := conn.Echo(limited, 200)
				cancel()
				if err != nil {
					f.mu.Lock()
					f.lost = append(f.lost, fmt.Errorf("%s: %w", time.Now().Format("15:04:05.000"), err))
					f.mu.Unlock()
				}
				f.exchanged.Add(1)
				<-tick.C
			}
		})
	}
	t.Cleanup(func() { stop(); f.all.Wait() })
	return f
}

// end stops the flows; losses are errors.
func (f *steadyFlows) end(t *testing.T) {
	t.Helper()
	f.stop()
	f.all.Wait()
	if err := errors.Join(f.lost...); err != nil {
		t.Errorf("%d of %d exchanges were lost:\n%v", len(f.lost), f.exchanged.Load(), err)
	}
	if f.exchanged.Load() < 100 {
		t.Errorf("only %d exchanges: this shows nothing", f.exchanged.Load())
	}
}

func TestPodsDoNotNeedTheAgent(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 2, AgentFlags: []string{attach}})
		node := l.Nodes[0]
		a, near, far := addPod(t, node, "a"), addPod(t, node, "near"), addPod(t, l.Nodes[1], "far")
		targets := []netip.AddrPort{
			serve(t, near.Namespace), serve(t, far.Namespace), serve(t, node.Namespace), serve(t, l.Outside),
		}
		flows := startSteadyFlows(t, a.Namespace, targets...)

		if err := node.KillAgent(); err != nil {
			t.Fatal(err)
		}
		born := addPod(t, node, "born") // without an agent
		for _, at := range targets[:3] {
			assertReaches(t, born.Namespace, at, born.Addr())
		}
		assertReaches(t, born.Namespace, targets[3], node.Addr())
		if err := born.Check(t.Context()); err != nil {
			t.Error(err)
		}
		if err := node.DelPod(t.Context(), born); err != nil {
			t.Error(err)
		}

		startAgainAndStop(t, node)
		startAgainAndStop(t, node)
		for _, at := range targets[:3] {
			assertReaches(t, a.Namespace, at, a.Addr())
		}
		flows.end(t)
	})
}

// startAgainAndStop brings the agent back and ends it with SIGTERM.
func startAgainAndStop(t *testing.T, node *lab.Node) {
	t.Helper()
	startAgain(t, node)
	assertStops(t, node)
}

func startAgain(t *testing.T, node *lab.Node, flags ...string) {
	t.Helper()
	if err := node.StartAgent(flags...); err != nil {
		t.Fatal(err)
	}
	if err := node.WaitReady(within(t, readyLimit)); err != nil {
		t.Fatal(err)
	}
}

// assertStops ends the agent with SIGTERM, which must take less than a second: in one of three tries, as the computer may
// have been busy with something else.
func assertStops(t *testing.T, node *lab.Node) {
	t.Helper()
	var all []time.Duration
	for {
		took, err := node.StopAgent()
		if err != nil {
			t.Error(err)
			return
		}
		limit := priv.Patience(time.Second)
		if took <= limit {
			return
		}
		if all = append(all, took.Round(time.Millisecond)); len(all) == 3 {
			t.Errorf("SIGTERM: the agent took %v, want at most %v", all, limit)
			return
		}
		startAgain(t, node)
	}
}

func TestPodsOfANodeThatGoesAndReturns(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 2})
	a, far := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[1], "far")
	at := serve(t, far.Namespace)
	assertReaches(t, a.Namespace, at, a.Addr())

	specs := l.NodeSpecs()
	if err := l.WriteNodes(specs[0]); err != nil {
		t.Fatal(err)
	}
	eventually(t, 5*time.Second, "a node that is gone is not reached", func() bool {
		_, err := a.Ping(within(t, 100*time.Millisecond), far.Addr(), lab.PingOptions{})
		return err != nil
	})
	if err := l.WriteNodes(specs...); err != nil {
		t.Fatal(err)
	}
	eventually(t, 5*time.Second, "a node that is back is reached", func() bool {
		_, err := a.Ping(within(t, 100*time.Millisecond), far.Addr(), lab.PingOptions{})
		return err == nil
	})
	assertReaches(t, a.Namespace, at, a.Addr())
}

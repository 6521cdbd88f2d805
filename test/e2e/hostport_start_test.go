package e2e

import (
	"context"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// servesHostPorts says whether a node's programs do, as the plugin asks.
func servesHostPorts(t *testing.T, node *lab.Node) bool {
	t.Helper()
	m, err := config.Open(bpffs.Dir(node.BPFFS()).Map(config.Name))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	v, err := m.Get(config.Key{})
	return err == nil && v.Flags&config.Services != 0
}

// away asks the agent whether it is ready until done is closed, and returns between which two it was not, and for how long it did not
// answer at all.
func away(ctx context.Context, node *lab.Node, done <-chan struct{}) (notReady, silent time.Duration) {
	last := time.Now()
	for {
		status, _, err := node.HTTPGet(ctx, "/readyz")
		took := time.Since(last)
		last = time.Now()
		if err != nil {
			silent += took
		}
		if err != nil || status != http.StatusOK {
			notReady += took
		}
		select {
		case <-done:
			return notReady, silent
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// The first host port has the agent start anew within its process. Connections live on, and the runtime keeps its list. As pods' links get
// a clsact qdisc, which silences them for a moment, packets are not counted here.
func TestFirstHostPortStartsAnew(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 2})
	node := l.Nodes[0]
	a, near, far := addPod(t, node, "a"), addPod(t, node, "near"), addPod(t, l.Nodes[1], "far")
	all := []*connections{
		connect(t, a.Namespace, serve(t, near.Namespace), 1, 3), connect(t, a.Namespace, serve(t, far.Namespace), 1, 3), connect(t, a.Namespace, serve(t, node.Namespace), 1, 3),
		connect(t, a.Namespace, serve(t, l.Outside), 1, 3), connect(t, far.Namespace, serve(t, a.Namespace), 1, 3),
	}
	before, err := os.Stat(node.Conflist())
	if err != nil {
		t.Fatal(err)
	}
	pid := node.AgentPID()
	if servesHostPorts(t, node) {
		t.Fatal("host ports are served although nobody has asked")
	}
	done := make(chan struct{})
	measured := make(chan []time.Duration, 1)
	go func() {
		notReady, silent := away(t.Context(), node, done)
		measured <- []time.Duration{notReady, silent}
	}()
	began := time.Now()
	if err := endpoint.AskForHostPorts(node.StateDir()); err != nil {
		t.Fatal(err)
	}
	eventually(t, readyLimit, "the programs serve host ports", func() bool { return servesHostPorts(t, node) })
	served := time.Since(began)
	if err := node.WaitReady(within(t, readyLimit)); err != nil {
		t.Fatal(err)
	}
	close(done)
	m := <-measured
	t.Logf("served after %v; /readyz was away for %v, and without an answer for %v of that", served, m[0], m[1])
	if after, err := os.Stat(node.Conflist()); err != nil || !os.SameFile(before, after) || node.AgentPID() != pid {
		t.Errorf("the list for the runtime is another one, or gone: %v; process %d, then %d", err, pid, node.AgentPID())
	}
	if log, err := os.ReadFile(node.AgentLog()); err != nil || strings.Count(string(log), "starting anew") != 1 || strings.Contains(string(log), "level=ERROR") {
		t.Errorf("error %v, the agent says:\n%s", err, log)
	}
	startAfterKill(t, node)
	if !servesHostPorts(t, node) {
		t.Error("after a kill host ports are not served")
	}
	for _, c := range all {
		c.assertAlive(t, "in the end")
	}
	for _, pod := range slices.Concat([]*lab.Pod{a, near}, []*lab.Pod{addPod(t, node, "later")}) {
		if err := pod.Check(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

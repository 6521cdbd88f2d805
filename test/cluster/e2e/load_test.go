package e2e

import (
	"context"
	"flag"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

var loadFor = flag.Duration("load", 0, "how long TestMigration has the programs serve under load, for each way between nodes; 0: it is a matter of minutes, and without load")

const (
	// perSecond is how many connections the load opens where the processors have time for them, by so many at once.
	perSecond, atOnce = 1000, 50
	// leastPerSecond is what two processors have left beside two clusters.
	leastPerSecond = 100
	// deadFor is how long the agents stay dead.
	deadFor = 5 * time.Minute
)

// loaded are four pods of the second node, and a Service of theirs as the world finds it at the first.
func loaded(t *testing.T, s *standing) target {
	t.Helper()
	applied(t, s, rolledOn("{kubernetes.io/hostname: "+s.Nodes[1].Name+"}"))
	made := addService(t, s, "rolled", nil)
	lodged(t, s, "app=rolled", s.Nodes[1], 4)
	return made.byPorts(s.Nodes[0])
}

// underLoad has the world open connections to a Service while all that can happen to agents and backends does, again and again. Nothing is lost.
func underLoad(t *testing.T, s *standing, manifest string, to target) {
	t.Helper()
	previous := manifestOfPrevious(t, s, manifest)
	tr := newTraffic(t)
	var name string
	for range atOnce {
		name = tr.newConnections(t, time.Second*atOnce/perSecond, path{"a Service from the world under load", resetting{s.Fabric}, to})
	}
	started, rounds := time.Now(), 0
	for ; rounds == 0 || time.Since(started) < *loadFor; rounds++ {
		agentsKilled(t, s)
		backendsExchanged(t, s)
		agentsDead(t, s, manifest)
		installed(t, s, previous)
		rolledTo(t, s, previousImage)
		installed(t, s, manifest)
		rolledTo(t, s, cluster.AgentImage)
	}
	t.Logf("%d rounds in %v", rounds, time.Since(started).Round(time.Second))
	tr.end(t)
	if opened := float64(tr.counts[name]) / time.Since(started).Seconds(); opened < leastPerSecond {
		t.Errorf("%.0f connections a second, which is no load", opened)
	}
}

// resetting is a client whose connections end by a reset, and wait for nothing then.
type resetting struct{ dialer }

func (r resetting) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := r.dialer.Dial(ctx, network, address)
	if tcp, ok := conn.(*net.TCPConn); ok {
		err = tcp.SetLinger(0)
	}
	return conn, err
}

// manifestOfPrevious is a manifest of the agents with the image of the commit before.
func manifestOfPrevious(t *testing.T, s *standing, manifest string) string {
	t.Helper()
	if _, err := s.AddPrevious(within(t, stepLimit), previousImage); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(s.Dir, "auto-previous.yaml")
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(string(text), cluster.AgentImage, previousImage)), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// agentsKilled has the agents of all nodes killed, and start again.
func agentsKilled(t *testing.T, s *standing) {
	t.Helper()
	for _, node := range s.Nodes {
		before := agentPod(t, s, node).Status.ContainerStatuses[0]
		kill(t, node, before)
		restarted(t, s, node, before)
	}
}

// agentsDead has them killed and not come back for a while.
func agentsDead(t *testing.T, s *standing, manifest string) {
	t.Helper()
	for _, node := range s.Nodes {
		kill(t, node, agentPod(t, s, node).Status.ContainerStatuses[0])
	}
	kubectl(t, s, "-n", cluster.Namespace, "delete", "--cascade=foreground", "daemonset/"+cluster.DaemonSet)
	time.Sleep(deadFor)
	installed(t, s, manifest)
}

// backendsExchanged has all pods of the loaded Service exchanged for others.
func backendsExchanged(t *testing.T, s *standing) {
	t.Helper()
	kubectl(t, s, "rollout", "restart", "deployment/rolled")
	kubectl(t, s, "rollout", "status", "deployment/rolled", "--timeout="+stepLimit.String())
	lodged(t, s, "app=rolled", s.Nodes[1], 4)
}

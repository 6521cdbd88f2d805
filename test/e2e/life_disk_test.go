package e2e

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// /run is full when the agent is killed, and its next start has a new setting. The node can't be given pods, which the agent
// says to all who ask; those that it has talk on, are looked after, and can be deleted.
func TestAgentStartsAgainOnAFullDisk(t *testing.T) {
	t.Parallel()
	l := lab.ForTest(t, lab.Options{Nodes: 2})
	node := l.Nodes[0]
	mountState(t, node)
	startAgents(t, l)
	pod, near, far := addPod(t, node, "a"), addPod(t, node, "near"), addPod(t, l.Nodes[1], "far")
	tr := startTraffic(t, pod, far.Namespace, node.Namespace, l.Outside)
	unfill := fillState(t, node)
	if err := node.KillAgent(); err != nil {
		t.Fatal(err)
	}
	if err := node.StartAgent("--snat-ports=50000-65535"); err != nil {
		t.Fatal(err)
	}
	assertSaysFull(t, node)
	if _, err := node.AddPod(t.Context(), "refused", lab.PodOptions{}); err == nil {
		t.Error("a pod was added without room")
	}
	host := lookAt(func() lab.Snapshot { return networkAndFiles(t, node).Without("/" + observe.ClusterFile) })
	if out, err := node.Exec(t.Context(), "ip", "route", "delete", near.Addr().String()); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	host.assertBack(t, repairPromise, "a pod's route")
	assertReaches(t, near.Namespace, serve(t, pod.Namespace), near.Addr())
	assertReaches(t, near.Namespace, serve(t, l.Outside), node.Addr())
	if err := node.DelPod(t.Context(), near); err != nil {
		t.Error(err)
	}
	unfill()
	if err := node.WaitReady(within(t, readySoon)); err != nil {
		t.Fatal(err)
	}
	eventually(t, entryPromise, "no problem is left", func() bool {
		_, err := node.Ebpfctl(t.Context(), "status")
		return err == nil
	})
	eventually(t, entryPromise, "what could not be noted before is set", func() bool {
		out, err := node.Exec(t.Context(), "cat", "/proc/sys/net/ipv4/ip_local_reserved_ports")
		return err == nil && string(out) == "50000-60999\n"
	})
	again := addPod(t, node, "again")
	assertReaches(t, again.Namespace, serve(t, far.Namespace), again.Addr())
	tr.end(t)
}

// readySoon is how long the agent may take to find that there is room again: it looks each second.
const readySoon = 3 * time.Second

// mountState gives a node a state directory that is easily filled.
func mountState(t *testing.T, node *lab.Node) {
	t.Helper()
	if err := os.MkdirAll(node.StateDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("state", node.StateDir(), "tmpfs", 0, "size=512k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(node.StateDir(), unix.MNT_DETACH) })
}

// fillState takes all the room that is left there, until it is told to give it back.
func fillState(t *testing.T, node *lab.Node) (unfill func()) {
	t.Helper()
	path := filepath.Join(node.StateDir(), "others")
	if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("the state directory does not fill: %v", err)
	}
	return func() {
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
	}
}

// assertSaysFull: the probes, the log and ebpfctl give the reason for which a node is not ready, and that is no reason to
// restart its agent.
func assertSaysFull(t *testing.T, node *lab.Node) {
	t.Helper()
	reason := "the file system of " + node.StateDir() + " is full"
	eventually(t, readyLimit, "/readyz says that "+reason, func() bool {
		status, body, err := node.HTTPGet(t.Context(), "/readyz")
		return err == nil && status == http.StatusServiceUnavailable && strings.Contains(string(body), reason)
	})
	if status, _, err := node.HTTPGet(t.Context(), "/healthz"); err != nil || status != http.StatusOK {
		t.Errorf("/healthz answers %d, error %v", status, err)
	}
	if said := node.LogTail(100); !strings.Contains(said, reason) {
		t.Errorf("the log does not say that %s:\n%s", reason, said)
	}
	out, err := node.Ebpfctl(t.Context(), "status")
	if said := string(out); err == nil || !strings.Contains(said, "running, not ready") || !strings.Contains(said, reason) {
		t.Errorf("ebpfctl status, error %v:\n%s", err, said)
	}
}

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// crowded is how many pods a node gets: in the long form as many as make a node full, a kubelet taking 110.
func crowded() int {
	if isLong() {
		return 100
	}
	return 32
}

// few are enough to be met while they start, as are those that the rest of a crowd has more.
const few = 24

const crowd = `apiVersion: apps/v1
kind: Deployment
metadata: {name: crowd}
spec:
  replicas: %d
  selector: {matchLabels: {app: crowd}}
  strategy: {rollingUpdate: {maxSurge: 10%%, maxUnavailable: 20%%}}
  template:
    metadata: {labels: {app: crowd}}
    spec:
      terminationGracePeriodSeconds: 1
      nodeSelector: {kubernetes.io/hostname: %s}
      enableServiceLinks: false
      automountServiceAccountToken: false
      containers: [{name: pause, image: "%s", imagePullPolicy: Never}]
`

// A node's runtime and its kubelet are killed, each while pods start: what was half done is finished or undone. Then all of
// the many pods that the node has are exchanged for others. In the end nothing of them is left. The processors have enough to do with those: the traffic is sparse,
// and a cut shorter than that is for other tests to see.
func testCrowdRolledOver(t *testing.T) {
	s := running(t)
	isInPage(t, "troubleshooting.md", removeEmptyNotes)
	node := s.Nodes[1]
	before := traces(t, s)
	undisturbedAt(t, s, sparse, everywhere(s), func() {
		there := links(t, s, node)
		disperse := applied(t, s, fmt.Sprintf(crowd, few, node.Name, cluster.PauseImage))
		arrive(t, s, node, there)
		killed(t, s, node, "containerd", func(ctx context.Context, node *cluster.Machine) error {
			out, err := node.Run(ctx, "sh", "-ec", removeEmptyNotes)
			if err != nil {
				return fmt.Errorf("%w\n%s", err, out)
			}
			return s.StartContainerd(ctx, node)
		})
		lost := namespaces(t, node)
		there = links(t, s, node)
		if _, err := s.Kubectl(t.Context(), "scale", "deployment/crowd", fmt.Sprintf("--replicas=%d", crowded())); err != nil {
			t.Fatal(err)
		}
		arrive(t, s, node, there)
		killed(t, s, node, "kubelet", s.StartKubelet)
		lodged(t, s, "app=crowd", node, crowded())
		if during := traces(t, s); len(during) < len(before)+4*crowded() {
			t.Errorf("%d pods left only %d traces: that none is left later shows little", crowded(), len(during)-len(before))
		}
		if _, err := s.Kubectl(t.Context(), "rollout", "restart", "deployment/crowd"); err != nil {
			t.Fatal(err)
		}
		started := time.Now()
		if _, err := s.Kubectl(t.Context(), "rollout", "status", "deployment/crowd", "--timeout="+stepLimit.String()); err != nil {
			t.Fatal(err)
		}
		t.Logf("rolled over after %.1f s", time.Since(started).Seconds())
		lodged(t, s, "app=crowd", node, crowded())
		disperse()
		removeLost(t, node, lost, before)
		balanced(t, s, node)
	})
	left := slices.DeleteFunc(traces(t, s), func(trace string) bool { return slices.Contains(before, trace) })
	if len(left) > 0 {
		t.Errorf("deleted pods left behind:\n%s", strings.Join(left, "\n"))
	}
}

// removeEmptyNotes is what troubleshooting.md says to do when a runtime died while it noted what a plugin had said: for an empty note it
// refuses ever to end that pod.
const removeEmptyNotes = "find /var/lib/cni -type f -empty -delete"

// namespaces are those of the network that a node's runtime has made.
func namespaces(t *testing.T, node *cluster.Machine) []string {
	t.Helper()
	out, err := node.Run(t.Context(), "ls", "/run/netns")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(out)
}

// removeLost removes the namespaces that a killed containerd has made and forgotten, as only its later versions do by
// themselves. What the plugin has made in them is for the agent to find.
func removeLost(t *testing.T, node *cluster.Machine, lost, before []string) {
	t.Helper()
	there := namespaces(t, node)
	for _, name := range lost {
		if slices.Contains(before, node.Name+" netns "+name) || !slices.Contains(there, name) {
			continue
		}
		t.Logf("containerd has lost %s", name)
		if out, err := node.Run(t.Context(), "ip", "netns", "delete", name); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	}
}

// links are the indexes of the links of a node's pods. The kernel gives none twice.
func links(t *testing.T, s *standing, node *cluster.Machine) []any {
	t.Helper()
	var all []any
	for _, record := range dump(t, s, node, "devices") {
		all = append(all, record["ifindex"])
	}
	return all
}

// arrive waits until some pods have come to a node since it had those links. That more are about to is the caller's doing: how
// many there are in all says nothing, since those that were half done go meanwhile.
func arrive(t *testing.T, s *standing, node *cluster.Machine, before []any) {
	t.Helper()
	err := cluster.Poll(within(t, stepLimit), "pods start", func(context.Context) error {
		now := slices.DeleteFunc(links(t, s, node), func(link any) bool { return slices.Contains(before, link) })
		if len(now) < few/4 {
			return fmt.Errorf("%d have", len(now))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// killed kills a program of a node and starts it again.
func killed(t *testing.T, s *standing, node *cluster.Machine, program string, start func(context.Context, *cluster.Machine) error) {
	t.Helper()
	if err := node.Stop(within(t, stepLimit), program, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := start(t.Context(), node); err != nil {
		t.Fatal(err)
	}
}

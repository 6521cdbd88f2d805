package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// forgetLimit is how long other nodes may know a podCIDR whose Node is gone, but for the time that it takes to ask them.
const forgetLimit = 2 * time.Second

// evicted are two pods that prefer a node, one of which has to be there at any time, and one that nobody would make again.
const evicted = `apiVersion: apps/v1
kind: Deployment
metadata: {name: evicted}
spec:
  replicas: 2
  selector: {matchLabels: {app: evicted}}
  template:
    metadata: {labels: {app: evicted}}
    spec:
      terminationGracePeriodSeconds: 1
      affinity:
        nodeAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
            - weight: 100
              preference: {matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [%[1]s]}]}
      containers: [{name: pause, image: "%[2]s", imagePullPolicy: Never}]
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: evicted}
spec: {minAvailable: 1, selector: {matchLabels: {app: evicted}}}
---
apiVersion: v1
kind: Pod
metadata: {name: evicted, labels: {app: single}}
spec:
  nodeName: %[1]s
  terminationGracePeriodSeconds: 1
  containers: [{name: pause, image: "%[2]s", imagePullPolicy: Never}]
`

// A node joins, is drained and deleted, comes back with another podCIDR, and leaves for good. The others talk on, and
// soon know nothing of it.
func testNodeComesAndGoes(t *testing.T) {
	s := running(t)
	undisturbed(t, s, func() {
		node, err := s.AddNode(within(t, stepLimit))
		defer leaves(t, s, node)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
		first := podCIDR(t, s, node)
		passes(t, s, node)
		evict := applied(t, s, fmt.Sprintf(evicted, node.Name, cluster.PauseImage))
		lodged(t, s, "app in (evicted, single)", node, 3)
		removed(t, s, node, first)
		lodged(t, s, "app=evicted", nil, 2)
		evict()
		if err := s.StartKubelet(t.Context(), node); err != nil {
			t.Fatal(err)
		}
		if err := s.WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
		second := podCIDR(t, s, node)
		if second == first {
			t.Errorf("%s is back with %s, which it had", node.Name, first)
		}
		if addr := passes(t, s, node); !second.Contains(addr) {
			t.Errorf("a pod of %s has %s, want one of %s", node.Name, addr, second)
		}
		removed(t, s, node, second)
	})
	for _, node := range s.Nodes {
		balanced(t, s, node)
	}
}

// removed drains a node, ends its kubelet, deletes its Node, and checks that the others forget it.
func removed(t *testing.T, s *standing, node *cluster.Machine, podCIDR netip.Prefix) {
	t.Helper()
	asked := time.Now()
	for _, other := range s.Nodes {
		if other != node && !knows(t, s, other, podCIDR, node.Addr) {
			t.Errorf("%s does not know %s and %s of %s", other.Name, podCIDR, node.Addr, node.Name)
		}
	}
	asking := time.Since(asked)
	out, err := s.Kubectl(t.Context(), "drain", node.Name, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=60s")
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	balanced(t, s, node)
	if err := node.Stop(within(t, stepLimit), "kubelet", syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Kubectl(t.Context(), "delete", "node", node.Name); err != nil {
		t.Fatal(err)
	}
	err = cluster.Poll(within(t, forgetLimit+3*asking), "the others have forgotten "+node.Name, func(context.Context) error {
		for _, other := range s.Nodes {
			if other != node && knows(t, s, other, podCIDR, node.Addr) {
				return fmt.Errorf("%s knows %s", other.Name, podCIDR)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// knows says whether a node's programs have something to do with a podCIDR or with the node that had it.
func knows(t *testing.T, s *standing, node *cluster.Machine, podCIDR netip.Prefix, addr netip.Addr) bool {
	t.Helper()
	for _, record := range dump(t, s, node, "destinations") {
		text, _ := record["prefix"].(string)
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			t.Fatalf("a destination of %s: %v: %v", node.Name, err, record)
		}
		if prefix.Overlaps(podCIDR) || prefix == netip.PrefixFrom(addr, addr.BitLen()) {
			return true
		}
	}
	return false
}

// leaves takes a node away, wherever a test has stopped.
func leaves(t *testing.T, s *standing, node *cluster.Machine) {
	t.Helper()
	if node == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), stepLimit)
	defer cancel()
	if err := s.RemoveNode(ctx, node); err != nil {
		t.Error(err)
	}
	for _, args := range [][]string{
		{"delete", "node", "--ignore-not-found", node.Name},
		// The garbage collector of pods is in no hurry.
		{"delete", "pods", "-A", "--field-selector=spec.nodeName=" + node.Name, "--force", "--grace-period=0"},
	} {
		if _, err := s.Kubectl(ctx, args...); err != nil {
			t.Error(err)
		}
	}
}

// podCIDR is the one of the first family that the API has for a node.
func podCIDR(t *testing.T, s *standing, node *cluster.Machine) netip.Prefix {
	t.Helper()
	prefix, err := findPodCIDR(t.Context(), s, node)
	if err != nil {
		t.Fatal(err)
	}
	return prefix
}

func findPodCIDR(ctx context.Context, s *standing, node *cluster.Machine) (netip.Prefix, error) {
	client, err := s.Client()
	if err != nil {
		return netip.Prefix{}, err
	}
	found, err := client.CoreV1().Nodes().Get(ctx, node.Name, metav1.GetOptions{})
	if err != nil {
		return netip.Prefix{}, err
	}
	for _, text := range found.Spec.PodCIDRs {
		if prefix, err := netip.ParsePrefix(text); err == nil && cluster.FamilyOf(prefix.Addr()) == s.Family() {
			return prefix, nil
		}
	}
	return netip.Prefix{}, fmt.Errorf("%s has podCIDRs %v, none of %s", node.Name, found.Spec.PodCIDRs, s.Family())
}

// applied applies a manifest; what it returns deletes what that made.
func applied(t *testing.T, s *standing, text string) (undo func()) {
	t.Helper()
	file := filepath.Join(s.Dir, strings.ReplaceAll(t.Name(), "/", "-")+".yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Kubectl(t.Context(), "apply", "--server-side", "-f", file); err != nil {
		t.Fatal(err)
	}
	gone := false
	undo = func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), stepLimit)
		defer cancel()
		if gone {
			return
		}
		gone = true
		if _, err := s.Kubectl(ctx, "delete", "--ignore-not-found", "--cascade=foreground", "-f", file); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(undo)
	return undo
}

// lodged waits until there are as many ready pods of a kind as wanted and no others, all of them on one node or, with
// nil, on any.
func lodged(t *testing.T, s *standing, selector string, node *cluster.Machine, want int) {
	t.Helper()
	started := time.Now()
	client, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	err = cluster.Poll(within(t, stepLimit), fmt.Sprintf("there are %d pods of %s", want, selector), func(ctx context.Context) error {
		pods, err := client.CoreV1().Pods("").List(ctx, metav1.ListOptions{LabelSelector: selector})
		if err != nil {
			return err
		}
		there := 0
		for _, pod := range pods.Items {
			if ready(pod) && (node == nil || pod.Spec.NodeName == node.Name) {
				there++
			}
		}
		if there != want || len(pods.Items) != want {
			return fmt.Errorf("%d, of which %d are where they should be and ready", len(pods.Items), there)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d pods of %s after %.1f s", want, selector, time.Since(started).Seconds())
}

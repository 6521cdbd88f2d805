package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// A second DaemonSet's agents refuse to start beside the first's, and say so. Nobody takes the nodes for broken.
func TestTwoAgents(t *testing.T) {
	s := running(t)
	client, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	sets := client.AppsV1().DaemonSets(cluster.Namespace)
	first, err := sets.Get(t.Context(), cluster.DaemonSet, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	labels := map[string]string{"app": "second"}
	second := first.DeepCopy()
	second.ObjectMeta = metav1.ObjectMeta{Name: "second", Labels: labels}
	second.Spec.Selector = &metav1.LabelSelector{MatchLabels: labels}
	second.Spec.Template.Labels = labels
	undisturbed(t, s, func() {
		if _, err := sets.Create(t.Context(), second, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := sets.Delete(context.WithoutCancel(t.Context()), second.Name, metav1.DeleteOptions{}); err != nil {
				t.Error(err)
			}
		}()
		refused(t, s, "app=second", len(s.Nodes))
		for _, node := range s.Nodes {
			isAvailable(t, s, node)
		}
	})
}

// refused waits until so many pods have ended because an agent is running.
func refused(t *testing.T, s *standing, selector string, want int) {
	t.Helper()
	client, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	err = cluster.Poll(within(t, stepLimit), "the second agents refuse", func(ctx context.Context) error {
		pods, err := client.CoreV1().Pods(cluster.Namespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
		if err != nil {
			return err
		}
		refusals := 0
		var said []string
		for _, pod := range pods.Items {
			for _, status := range pod.Status.ContainerStatuses {
				if ended := status.LastTerminationState.Terminated; ended != nil {
					said = append(said, ended.Message)
					if ended.ExitCode == 1 && strings.Contains(ended.Message, "an agent is running on --state-dir") {
						refusals++
					}
				}
			}
		}
		if refusals != want {
			return fmt.Errorf("%d of %d: %q", refusals, want, said)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// isAvailable checks that a Node does not say that its network is unavailable.
func isAvailable(t *testing.T, s *standing, node *cluster.Machine) {
	t.Helper()
	client, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	found, err := client.CoreV1().Nodes().Get(t.Context(), node.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(found.Status.Conditions, func(c core.NodeCondition) bool { return c.Type == core.NodeNetworkUnavailable })
	if i < 0 || found.Status.Conditions[i].Status != core.ConditionFalse {
		t.Errorf("%s says %+v", node.Name, found.Status.Conditions)
	}
}

// Somebody deletes every pin of a node: maps, programs, and with their links all attachments. The agent puts them back, and
// pods talk on. Only flows that are masqueraded need the programs so much that they may end.
func TestPinsDeleted(t *testing.T) {
	s := running(t)
	node := s.Nodes[0]
	before := pinned(t, node)
	undisturbedOn(t, s, []path{pathTo("the same node", s.client, s.near.Addr), pathTo("another node", s.client, s.far.Addr)}, func() {
		if out, err := node.Run(t.Context(), "sh", "-c", "rm -r /sys/fs/bpf/ebpf-cni/*"); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		started := time.Now()
		err := cluster.Poll(within(t, stepLimit), "the pins are back", func(context.Context) error {
			if now := pinned(t, node); !slices.Equal(now, before) {
				return fmt.Errorf("%q, before %q", now, before)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		t.Logf("the pins were back after %v", time.Since(started).Round(time.Millisecond))
	})
	passes(t, s, node)
}

// pinned lists a node's pins.
func pinned(t *testing.T, node *cluster.Machine) []string {
	t.Helper()
	out, err := node.Run(t.Context(), "find", "/sys/fs/bpf/ebpf-cni", "-type", "f")
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Fields(out)
	slices.Sort(all)
	return all
}

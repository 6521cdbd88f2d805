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

// A second DaemonSet's agents don't come to the nodes, since the first's have their port there. Where it claims none they do,
// refuse to start beside the first's, and say so. Nobody takes the nodes for broken.
func TestTwoAgents(t *testing.T) {
	s := running(t)
	undisturbed(t, s, func() {
		beside(t, s, "unscheduled", nil, func(selector string) { isKeptAway(t, s, selector, len(s.Nodes)) })
		claimNoPort := func(pod *core.PodSpec) {
			for i := range pod.Containers {
				pod.Containers[i].Ports = nil
			}
		}
		beside(t, s, "refused", claimNoPort, func(selector string) { refused(t, s, selector, len(s.Nodes)) })
		for _, node := range s.Nodes {
			isAvailable(t, s, node)
		}
	})
}

// beside runs f while there is a second DaemonSet, like the first but for what change does to its pods. The selector selects those.
func beside(t *testing.T, s *standing, name string, change func(*core.PodSpec), f func(selector string)) {
	t.Helper()
	client, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	sets := client.AppsV1().DaemonSets(cluster.Namespace)
	second, err := sets.Get(t.Context(), cluster.DaemonSet, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	labels := map[string]string{"app": name}
	second.ObjectMeta = metav1.ObjectMeta{Name: name, Labels: labels}
	second.Spec.Selector = &metav1.LabelSelector{MatchLabels: labels}
	second.Spec.Template.Labels = labels
	if change != nil {
		change(&second.Spec.Template.Spec)
	}
	if _, err := sets.Create(t.Context(), second, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := sets.Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	}()
	f("app=" + name)
}

// isKeptAway waits until the scheduler has found no room for so many pods, since their port is taken on their nodes.
func isKeptAway(t *testing.T, s *standing, selector string, want int) {
	t.Helper()
	pollPods(t, s, "the second agents find their port taken", selector, func(pods []core.Pod) error {
		kept := 0
		var said []string
		for _, pod := range pods {
			for _, c := range pod.Status.Conditions {
				if c.Type == core.PodScheduled {
					said = append(said, c.Message)
					if c.Status == core.ConditionFalse && c.Reason == core.PodReasonUnschedulable && strings.Contains(c.Message, "free ports") {
						kept++
					}
				}
			}
		}
		if kept != want || len(pods) != want {
			return fmt.Errorf("%d of %d: %q", kept, want, said)
		}
		return nil
	})
}

// refused waits until so many pods have ended because an agent is running.
func refused(t *testing.T, s *standing, selector string, want int) {
	t.Helper()
	pollPods(t, s, "the second agents refuse", selector, func(pods []core.Pod) error {
		refusals := 0
		var said []string
		for _, pod := range pods {
			for _, status := range pod.Status.ContainerStatuses {
				if ended := status.LastTerminationState.Terminated; ended != nil {
					said = append(said, ended.Message)
					if ended.ExitCode == 1 && strings.Contains(ended.Message, "an agent is running on --state-dir") {
						refusals++
					}
				}
			}
		}
		if refusals != want || len(pods) != want {
			return fmt.Errorf("%d of %d: %q", refusals, want, said)
		}
		return nil
	})
}

// pollPods waits until the selected pods beside the agents are as they should be.
func pollPods(t *testing.T, s *standing, what, selector string, hold func([]core.Pod) error) {
	t.Helper()
	client, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	err = cluster.Poll(within(t, stepLimit), what, func(ctx context.Context) error {
		pods, err := client.CoreV1().Pods(cluster.Namespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
		if err != nil {
			return err
		}
		return hold(pods.Items)
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

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// notReadyWait is longer than an agent waits until it says that its node can't carry pods.
const notReadyWait = 11 * time.Second

// badUpdates are changes of the DaemonSet that no agent can live with, and how to tell that one has tried. Some live long
// enough to speak of their node.
var badUpdates = []struct {
	name   string
	change []string
	tried  func(core.ContainerStatus) bool
	speaks bool
}{
	{
		"an image that is nowhere", []string{"set", "image", "daemonset/" + cluster.DaemonSet, "agent=localhost/ebpf-cni:nowhere"},
		func(c core.ContainerStatus) bool {
			return c.State.Waiting != nil && strings.Contains(c.State.Waiting.Message, "localhost/ebpf-cni:nowhere")
		}, false,
	},
	{
		"an uplink that does not exist", []string{"set", "env", "daemonset/" + cluster.DaemonSet, "EBPF_AGENT_UPLINK=eth9"},
		func(c core.ContainerStatus) bool {
			ended := c.LastTerminationState.Terminated
			return ended != nil && ended.ExitCode == 2 && strings.Contains(ended.Message, "eth9")
		}, true,
	},
	{
		"too little memory", []string{"set", "resources", "daemonset/" + cluster.DaemonSet, "--requests=memory=14Mi", "--limits=memory=14Mi"},
		func(c core.ContainerStatus) bool {
			ended := c.LastTerminationState.Terminated
			return ended != nil && ended.Reason == outOfMemory
		}, false,
	},
}

// An update that does not work stops at the first node. The pods there talk on, new ones come and get their network.
func testBadUpdates(t *testing.T) {
	s := running(t)
	undisturbed(t, s, func() {
		for _, update := range badUpdates {
			t.Run(update.name, func(t *testing.T) {
				before := agents(t, s)
				if _, err := s.Kubectl(t.Context(), append([]string{"-n", cluster.Namespace}, update.change...)...); err != nil {
					t.Fatal(err)
				}
				defer rollBack(t, s)
				node := triedOn(t, s, before, update.tried)
				since := time.Now()
				travels(t, s, scheduled(t, s, "passing", node))
				if update.speaks {
					time.Sleep(time.Until(since.Add(notReadyWait)))
				}
				isAvailable(t, s, node)
				for name, was := range before {
					if now := agents(t, s)[name]; name != node.Name && (now.UID != was.UID || !ready(now)) {
						t.Errorf("the agent of %s is pod %s, before %s: the update did not stop at %s", name, now.Name, was.Name, node.Name)
					}
				}
			})
		}
	})
}

// scheduled is a visitor that the scheduler has to send to a node: nothing may keep pods from there.
func scheduled(t *testing.T, s *standing, name string, node *cluster.Machine) *cluster.Pod {
	t.Helper()
	departs(t, s, name)
	pod, err := s.AddPodWith(t.Context(), name, nil, nil, func(spec *core.PodSpec) {
		spec.NodeSelector = map[string]string{core.LabelHostname: node.Name}
	})
	if err != nil {
		t.Fatal(err)
	}
	return pod
}

func rollBack(t *testing.T, s *standing) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	if _, err := s.Kubectl(ctx, "-n", cluster.Namespace, "rollout", "undo", "daemonset/"+cluster.DaemonSet); err != nil {
		t.Error(err)
	}
	if err := s.WaitReady(ctx); err != nil {
		t.Error(err)
	}
}

// triedOn waits until an agent that was not there before has tried, and returns where.
func triedOn(t *testing.T, s *standing, before map[string]core.Pod, tried func(core.ContainerStatus) bool) (node *cluster.Machine) {
	t.Helper()
	err := cluster.Poll(within(t, stepLimit), "an agent has tried", func(context.Context) error {
		var seen []string
		for name, pod := range agents(t, s) {
			if pod.UID == before[name].UID || len(pod.Status.ContainerStatuses) == 0 {
				continue
			}
			status := pod.Status.ContainerStatuses[0]
			if node = s.Node(name); tried(status) {
				return nil
			}
			seen = append(seen, fmt.Sprintf("%s: %+v, last %+v", pod.Name, status.State, status.LastTerminationState))
		}
		return fmt.Errorf("new ones: %q", seen)
	})
	if err != nil {
		t.Fatal(err)
	}
	return node
}

// agents are the pods of the DaemonSet, by node.
func agents(t *testing.T, s *standing) map[string]core.Pod {
	t.Helper()
	client, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	list, err := client.CoreV1().Pods(cluster.Namespace).List(t.Context(), metav1.ListOptions{LabelSelector: cluster.AgentLabel})
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]core.Pod{}
	for _, pod := range list.Items {
		if pod.DeletionTimestamp == nil {
			all[pod.Spec.NodeName] = pod
		}
	}
	return all
}

func ready(pod core.Pod) bool {
	return len(pod.Status.ContainerStatuses) > 0 && pod.Status.ContainerStatuses[0].Ready
}

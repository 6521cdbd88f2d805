package e2e

import (
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// stepLimit is how long something may take that the cluster does by itself.
const stepLimit = 5 * time.Minute

// The agent of one node is killed by somebody, that of the other by the kernel.
func TestAgentKilled(t *testing.T) {
	s := running(t)
	undisturbed(t, s, func() {
		before := agentPod(t, s, s.Nodes[0]).Status.ContainerStatuses[0]
		kill(t, s.Nodes[0], before)
		exhaust(t, s, s.Nodes[1])
		restarted(t, s, s.Nodes[0], before)
	})
}

// kill ends a container by SIGKILL, behind the kubelet's back.
func kill(t *testing.T, node *cluster.Machine, container core.ContainerStatus) {
	t.Helper()
	id := strings.TrimPrefix(container.ContainerID, "containerd://")
	if out, err := node.Run(t.Context(), "ctr", "-n", "k8s.io", "tasks", "kill", "-s", "SIGKILL", id); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// agentPod is the DaemonSet's pod on a node.
func agentPod(t *testing.T, s *standing, node *cluster.Machine) core.Pod {
	t.Helper()
	client, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	pods, err := client.CoreV1().Pods(cluster.Namespace).List(t.Context(), metav1.ListOptions{
		LabelSelector: cluster.AgentLabel, FieldSelector: "spec.nodeName=" + node.Name,
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(pods.Items) != 1 || len(pods.Items[0].Status.ContainerStatuses) != 1 {
		t.Fatalf("%s has %d pods of the agent, want one with one container", node.Name, len(pods.Items))
	}
	return pods.Items[0]
}

func TestTakenAwayAndBack(t *testing.T) {
	s := running(t)
	afterFailure(t, s, s.Install)
	undisturbed(t, s, func() {
		if err := s.Uninstall(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := agentReady(t.Context(), s.Nodes[0]); err == nil {
			t.Error("an agent answers, but its DaemonSet is gone")
		}
		// Long enough to see whether anything ends with the agent.
		time.Sleep(3 * time.Second)
		if err := s.Install(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
	pod := visitor(t, s, "after-all", s.Nodes[1])
	sees(t, pod, at(s.near.Addr, cluster.HTTPPort), pod.Addr)
	if err := s.DeletePods(t.Context(), pod); err != nil {
		t.Error(err)
	}
}

package e2e

import (
	"net/netip"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// previousImage is that of the commit before.
const previousImage = "localhost/ebpf-cni:previous"

// The cluster goes back to what was there before the commit that last changed the binaries, and forth again: by the
// manifest of that time and this one, and by undoing. Flows that were opened under either live through it all.
func testUpgradeFromThePreviousCommit(t *testing.T) {
	s := running(t)
	manifest, err := s.AddPrevious(within(t, stepLimit), previousImage)
	if err != nil {
		t.Fatal(err)
	}
	afterFailure(t, s, s.Install)
	undisturbed(t, s, func() {
		if _, err := s.Kubectl(t.Context(), "apply", "--server-side", "--force-conflicts", "-f", manifest); err != nil {
			t.Fatal(err)
		}
		rolledTo(t, s, previousImage)
		undisturbed(t, s, func() {
			if err := s.Install(t.Context()); err != nil {
				t.Fatal(err)
			}
			rolledTo(t, s, cluster.AgentImage)
			rollBack(t, s)
			rolledTo(t, s, previousImage)
			passes(t, s, s.Nodes[1])
			rollBack(t, s)
			rolledTo(t, s, cluster.AgentImage)
		})
	})
	passes(t, s, s.Nodes[1])
}

// rolledTo waits until every node's agent is ready, and checks that it is of an image.
func rolledTo(t *testing.T, s *standing, image string) {
	t.Helper()
	if err := s.WaitReady(t.Context()); err != nil {
		t.Error(err)
	}
	for _, node := range s.Nodes {
		if pod := agentPod(t, s, node); pod.Spec.Containers[0].Image != image {
			t.Errorf("%s runs %s, want %s", node.Name, pod.Spec.Containers[0].Image, image)
		}
	}
}

// passes checks that a pod that comes to a node now reaches everybody, and is gone without a trace. It returns the address
// that the pod had.
func passes(t *testing.T, s *standing, node *cluster.Machine) netip.Addr {
	t.Helper()
	pod := visitor(t, s, "passing", node)
	travels(t, s, pod)
	return pod.Addr
}

// travels checks that a pod that has come reaches everybody, and has it leave.
func travels(t *testing.T, s *standing, pod *cluster.Pod) {
	t.Helper()
	sees(t, pod, at(s.near.Addr, cluster.HTTPPort), pod.Addr)
	sees(t, pod, at(s.far.Addr, cluster.HTTPPort), pod.Addr)
	sees(t, pod, at(s.World(), cluster.HTTPPort), pod.Node.Addr)
	sees(t, s.client, at(pod.Addr, cluster.HTTPPort), s.client.Addr)
	if err := s.DeletePods(t.Context(), pod); err != nil {
		t.Error(err)
	}
	balanced(t, s, pod.Node)
}

package e2e

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// startDocker starts a node's dockerd.
func startDocker(t *testing.T, node *lab.Node, options ...string) *lab.Docker {
	t.Helper()
	docker, err := node.StartDocker(t.Context(), options...)
	if err != nil {
		t.Fatal(err)
	}
	return docker
}

// runContainer starts a container of Docker's.
func runContainer(t *testing.T, docker *lab.Docker, name string, options ...string) *lab.Namespace {
	t.Helper()
	container, err := docker.Run(t.Context(), name, options...)
	if err != nil {
		t.Fatal(err)
	}
	return container
}

// A dockerd that has a network of its own goes on beside pods, with its rules for masquerading and for published ports, and pods
// take their shortcuts past them.
func TestDockerBesidePods(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 2, Families: only4})
	node := l.Nodes[0]
	pod, near, far := addPod(t, node, "a"), addPod(t, node, "near"), addPod(t, l.Nodes[1], "far")
	direct := []netip.AddrPort{serve(t, near.Namespace), serve(t, far.Namespace), serve(t, l.Outside)}

	// With it a pod does not reach what its own node publishes: br_netfilter tracks the answer on the bridge, before its destination is
	// the pod's again.
	if err := node.WriteSysctl("net/bridge/bridge-nf-call-iptables", "0"); err != nil {
		t.Fatal(err)
	}
	docker := startDocker(t, node, "--bip=172.17.0.1/16")
	container := runContainer(t, docker, "box", fmt.Sprintf("--publish=%d:%d", published, 9000))
	inside, err := container.Serve(9000)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, switchLimit, "the agent has followed Docker's rules", func() bool { return isBesideMasquerading(t, node) })
	assertBypass(t, pod, direct)

	at := netip.AddrPortFrom(node.Addr(), published)
	for _, from := range []*lab.Namespace{pod.Namespace, far.Namespace, l.Nodes[1].Namespace, l.Outside, node.Namespace} {
		if _, err := from.TCP(t.Context(), at); err != nil {
			t.Errorf("%s to the port that the container publishes: %v", from.Netns(), err)
		}
	}
	for _, to := range direct {
		if _, err := container.TCP(t.Context(), to); err != nil {
			t.Errorf("the container to %s: %v", to, err)
		}
	}
	if _, err := pod.TCP(t.Context(), netip.AddrPortFrom(container.Addr(), inside.Port)); err != nil {
		t.Errorf("a pod to the container: %v", err)
	}
	if err := docker.Remove(t.Context(), "box", container); err != nil {
		t.Error(err)
	}
}

// Containers of a real dockerd whose bridge is attached are pods: on one node, across nodes, to the world and from there, by ports that
// Docker publishes as well. One that gets another one's address is none of its flows.
func TestDockersContainersArePods(t *testing.T) {
	t.Parallel()
	l := lab.ForTest(t, lab.Options{Nodes: 2, Families: only4})
	node, other := l.Nodes[0], l.Nodes[1]
	node.Bridged = true
	for _, err := range []error{node.StartAgent("--attach-bridge=docker0"), other.StartAgent(), node.WaitReady(t.Context()), other.WaitReady(t.Context())} {
		if err != nil {
			t.Fatal(err)
		}
	}
	bridge := netip.PrefixFrom(inNetwork(node.PodCIDR(), 1), node.PodCIDR().Bits())
	docker := startDocker(t, node, "--bip="+bridge.String(), "--mtu=1500", "--ip-masq=false")
	one, two := runContainer(t, docker, "one", fmt.Sprintf("--publish=%d:%d", published, 9000)), runContainer(t, docker, "two")
	far := addPod(t, other, "far")
	meet(t, one, two, far.Namespace)
	assertReaches(t, one, serve(t, l.Outside), node.Addr())

	inside, err := one.Serve(9000)
	if err != nil {
		t.Fatal(err)
	}
	assertReaches(t, far.Namespace, netip.AddrPortFrom(one.Addr(), inside.Port), far.Addr())
	eventually(t, switchLimit, "the agent has followed Docker's rules", func() bool { return isBeside(t, node) })
	at := netip.AddrPortFrom(node.Addr(), published)
	for _, from := range []*lab.Namespace{l.Outside, other.Namespace, far.Namespace, node.Namespace} {
		if _, err := from.TCP(t.Context(), at); err != nil {
			t.Errorf("%s to the port that the container publishes: %v", from.Netns(), err)
		}
	}

	old, err := two.DialTCP(t.Context(), serve(t, l.Outside), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	if err := docker.Remove(t.Context(), "two", two); err != nil {
		t.Fatal(err)
	}
	three := runContainer(t, docker, "three")
	if three.Addr() != two.Addr() {
		t.Fatalf("the new container has %s, not the address that has become free, %s", three.Addr(), two.Addr())
	}
	meet(t, one, three, far.Namespace)
	assertReaches(t, three, serve(t, l.Outside), node.Addr())
}

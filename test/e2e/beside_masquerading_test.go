package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	events "github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// published is the port of the node's that leads to a container.
const published = 8080

// containerRules are those that Docker has for a network of containers, one of which publishes a port.
func containerRules(network netip.Prefix, container netip.AddrPort) string {
	return fmt.Sprintf(`*nat
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A OUTPUT ! -d %[4]s -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s %[1]s ! -o box0 -j MASQUERADE
-A POSTROUTING -s %[2]s -d %[2]s -p tcp -m tcp --dport %[3]d -j MASQUERADE
-A DOCKER -i box0 -j RETURN
-A DOCKER ! -i box0 -p tcp -m tcp --dport %[5]d -j DNAT --to-destination %[6]s
COMMIT
`, network, only(container.Addr()), container.Port(), netfilters[wire.FamilyOf(container.Addr())].loopback, published, container)
}

// Rules that do not concern pods don't slow pods: those of a container network. Its containers, and the ports that they
// publish, are reached as ever.
func TestContainersBesidePods(t *testing.T) {
	t.Parallel()
	forEachFamily(t, func(t *testing.T, family []wire.Family) {
		l := startCluster(t, lab.Options{Nodes: 2, Families: family}, drops.NoMapping)
		node := l.Nodes[0]
		pod, near, far := addPod(t, node, "a"), addPod(t, node, "near"), addPod(t, l.Nodes[1], "far")
		container := box(t, l, node)
		inside := serve(t, container)
		names := netfilters[firstFamily(l)]
		direct := []netip.AddrPort{serve(t, near.Namespace), serve(t, far.Namespace), serve(t, l.Outside)}
		older := startSteadyFlows(t, pod.Namespace, direct...)

		rules := containerRules(boxNetwork[firstFamily(l)], inside)
		applyRules(t, node, rules, names.iptables+"-nft-restore", "-n")
		eventually(t, switchLimit, "the agent has followed the rules", func() bool { return isBesideMasquerading(t, node) })
		const told = "\nnetfilter  masquerades, but no pod's packets: nftables table %s nat, chain POSTROUTING: "
		if out, err := node.Ebpfctl(t.Context(), "status"); err != nil || !strings.Contains(string(out), fmt.Sprintf(told, names.nft)) || !strings.Contains(string(out), "-j MASQUERADE\n") {
			t.Errorf("error %v, status:\n%s", err, out)
		}
		assertBypass(t, pod, direct)

		at := netip.AddrPortFrom(node.Addr(), published)
		for _, from := range []*lab.Namespace{pod.Namespace, far.Namespace, l.Nodes[1].Namespace, l.Outside, node.Namespace} {
			if _, err := from.TCP(t.Context(), at); err != nil {
				t.Errorf("%s to the container's port: %v", from.Netns(), err)
			}
		}
		for _, to := range direct {
			if _, err := container.TCP(t.Context(), to); err != nil {
				t.Errorf("the container to %s: %v", to, err)
			}
		}
		if _, err := pod.TCP(t.Context(), inside); err != nil {
			t.Errorf("a pod to the container: %v", err)
		}

		// A rule that may concern pods, and back again: an agent that starts does not wait for rules that are gone.
		newer := startSteadyFlows(t, pod.Namespace, direct...)
		runOn(t, node, names.iptables+"-nft", "-t", "nat", "-A", "PREROUTING", "-p", "tcp", "--dport", "9", "-j", "REDIRECT", "--to-ports", "10")
		eventually(t, switchLimit, "the agent works beside netfilter", func() bool { return isBeside(t, node) })
		newest := startSteadyFlows(t, pod.Namespace, direct...)
		if _, err := pod.TCP(t.Context(), at); err != nil {
			t.Errorf("beside netfilter to the container's port: %v", err)
		}
		runOn(t, node, names.iptables+"-nft", "-t", "nat", "-D", "PREROUTING", "-p", "tcp", "--dport", "9", "-j", "REDIRECT", "--to-ports", "10")
		runOn(t, node, "conntrack", "-F") // what has been translated for pods would keep the level
		(&proxied{Lab: l}).restart(t)
		eventually(t, switchLimit, "the agent has followed the rule's end", func() bool { return isBesideMasquerading(t, node) })
		assertBypass(t, pod, direct)
		for _, flows := range []*steadyFlows{older, newer, newest} {
			flows.end(t)
		}
	})
}

// assertBypass has a pod open connections, of which the host's stack sees next to nothing: what waits for a neighbour.
func assertBypass(t *testing.T, pod *lab.Pod, to []netip.AddrPort) {
	t.Helper()
	const size, most = 1_000_000, 500_000 // bytes; older flows go on meanwhile
	for _, at := range to {
		if _, err := pod.TCP(t.Context(), at); err != nil { // the neighbour is known then
			t.Error(err)
		}
		walked := passed(t, pod.Node, wire.FromPod, events.Stack) + passed(t, pod.Node, wire.FromUplink, events.Stack)
		bypassed := passed(t, pod.Node, wire.FromPod, events.Delivered, events.Forwarded)
		stream, err := pod.DialTCP(t.Context(), at, 0)
		if err != nil {
			t.Error(err)
			continue
		}
		if err := stream.Echo(t.Context(), size); err != nil {
			t.Error(err)
		}
		if now := passed(t, pod.Node, wire.FromPod, events.Delivered, events.Forwarded); now < bypassed+size {
			t.Errorf("%s: %d bytes have bypassed the stack", at, now-bypassed)
		}
		if now := passed(t, pod.Node, wire.FromPod, events.Stack) + passed(t, pod.Node, wire.FromUplink, events.Stack); now > walked+most {
			t.Errorf("%s: %d bytes have walked the stack", at, now-walked)
		}
		stream.Close()
	}
}

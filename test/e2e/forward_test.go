package e2e

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// accepts counts the accepts that the agent has put into a node's forward chain.
func accepts(t *testing.T, node *lab.Node, program string) int {
	t.Helper()
	out, err := node.Exec(t.Context(), program, "-S", "FORWARD")
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return strings.Count(string(out), netfilter.ForwardComment)
}

// Where the policy of FORWARD is DROP, pods open connections to neighbours that their node has not asked for yet: to another node's
// pods and to the world. The agent puts its accepts back, and cleanup leaves none.
func TestForwardPolicyDrop(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 2, Families: families})
	pods := []*lab.Pod{addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[1], "b")}
	variants := []string{"-nft", "-legacy"} // of the first node, of the second
	each := func(do func(node *lab.Node, program string)) {
		for i, node := range l.Nodes {
			for _, family := range families {
				do(node, netfilters[family].iptables+variants[i])
			}
		}
	}
	stand := func(when string, want int) {
		t.Helper()
		each(func(node *lab.Node, program string) {
			eventually(t, 2*time.Second, when, func() bool { return accepts(t, node, program) == want })
		})
	}
	each(func(node *lab.Node, program string) { runOn(t, node, program, "-P", "FORWARD", "DROP") })
	stand("accepts stand", 2)
	openFirst(t, l, pods)
	each(func(node *lab.Node, program string) { runOn(t, node, program, "-F", "FORWARD") })
	stand("accepts are put back", 2)
	node := l.Nodes[0]
	eventually(t, answerLimit, "no problems", func() bool {
		out, err := node.Ebpfctl(t.Context(), "status")
		return err == nil && strings.Contains(string(out), "No problems.")
	})
	if _, err := node.StopAgent(); err != nil {
		t.Fatal(err)
	}
	if err := cleanup(t, node); err != nil {
		t.Fatal(err)
	}
	if n := accepts(t, node, netfilters[wire.IPv4].iptables+"-nft") + accepts(t, node, netfilters[wire.IPv6].iptables+"-nft"); n != 0 {
		t.Errorf("cleanup left %d accepts", n)
	}
}

// openFirst has each of two pods open connections, each the first since the nodes have forgotten their neighbours.
func openFirst(t *testing.T, l *lab.Lab, pods []*lab.Pod) {
	t.Helper()
	for _, family := range families {
		for from, to := range map[*lab.Pod]*lab.Pod{pods[0]: pods[1], pods[1]: pods[0]} {
			for _, at := range []netip.AddrPort{serveOver(t, to.Namespace, family), serveOver(t, l.Outside, family)} {
				for _, node := range l.Nodes {
					runOn(t, node, "ip", "neigh", "flush", "dev", lab.Uplink)
				}
				if _, err := from.TCP(within(t, 5*time.Second), at); err != nil {
					t.Error(err)
				}
			}
		}
	}
}

// Where a rule of the administrator's drops all that the stack forwards, neighbours are asked for past it.
func TestForwardRuleDrop(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 2, Families: families})
	pods := []*lab.Pod{addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[1], "b")}
	for _, node := range l.Nodes {
		for _, family := range families {
			runOn(t, node, netfilters[family].iptables+"-nft", "-A", "FORWARD", "-j", "DROP")
		}
	}
	openFirst(t, l, pods)
}

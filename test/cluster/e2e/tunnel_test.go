package e2e

import (
	"context"
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// Node by node the network goes over to the tunnel, and back, by a change of its DaemonSet. Flows that are older than a change live through
// it, new ones come, and no node is without a network for a moment. In between everybody reaches everybody through Services, as ever.
func TestRoutingModeChanged(t *testing.T) {
	s := newStage(t)
	goesBy(t, s.standing, "direct")
	since := available(t, s.standing)
	afterFailure(t, s.standing, func(ctx context.Context) error { return s.setRoutingMode(ctx, "EBPF_AGENT_ROUTING_MODE-") })
	isInPage(t, "between-nodes.md", "Only what netfilter masquerades on its way to")
	change := func(setting string) {
		masqueraded := startTraffic(t, path{"a Service from the world", fresh{s.Fabric}, s.behind.byPorts})
		undisturbedOn(t, s.standing, unmasqueraded(s.standing), func() {
			if err := s.setRoutingMode(t.Context(), setting); err != nil {
				t.Fatal(err)
			}
		})
		endOnce(t, masqueraded)
	}
	change("EBPF_AGENT_ROUTING_MODE=vxlan")
	goesBy(t, s.standing, "tunnel")
	s.tunnel = tunnelAddrs(t, s.standing)
	t.Cleanup(func() { s.tunnel = nil })
	// They run beside each other, and to the end before it goes on.
	t.Run("Services", func(t *testing.T) { runServiceTests(t, s, false) })
	podsAndNodes(t, s.standing)
	change("EBPF_AGENT_ROUTING_MODE-")
	goesBy(t, s.standing, "direct")
	for node, at := range available(t, s.standing) {
		if at != since[node] {
			t.Errorf("%s has been without a network: since %s it has one, before since %s", node.Name, at, since[node])
		}
	}
}

// unmasqueraded are paths on which no node's netfilter masquerades what it sends to another node's pod.
func unmasqueraded(s *standing) []path {
	return append(direct(s), path{"a Service", s.client, s.behind.byAddr}, path{"a Service of another node", s.far, s.behind.byAddr})
}

// endOnce stops traffic that netfilter masquerades on its way to another node's pod. The kernel forgets such a flow, with the packet that it
// sees first, when its way out becomes another interface: each kind may have lost what was under way then, and no more.
func endOnce(t *testing.T, tr *traffic) {
	t.Helper()
	all := tr.lostAtLast()
	for name, count := range tr.counts {
		lost := slices.DeleteFunc(slices.Clone(all), func(line string) bool {
			_, what, _ := strings.Cut(line, " ") // after the time
			return !strings.HasPrefix(what, name+":")
		})
		if len(lost) > 1 || count < 5 {
			t.Errorf("%s: %d exchanges, %d lost; want five or more, and one lost at most", name, count, len(lost))
		}
		t.Logf("%s: %d exchanges, lost %q", name, count, lost)
	}
}

// setRoutingMode changes the DaemonSet, as kubectl takes it, and waits until all agents have followed.
func (s *standing) setRoutingMode(ctx context.Context, setting string) error {
	if _, err := s.Kubectl(ctx, "-n", cluster.Namespace, "set", "env", "daemonset/"+cluster.DaemonSet, setting); err != nil {
		return err
	}
	return s.WaitReady(ctx)
}

// available is since when each Node has said that it has a network.
func available(t *testing.T, s *standing) map[*cluster.Machine]metav1.Time {
	t.Helper()
	all := map[*cluster.Machine]metav1.Time{}
	for _, node := range s.Nodes {
		condition, tainted, err := network(t.Context(), s, node)
		if err != nil || tainted || condition.Status != core.ConditionFalse {
			t.Fatalf("%s says of its network: %+v, tainted %v, error %v", node.Name, condition, tainted, err)
		}
		all[node] = condition.LastTransitionTime
	}
	return all
}

// goesBy checks which way packets between pods of different nodes go: what the agents say, and what the programs count.
func goesBy(t *testing.T, s *standing, way string) {
	t.Helper()
	before := map[*cluster.Machine]float64{}
	for _, node := range s.Nodes {
		before[node] = tunnelled(t, s, node)
		for _, peer := range peers(t, s, node) {
			if peer.Way != way {
				t.Errorf("%s reaches pods of %s by %q, want %q", node.Name, peer.Name, peer.Way, way)
			}
		}
	}
	const times = 20
	for range times {
		seesUDP(t, "a pod of another node", s.client, podPorts(s.far.Addr).udp, s.client.Addr)
	}
	for _, node := range s.Nodes {
		came := tunnelled(t, s, node) - before[node]
		if way == "tunnel" && came < times || way == "direct" && came > 0 {
			t.Errorf("%v packets came to %s by the tunnel, after %d to and from a pod of its own; packets go by %s", came, node.Name, times, way)
		}
	}
}

type peer struct{ Name, Way string }

// peers are the other nodes, as a node's agent has them.
func peers(t *testing.T, s *standing, node *cluster.Machine) []peer {
	t.Helper()
	out, err := ebpfctl(t.Context(), s.Cluster, node, "status", "-o", "json")
	var status struct{ Peers []peer }
	if err == nil {
		err = json.Unmarshal([]byte(out), &status)
	}
	if err != nil || len(status.Peers) != len(s.Nodes)-1 {
		t.Fatalf("the status of %s has %d peers, error %v:\n%s", node.Name, len(status.Peers), err, out)
	}
	return status.Peers
}

// tunnelled counts the packets that have come to a node through the tunnel.
func tunnelled(t *testing.T, s *standing, node *cluster.Machine) (packets float64) {
	t.Helper()
	for _, record := range dump(t, s, node, "traffic") {
		if record["direction"] == "from_tunnel" {
			n, _ := record["packets"].(float64)
			packets += n
		}
	}
	return packets
}

// tunnelAddrs are the addresses of the nodes' tunnel devices, and what a node masquerades to when it sends through its own.
func tunnelAddrs(t *testing.T, s *standing) map[*cluster.Machine]netip.Addr {
	t.Helper()
	all := map[*cluster.Machine]netip.Addr{}
	for _, node := range s.Nodes {
		all[node] = podCIDR(t, s, node).Addr()
	}
	return all
}

// masqueraded is the address by which somebody sees what a node masquerades and sends there: that of the device it leaves by.
func (s *standing) masqueraded(node *cluster.Machine, to *cluster.Pod) netip.Addr {
	if addr, is := s.tunnel[node]; is && to.Node != node && !to.HostNetwork {
		return addr
	}
	return node.Addr
}

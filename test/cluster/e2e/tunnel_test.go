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
	s := newStage(t, running(t))
	goBy(t, s.standing, "direct")
	since := available(t, s.standing)
	afterFailure(t, s.standing, func(ctx context.Context) error { return s.SetRoutingMode(ctx, "") })
	isInPage(t, "between-nodes.md", "Only what netfilter masquerades on its way to")
	change := func(mode string) {
		masqueraded := startTraffic(t, path{"a Service from the world", fresh{s.Fabric}, s.behind.byPorts})
		undisturbedOn(t, s.standing, slices.Concat(unmasqueraded(s.standing), overOthers(t, s.standing)), func() {
			if err := s.SetRoutingMode(t.Context(), mode); err != nil {
				t.Fatal(err)
			}
		})
		endOnce(t, masqueraded)
	}
	change("vxlan")
	goBy(t, s.standing, "tunnel")
	var err error
	if s.tunnel, err = tunnelAddrs(t.Context(), s.standing); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.tunnel = nil })
	// They run beside each other, and to the end before it goes on.
	t.Run("Services", func(t *testing.T) { runServiceTests(t, s, false) })
	inEachFamily(t, s.standing, podsAndNodes)
	change("")
	goBy(t, s.standing, "direct")
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

// goBy checks which way packets of every family go.
func goBy(t *testing.T, s *standing, way string) {
	t.Helper()
	for _, family := range s.Options.Families {
		goesBy(t, seenIn(t, s, family), way)
	}
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

// peers are the other nodes' podCIDRs, as a node's agent has them.
func peers(t *testing.T, s *standing, node *cluster.Machine) []peer {
	t.Helper()
	out, err := ebpfctl(t.Context(), s.Cluster, node, "status", "-o", "json")
	var status struct{ Peers []peer }
	if err == nil {
		err = json.Unmarshal([]byte(out), &status)
	}
	if err != nil || len(status.Peers) != len(s.Options.Families)*(len(s.Nodes)-1) {
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
func tunnelAddrs(ctx context.Context, s *standing) (map[*cluster.Machine]netip.Addr, error) {
	all := map[*cluster.Machine]netip.Addr{}
	for _, node := range s.Nodes {
		podCIDR, err := findPodCIDR(ctx, s, node)
		if err != nil {
			return nil, err
		}
		all[node] = podCIDR.Addr()
	}
	return all, nil
}

// masqueraded is the address by which somebody sees what a node masquerades and sends there: that of the device it leaves by. A pod's
// device has none: the kernel takes the node's for IPv4, and for IPv6 the one that is most like the pod's.
func (s *standing) masqueraded(node *cluster.Machine, to *cluster.Pod) netip.Addr {
	if addr, is := s.alike[node]; is && to.Node == node && !to.HostNetwork {
		return addr
	}
	if addr, is := s.tunnel[node]; is && to.Node != node && !to.HostNetwork {
		return addr
	}
	return node.Addr
}

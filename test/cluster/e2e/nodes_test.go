package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// manyNodes is how many Node objects without machines are added by hand.
const manyNodes = 500

func TestManyNodes(t *testing.T) {
	s := running(t)
	// Pods with an address that is not of their node's podCIDR have one of their own: they are not as many everywhere.
	before := map[*cluster.Machine]int{}
	for _, node := range s.Nodes {
		before[node] = destinations(t, s, node)
	}
	afterwards(t, s, s.deleteNodes)
	undisturbed(t, s, func() {
		started := time.Now()
		var group errgroup.Group
		group.SetLimit(20)
		for i := range manyNodes {
			group.Go(func() error {
				return addNode(t, s, fmt.Sprintf("paper-%d", i),
					netip.AddrFrom4([4]byte{172, 30, byte(1 + i/250), byte(1 + i%250)}),
					netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(100 + i/250), byte(i % 250), 0}), 24))
			})
		}
		if err := group.Wait(); err != nil {
			t.Fatal(err)
		}
		t.Logf("%d Nodes were added in %.1f s", manyNodes, time.Since(started).Seconds())
		for _, node := range s.Nodes {
			waitDestinations(t, s, node, before[node]+2*manyNodes)
		}
		if err := s.deleteNodes(t.Context()); err != nil {
			t.Error(err)
		}
		for _, node := range s.Nodes {
			waitDestinations(t, s, node, before[node])
		}
	})
}

func TestPodCIDRConflict(t *testing.T) {
	s := running(t)
	client, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	owner, err := client.CoreV1().Nodes().Get(t.Context(), s.Nodes[1].Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	afterwards(t, s, s.deleteNodes)
	undisturbed(t, s, func() {
		err := addNode(t, s, "paper-thief", netip.MustParseAddr("172.30.9.9"), netip.MustParsePrefix(owner.Spec.PodCIDR))
		if err != nil {
			t.Fatal(err)
		}
		err = cluster.Poll(within(t, stepLimit), "the conflict is told", func(ctx context.Context) error {
			// The status is an error as long as there is a problem; what it says is what counts.
			said, _ := ebpfctl(ctx, s.Cluster, s.Nodes[0], "status")
			if !strings.Contains(said, "paper-thief") {
				return fmt.Errorf("ebpfctl status says %s", said)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		if err := s.deleteNodes(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// addNode adds a Node that no kubelet stands for; deleteNodes deletes all of them.
func addNode(t *testing.T, s *standing, name string, addr netip.Addr, podCIDR netip.Prefix) error {
	client, err := s.Client()
	if err != nil {
		return err
	}
	node := &core.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"paper": "yes"}},
		Spec:       core.NodeSpec{PodCIDR: podCIDR.String(), PodCIDRs: []string{podCIDR.String()}, Unschedulable: true},
		Status:     core.NodeStatus{Addresses: []core.NodeAddress{{Type: core.NodeInternalIP, Address: addr.String()}}},
	}
	// Create takes the status of a Node too.
	_, err = client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{})
	return err
}

func (s *standing) deleteNodes(ctx context.Context) error {
	client, err := s.Client()
	if err != nil {
		return err
	}
	return client.CoreV1().Nodes().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "paper=yes"})
}

func waitDestinations(t *testing.T, s *standing, node *cluster.Machine, want int) {
	t.Helper()
	started := time.Now()
	err := cluster.Poll(within(t, stepLimit), fmt.Sprintf("%s has %d destinations", node.Name, want), func(context.Context) error {
		if got := destinations(t, s, node); got != want {
			return fmt.Errorf("it has %d", got)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	t.Logf("%s has %d destinations %.1f s later", node.Name, want, time.Since(started).Seconds())
}

func destinations(t *testing.T, s *standing, node *cluster.Machine) int {
	t.Helper()
	return len(dump(t, s, node, "destinations"))
}

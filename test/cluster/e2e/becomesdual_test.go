package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// testBecomesDual gives a cluster of one IPv4 node a second family, with which the next node joins. Nothing of IPv4 notices. The older node
// misses the other family alone, and says so.
func testBecomesDual(t *testing.T) {
	s := site(t, cluster.Options{Nodes: 1})
	if err := s.Install(t.Context()); err != nil {
		t.Fatal(err)
	}
	old := s.Nodes[0]
	s.client, s.near = addPod(t, s, "client", old), addPod(t, s, "near", old)
	undisturbedOn(t, s, []path{pathTo("the same node", s.client, s.near.Addr)}, func() {
		if err := s.AddFamily(t.Context(), core.IPv6Protocol); err != nil {
			t.Fatal(err)
		}
		node, err := s.AddNode(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := s.WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.far = addPod(t, s, "far", node)
		later := addPod(t, s, "later", old)
		if len(later.Addrs) != 1 || len(s.far.Addrs) != 2 {
			t.Fatalf("a pod of the older node has %v, one of the newer node %v", later.Addrs, s.far.Addrs)
		}
		meet(t, s, s.client, later, s.far)
	})
	misses(t, s, old)
	newer := &standing{Cluster: s.In(core.IPv6Protocol)}
	far, err := newer.ReadyPod(t.Context(), s.far.Name)
	if err != nil {
		t.Fatal(err)
	}
	near, err := newer.AddPod(t.Context(), "beside", far.Node, nil)
	if err != nil {
		t.Fatal(err)
	}
	meet(t, newer, near, far)
	if out, err := ebpfctl(t.Context(), s.Cluster, far.Node, "status"); err != nil {
		t.Errorf("the status of %s: %v\n%s", far.Node.Name, err, out)
	}
}

// misses waits until a Node says that its pods get no address of IPv6, and that it carries pods nonetheless.
func misses(t *testing.T, s *standing, node *cluster.Machine) {
	t.Helper()
	why := fmt.Sprintf("Node %s has no IPv6 podCIDR", node.Name)
	err := cluster.Poll(within(t, stepLimit), node.Name+" misses IPv6", func(ctx context.Context) error {
		c, tainted, err := network(ctx, s, node)
		status, _ := ebpfctl(ctx, s.Cluster, node, "status") // an error, as long as there is a problem
		if err == nil && (tainted || c.Status != core.ConditionFalse || !strings.Contains(c.Message, why) || !strings.Contains(status, why)) {
			err = errors.New(c.Message + "\n" + status)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

package e2e

import (
	"context"
	"fmt"
	"testing"

	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// dual are the families of the cluster of all tests.
var dual = []core.IPFamily{core.IPv4Protocol, core.IPv6Protocol}

// in is the cluster as a family sees it now: the addresses of nodes, pods and Services and of the world are of that family.
func (s *standing) in(ctx context.Context, family core.IPFamily) (*standing, error) {
	seen := &standing{Cluster: s.In(family), told: s.told}
	for _, pod := range []struct{ from, to **cluster.Pod }{{&s.client, &seen.client}, {&s.near, &seen.near}, {&s.far, &seen.far}} {
		var err error
		if *pod.to, err = seen.ReadyPod(ctx, (*pod.from).Name); err != nil {
			return nil, err
		}
	}
	if err := seen.findBehind(ctx); err != nil {
		return nil, err
	}
	addrs, err := tunnelAddrs(ctx, seen)
	if s.tunnel != nil {
		seen.tunnel = addrs
	}
	if family == core.IPv6Protocol {
		seen.alike = addrs
	}
	return seen, err
}

// inEachFamily runs a test for each family, with the cluster as that sees it.
func inEachFamily(t *testing.T, s *standing, test func(*testing.T, *standing)) {
	t.Helper()
	for _, family := range s.Options.Families {
		t.Run(string(family), func(t *testing.T) { test(t, seenIn(t, s, family)) })
	}
}

func seenIn(t *testing.T, s *standing, family core.IPFamily) *standing {
	t.Helper()
	seen, err := s.in(within(t, stepLimit), family)
	if err != nil {
		t.Fatal(err)
	}
	return seen
}

// overOthers are paths between the nodes, and out of them, over the families that are not the cluster's first.
func overOthers(t *testing.T, s *standing) (paths []path) {
	t.Helper()
	for _, family := range s.Options.Families[1:] {
		seen := seenIn(t, s, family)
		over := " over " + string(family)
		paths = append(paths, pathTo("another node"+over, seen.client, seen.far.Addr), pathTo("the world from another node"+over, seen.far, seen.World()))
	}
	return paths
}

// Nodes and pods have an address of each family, in their order, and a node's agent misses nothing.
func TestAddresses(t *testing.T) {
	s := running(t)
	client, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	for _, pod := range []*cluster.Pod{s.client, s.near, s.far} {
		var families []core.IPFamily
		for _, addr := range pod.Addrs {
			families = append(families, cluster.FamilyOf(addr))
		}
		if fmt.Sprint(families) != fmt.Sprint(s.Options.Families) {
			t.Errorf("pod %s has %v, want one address of each of %v", pod.Name, pod.Addrs, s.Options.Families)
		}
	}
	for _, m := range s.Nodes {
		isAvailable(t, s, m)
		if out, err := ebpfctl(t.Context(), s.Cluster, m, "status"); err != nil {
			t.Errorf("the status of %s: %v\n%s", m.Name, err, out)
		}
		node, err := client.CoreV1().Nodes().Get(t.Context(), m.Name, metav1.GetOptions{})
		if err != nil || len(node.Spec.PodCIDRs) != len(s.Options.Families) {
			t.Errorf("%s has podCIDRs %v, error %v", m.Name, node.Spec.PodCIDRs, err)
		}
	}
}

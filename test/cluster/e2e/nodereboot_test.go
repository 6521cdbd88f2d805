package e2e

import (
	"context"
	"fmt"
	"maps"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

func TestNodeRebooted(t *testing.T) {
	s := running(t)
	node, bystander := s.Nodes[1], s.Nodes[0]
	before := dropsOn(t, s, bystander)
	tr := startTraffic(t, nearAndWorld(s)...)
	if err := s.Reboot(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	// Until the node's kubelet reports, the API tells of the pods as they were.
	err := cluster.Poll(within(t, stepLimit), "pod far is back", func(ctx context.Context) error {
		if _, err := node.Running(ctx, "kubelet"); err != nil {
			return err
		}
		far, err := s.ReadyPod(ctx, s.far.Name)
		if err != nil {
			return err
		}
		// Another pod may have its address now.
		name, err := ask(ctx, s.client, at(far.Addr, cluster.HTTPPort), "/hostname")
		if err == nil && name != far.Name {
			err = fmt.Errorf("%q answers at %s", name, far.Addr)
		}
		if err == nil {
			s.far = far
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.WaitReady(t.Context()); err != nil {
		t.Error(err)
	}
	tr.end(t)
	sees(t, s.client, at(s.far.Addr, cluster.HTTPPort), s.client.Addr)
	sees(t, s.far, at(s.near.Addr, cluster.HTTPPort), s.far.Addr)
	balanced(t, s, node)
	// Those of the node itself begin anew; who asks meanwhile for the pod that was there is told that there is none.
	own := dropsOn(t, s, node)
	delete(own, node.Name+" NO_ENDPOINT")
	if after := dropsOn(t, s, bystander); !maps.Equal(before, after) || len(own) > 0 {
		t.Errorf("%s dropped %v, before %v; %s since it is back %v", bystander.Name, after, before, node.Name, own)
	}
}

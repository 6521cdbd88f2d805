package main

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// A change is measured by packets: where none takes another way, there is nothing to measure.
func TestChangeOfNothing(t *testing.T) {
	priv.Require(t)
	a := &agents{changes: 1}
	defer func() {
		if err := a.close(); err != nil {
			t.Error(err)
		}
	}()
	const nodes = 10
	_, err := a.with(t.Context(), result.Workload{Size: nodes}, func(node *lab.Node, _ source) (result.Sample, error) {
		if err := errors.Join(node.StartAgent(), node.WaitReady(t.Context())); err != nil {
			return result.Sample{}, err
		}
		p, err := a.newProbe(t.Context(), node, nodes)
		if err != nil {
			return result.Sample{}, err
		}
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		nothing := func() error { return nil }
		if delay, err := p.flip(ctx, nothing, p.variants[1].Addr().Next()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a change that nobody made took effect after %s, error %v", delay, err)
		}
		return result.Sample{}, p.close()
	})
	if err != nil {
		t.Error(err)
	}
	deaf := &apiServer{specs: func(variant int) []lab.NodeSpec { return a.specs(nodes, variant) }}
	if publish, err := deaf.stage(1); err != nil || publish() == nil {
		t.Errorf("an event was sent to nobody, error %v", err)
	}
}

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
	var err error
	if a.lab, err = lab.New(t.Context(), lab.Options{Nodes: 1, FabricBits: 16}); err != nil {
		t.Fatal(err)
	}
	if _, err := a.feed(result.Workload{Size: nodes}); err != nil {
		t.Fatal(err)
	}
	if err := a.lab.Nodes[0].StartAgent(); err != nil {
		t.Fatal(err)
	}
	p, err := a.newProbe(t.Context(), nodes, false)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	nothing := func() error { return nil }
	if delay, err := p.flip(ctx, nothing, p.variants[1].Addr().Next()); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a change that nobody made took effect after %s, error %v", delay, err)
	}
	if err := p.close(); err != nil {
		t.Error(err)
	}
	deaf := &apiServer{nodes: &resource{}}
	if publish, err := deaf.stage(nodes-1, a.specs(nodes, 1)[nodes-1]); err != nil || publish() == nil {
		t.Errorf("an event was sent to nobody, error %v", err)
	}
}

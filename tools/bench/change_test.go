package main

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// A change is measured by packets: where none takes another way, there is nothing to measure.
func TestChange(t *testing.T) {
	priv.Require(t)
	a := &agents{nodes: fewNodes, changes: 3}
	defer func() {
		if err := a.close(); err != nil {
			t.Error(err)
		}
	}()
	for range 2 { // the second one finds what the first one has left
		sample, err := a.change(t.Context(), fewNodes)
		if err != nil {
			t.Fatal(err)
		}
		delay := sample.Distributions["delay"]
		if p50 := sample.Values[result.P50]; delay.Total() != 3 || p50 <= 0 || p50 > 1 {
			t.Errorf("%d changes, half of them within %g s", delay.Total(), p50)
		}
	}

	node, err := a.node(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := node.StartAgent(); err != nil {
		t.Fatal(err)
	}
	if err := node.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	p, err := a.newProbe(t.Context(), node, fewNodes)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(p.close(), restart(node)); err != nil {
			t.Error(err)
		}
	}()
	same, err := a.render(fewNodes, 0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	nobodys := podCIDR(fewNodes).Addr().Next().Next()
	if delay, err := a.flip(ctx, p, same, nobodys); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a list without that node's podCIDR took effect after %s, error %v", delay, err)
	}
}

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
	for name, measure := range map[string]func(context.Context, int) (result.Sample, error){"file": a.changeInFile, "API": a.changeOverAPI} {
		for range 2 { // the second one finds what the first one has left
			sample, err := measure(t.Context(), fewNodes)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			delay := sample.Distributions["delay"]
			if p50 := sample.Values[result.P50]; delay.Total() != 3 || p50 <= 0 || p50 > 1 {
				t.Errorf("%s: %d changes, half of them within %g s", name, delay.Total(), p50)
			}
			t.Logf("%s: %g", name, sample.Values[result.P50])
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
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	nobodys := podCIDR(fewNodes).Addr().Next().Next()
	nothing := func() error { return nil }
	if delay, err := p.flip(ctx, nothing, nobodys); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a change that nobody made took effect after %s, error %v", delay, err)
	}
	deaf := &apiServer{}
	if publish, err := deaf.stage(a.specs(fewNodes, 1)[fewNodes-1]); err != nil || publish() == nil {
		t.Errorf("an event was sent to nobody, error %v", err)
	}
}

package main

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/load"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

func TestBacklogDrops(t *testing.T) {
	if n, err := backlogDrops("22bc0177 0000000a 00000005\n09d03c20 00000001 00000000\n"); n != 11 || err != nil {
		t.Errorf("%d, %v; want 11", n, err)
	}
	for _, table := range []string{"22bc0177\n", "22bc0177 x 0\n"} {
		if n, err := backlogDrops(table); err == nil {
			t.Errorf("%q was read as %d", table, n)
		}
	}
}

// stand builds networks for a test.
func stand(t *testing.T, p profile, names ...string) *machine {
	t.Helper()
	priv.Require(t)
	m, err := newMachine(t.Context(), plan{profile: p, modes: names}, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// tried takes a sample until nothing disturbs it, or it is one that a busy machine has to do with.
func tried(t *testing.T, m *machine, i item, mode string) (sample result.Sample) {
	t.Helper()
	var err error
	for range 5 {
		sample, err = m.take(t.Context(), i, mode)
		if err == nil || errors.Is(err, load.ErrStarved) && sample.Values != nil {
			return sample
		}
		if !errors.Is(err, load.ErrNotMeasured) {
			t.Fatalf("%s in mode %s: %v", i, mode, err)
		}
	}
	t.Logf("%s in mode %s: %v", i, mode, err)
	return result.Sample{}
}

// Every workload has the values that it is about in the modes that it is for, and the networks prove it.
func TestSamples(t *testing.T) {
	p := profile{duration: 150 * time.Millisecond, warmup: 20 * time.Millisecond, pods: 2, batches: 1, nodes: 50, changes: 2}
	m := stand(t, p, modes.EBPF, modes.IPTables)
	points := map[string]int{"nodes": 50, "services": 20, "services-udp": 20, "live": 500}
	measured := 0
	for _, w := range result.Catalog() {
		i := item{workload: w.Name, point: points[w.Name], takes: time.Second}
		among := []string{modes.EBPF, modes.IPTables}
		switch w.Name {
		case "bpf":
			i.path, among = result.AcrossNodes, among[:1]
		case "agent", "change", "change5000":
			among = among[:1]
		case "cni", "cni10":
		case "flows", "live":
			i.path = result.Egress
		default:
			i.path = result.AcrossNodes
		}
		for _, mode := range among {
			sample := tried(t, m, i, mode)
			if sample.Values == nil {
				continue // the machine is busy
			}
			measured++
			for _, metric := range w.Metrics {
				// CPU time is counted in ticks that a short window may miss.
				if v := sample.Values[metric.Name]; metric.Of == "" && metric.Name != result.CPUPer && v <= 0 {
					t.Errorf("%s in mode %s: %s is %g", i, mode, metric.Name, v)
				}
				if metric.Of != "" && sample.Distributions[metric.Of].Total() == 0 {
					t.Errorf("%s in mode %s: no durations for %s", i, mode, metric.Name)
				}
			}
		}
	}
	if all := 2*len(result.Catalog()) - 4; measured < all*2/3 {
		t.Errorf("%d samples of %d measured anything", measured, all)
	}
}

// A table that has not as many flows as the sample says is no sample.
func TestLiveFlowsAreCounted(t *testing.T) {
	m := stand(t, profile{duration: 50 * time.Millisecond}, modes.EBPF)
	network := m.networks[modes.EBPF]
	if err := network.Forget(); err != nil {
		t.Fatal(err)
	}
	if err := holds(network, 100); err == nil || !strings.Contains(err.Error(), "has 0 flows, want 100 to 150") {
		t.Errorf("an empty table: %v", err)
	}
	target, err := m.target(network, result.Egress)
	if err != nil {
		t.Fatal(err)
	}
	held, err := load.HoldFlows(t.Context(), target, 200)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	if err := holds(network, 200); err != nil {
		t.Error(err)
	}
	if err := holds(network, 100); err == nil || !strings.Contains(err.Error(), "want 100 to 150") {
		t.Errorf("too many flows: %v", err)
	}
}

package main

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/load"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// tiny is the full profile in small: each of its workloads, on each path and at each end of its sweeps.
func tiny() profile {
	p := full()
	p.name, p.rounds, p.duration, p.warmup = "tiny", 1, 60*time.Millisecond, 20*time.Millisecond
	p.pods, p.batches, p.nodes, p.changes = 1, 1, 50, 2
	for i := range p.sweeps {
		ends := []int{p.sweeps[i].points[0], 100}
		p.sweeps[i].points = ends
	}
	return p
}

// Every workload that the full profile has, in ours and in the classical network, through all that a run does with a sample: it has every value
// that a table shows.
func TestEveryWorkload(t *testing.T) {
	priv.Require(t)
	made, err := newPlan(tiny(), selection{modes: []string{modes.EBPF, modes.IPTables}})
	if err != nil {
		t.Fatal(err)
	}
	m, err := newMachine(t.Context(), made, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.close(); err != nil {
			t.Error(err)
		}
	}()
	measured := map[string]bool{}
	for _, i := range made.items {
		for _, mode := range i.modes {
			sample := patiently(t, m, i, mode)
			valued(t, i, mode, sample)
			measured[i.workload] = true
		}
	}
	for _, w := range result.Catalog() {
		if !measured[w.Name] {
			t.Errorf("the full profile never measures %s", w.Name)
		}
	}
}

// patiently takes a sample until nothing disturbs it. When the machine is too busy for that, one that was only starved of CPU time will do:
// how fast anything is, is not looked at.
func patiently(t *testing.T, m *machine, i item, mode string) (sample result.Sample) {
	t.Helper()
	var err error
	for range 10 {
		sample, err = m.take(t.Context(), i, mode)
		if err == nil || errors.Is(err, load.ErrStarved) && sample.Values != nil {
			return sample
		}
		if !errors.Is(err, load.ErrNotMeasured) {
			break
		}
	}
	t.Errorf("%s, %s: %v", i, mode, err)
	return sample
}

// valued complains of a metric that is neither a value nor a distribution of the sample.
func valued(t *testing.T, i item, mode string, sample result.Sample) {
	t.Helper()
	if sample.Values == nil {
		return // has been complained of
	}
	w, ok := result.Find(i.workload)
	if !ok {
		t.Fatalf("the catalog has no %s", i.workload)
	}
	for _, metric := range w.Metrics {
		// In a window this short the ticks of a CPU's time may all be some other's.
		if metric.Name == result.CPUPer {
			continue
		}
		if metric.Of == "" && sample.Values[metric.Name] <= 0 || metric.Of != "" && sample.Distributions[metric.Of].Total() == 0 {
			t.Errorf("%s, %s: no %s in %v", i, mode, metric.Name, sample.Values)
		}
	}
	if i.path == "" || i.workload == "bpf" {
		return
	}
	// What the report says of rows that were missed.
	for _, name := range []string{"cpu-client", "cpu-server"} {
		if sample.Values[name] <= 0 {
			t.Errorf("%s, %s: no %s in %v", i, mode, name, sample.Values)
		}
	}
}

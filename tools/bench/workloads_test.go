package main

import (
	"errors"
	"testing"
	"time"

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
		p.sweeps[i].points = []int{p.sweeps[i].points[0], 100}
	}
	return p
}

// Every workload that the full profile has, in ours and in the classical network, through all that a run does with a sample: it has every value
// that a table shows.
func TestEveryWorkload(t *testing.T) {
	made, err := newPlan(tiny(), selection{modes: []string{modes.EBPF, modes.IPTables}})
	if err != nil {
		t.Fatal(err)
	}
	m := stand(t, made.profile, made.modes...)
	taken, excused, known, measured := 0, 0, map[string]bool{}, map[string]bool{}
	for _, i := range made.items {
		known[i.workload] = true
		for _, mode := range i.modes {
			taken++
			if sample := persistently(t, m, i, mode); sample.Values != nil {
				valued(t, i, mode, sample)
				measured[i.workload+", "+mode] = true
			} else {
				excused++
			}
		}
	}
	// A third may be excused on a machine that is busy, but no workload as a whole.
	for _, i := range made.items {
		for _, mode := range i.modes {
			if !measured[i.workload+", "+mode] {
				t.Errorf("%s was never measured in mode %s", i.workload, mode)
			}
		}
	}
	for _, w := range result.Catalog() {
		if !known[w.Name] {
			t.Errorf("the full profile never measures %s", w.Name)
		}
	}
	if excused > taken/3 {
		t.Errorf("%d samples of %d measured nothing; is the machine that busy?", excused, taken)
	}
}

// Each mode proves its packets' way by counters of its own: all of them, through all that a run does with a sample.
func TestEveryMode(t *testing.T) {
	made, err := newPlan(tiny(), selection{workloads: []string{"udp64", "crr", "flows"}})
	if err != nil {
		t.Fatal(err)
	}
	m := stand(t, made.profile, made.modes...)
	measured := map[string]bool{}
	for _, i := range made.items {
		for _, mode := range i.modes {
			if sample := persistently(t, m, i, mode); sample.Values != nil {
				valued(t, i, mode, sample)
				measured[mode+", "+i.path] = true
			}
		}
	}
	for _, mode := range made.modes {
		for _, path := range result.Paths() {
			if !measured[mode+", "+path] {
				t.Errorf("nothing was measured in mode %s, %s", mode, path)
			}
		}
	}
}

// persistently takes a sample until nothing disturbs it, or what does leaves something to look at: how fast anything is, is not looked at. On a
// machine that is busy all the time there may be nothing; any error but that is one.
func persistently(t *testing.T, m *machine, i item, mode string) (sample result.Sample) {
	t.Helper()
	defer func(as time.Duration) { m.profile.duration = as }(m.profile.duration)
	var err error
	for range 5 {
		sample, err = m.take(t.Context(), i, mode)
		if err == nil || errors.Is(err, load.ErrStarved) && sample.Values != nil {
			return sample
		}
		if !errors.Is(err, load.ErrNotMeasured) {
			t.Errorf("%s, %s: %v", i, mode, err)
			return result.Sample{}
		}
		if i.workload == "rr" { // which wants a thousand transactions, however long one takes here
			m.profile.duration *= 2
		}
	}
	t.Logf("%s, %s: %v", i, mode, err)
	return result.Sample{}
}

// valued complains of a metric that is neither a value nor a distribution of the sample.
func valued(t *testing.T, i item, mode string, sample result.Sample) {
	t.Helper()
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

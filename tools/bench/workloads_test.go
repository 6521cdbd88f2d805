package main

import (
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/load"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// stand builds networks for a test.
func stand(t *testing.T, p plan) *machine {
	t.Helper()
	priv.Require(t)
	m, err := newMachine(t.Context(), p, slog.New(slog.NewTextHandler(t.Output(), nil)))
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

// tiny is the full plan in small: each of its workloads, on each path whose proof is another one, and at two points of its sweeps; in ours and in the
// classical network.
func tiny(t *testing.T) plan {
	t.Helper()
	p := full()
	p.rounds, p.duration, p.warmup, p.sustained, p.pods, p.rest, p.changes = 1, 60*time.Millisecond, 20*time.Millisecond, 200*time.Millisecond, 1, time.Second, 2
	made, err := newPlan(p, nil, result.Names(false))
	if err != nil {
		t.Fatal(err)
	}
	for n, g := range made.groups {
		made.groups[n] = slices.DeleteFunc(g, func(t task) bool {
			switch points := t.Points; {
			case t.Served && t.path == result.SameNode, slices.Contains([]string{"udp1400", "bpf"}, t.Name) && t.path != result.AcrossNodes, t.Axis != "" && !slices.Contains(points[:2], t.point):
				return true
			case t.Kind == result.Closing && t.Close != result.ResetByClient && (t.point != 1 || t.mode != result.EBPF): // one way of closing on all paths
				return true
			case t.Name == "flows" || t.Name == "udp64" && t.path == result.AcrossNodes || t.Kind == result.Changes:
				return false
			}
			// TestModes has each mode tell its paths apart; here all of them meet the generators on one.
			return t.mode != result.EBPF && t.mode != result.IPTables
		})
		for i := range made.groups[n] {
			t := &made.groups[n][i]
			t.Pods, t.Services = min(t.Pods, 3), min(t.Services, 50)
			switch {
			case t.Kind == result.Open:
				t.Size = 1000
			case t.Kind == result.Plugins:
				t.Size = min(t.Size, 12)
			case t.Pods > 0 || t.Kind == result.Starts || t.Kind == result.Changes:
				t.Size = min(t.Size, 50)
			case t.Axis != "" && t.point == t.Points[1] && t.Kind != result.Closing:
				t.point = 100
			}
		}
	}
	return made
}

// Every workload that the full profile has, through all that a run does with a sample: it has every value that a table shows. All modes stand side by
// side and do not disturb each other.
func TestEveryWorkload(t *testing.T) {
	made := tiny(t)
	m := stand(t, made)
	taken, excused, measured := 0, 0, map[string]bool{}
	for _, task := range slices.Concat(made.groups...) {
		taken++
		if sample := persistently(t, m, task); sample.Values != nil {
			valued(t, task, sample)
			measured[task.Name+", "+task.mode], measured[task.path+", "+task.mode] = true, true
		} else {
			excused++
		}
	}
	// A third may be excused on a machine that is busy, but no workload as a whole.
	if excused > taken/3 {
		t.Errorf("%d samples of %d measured nothing; is the machine that busy?", excused, taken)
	}
	for _, task := range slices.Concat(made.groups...) {
		if !measured[task.Name+", "+task.mode] || !measured[task.path+", "+task.mode] {
			t.Errorf("%s was never measured", task)
		}
	}
}

// persistently takes a sample until nothing disturbs it, or what does leaves something to look at: how fast anything is, is not looked at. On a
// machine that is busy all the time there may be nothing; any error but that is one.
func persistently(t *testing.T, m *machine, task task) (sample result.Sample) {
	t.Helper()
	defer func(as time.Duration) { m.profile.duration = as }(m.profile.duration)
	var err error
	for range 5 {
		sample, err = m.take(t.Context(), task)
		if err == nil || errors.Is(err, load.ErrStarved) && sample.Values != nil {
			return sample
		}
		if !errors.Is(err, load.ErrNotMeasured) {
			t.Errorf("%s: %v", task, err)
			return result.Sample{}
		}
		if task.Kind == result.Requests { // which wants a thousand transactions, however long one takes here
			m.profile.duration *= 2
		}
	}
	t.Logf("%s: %v", task, err)
	return result.Sample{}
}

// valued complains of a metric that is neither a value nor a distribution of the sample.
func valued(t *testing.T, task task, sample result.Sample) {
	t.Helper()
	for _, metric := range task.Metrics {
		switch {
		// In a window this short the ticks of a CPU's time may all be some other's, a server that waits for its CPU may miss it, and not every program is on
		// each path.
		case strings.HasPrefix(metric.Name, "cpu") && (metric.Name == result.CPUPer || metric.Name == result.SoftIRQ || sample.Values[result.Delayed] > 0.05) ||
			task.Kind == result.Programs && metric.Name != result.BPFPer || metric.Name == "lines" || metric.Name == result.Failed || metric.Name == result.Stalled:
		case metric.Of == "" && sample.Values[metric.Name] <= 0 || metric.Of != "" && len(sample.Durations[metric.Of]) == 0:
			t.Errorf("%s: no %s in %v", task, metric.Name, sample.Values)
		}
	}
}

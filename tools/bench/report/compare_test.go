package report

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

var rate = result.Row{Workload: "udp64", Path: result.SameNode, Metric: result.Rate}

func compare(t *testing.T, a, b *result.Run) *Comparison {
	t.Helper()
	c, err := Compare(a, b)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func with(c *Comparison, verdict string) (rows []result.Row) {
	for _, one := range c.Changes {
		if one.Verdict == verdict {
			rows = append(rows, one.row)
		}
	}
	return rows
}

func TestCompareIdentical(t *testing.T) {
	run := synthetic(5, 0.02, 1)
	c := compare(t, run, run)
	if c.Regressed() || len(with(c, Noise)) != len(c.Changes) || len(c.Warnings) > 0 || len(c.Changes) < 7 {
		t.Errorf("%+v", c)
	}
}

// Two runs of one program: 3 % of noise, one sample in twenty a third slower because something came in between, and the machine as a whole
// up to a tenth slower the second time.
func TestCompareNoise(t *testing.T) {
	const pairs = 300
	alarms := 0
	for seed := range uint64(pairs) {
		a, b := synthetic(5, 0.03, 2*seed+1), synthetic(5, 0.03, 2*seed+2)
		random := rand.New(rand.NewPCG(seed, 8))
		for _, run := range []*result.Run{a, b} {
			machine := 1 - 0.1*random.Float64()
			disturb(run, random, machine)
		}
		if c := compare(t, a, b); c.Regressed() {
			alarms++
		}
	}
	// The correction promises one in twenty; the smallest change that counts makes it fewer.
	if alarms > pairs/20 {
		t.Errorf("%d of %d pairs of runs are said to have a regression, and none has", alarms, pairs)
	}
}

func disturb(run *result.Run, random *rand.Rand, machine float64) {
	for _, s := range run.Samples {
		w, _ := result.Find(s.Workload)
		slow := machine
		if random.IntN(20) == 0 {
			slow *= 0.67
		}
		if w.Name == "agent" || w.Name == "change" || w.Name == "bpf" {
			continue // not divided by anything: a slower machine is one that counts
		}
		for _, m := range w.Metrics {
			if m.Lower {
				s.Values[m.Name] /= slow
			} else {
				s.Values[m.Name] *= slow
			}
		}
	}
}

func TestCompareRegression(t *testing.T) {
	for seed := range uint64(50) {
		a, b := synthetic(5, 0.02, 2*seed+1), synthetic(5, 0.02, 2*seed+2)
		slower(b, rate, "ebpf", 0.8)
		c := compare(t, a, b)
		if !slices.Contains(with(c, Regression), rate) {
			t.Errorf("seed %d: 20 %% fewer packets go unnoticed", seed)
		}
		if back := compare(t, b, a); !slices.Contains(with(back, Better), rate) {
			t.Errorf("seed %d: and so does the other way", seed)
		}
	}
}

func TestCompareTimeUpIsWorse(t *testing.T) {
	a, b := synthetic(5, 0.01, 1), synthetic(5, 0.01, 2)
	row := result.Row{Workload: "cni", Metric: "pair-p50"}
	slower(b, row, "ebpf", 1.25)
	if got := with(compare(t, a, b), Regression); !slices.Equal(got, []result.Row{row}) {
		t.Errorf("regressions: %v", got)
	}
}

// A machine that is slower as a whole is not a slower program.
func TestCompareTakesOutTheMachine(t *testing.T) {
	a, b := synthetic(5, 0.02, 1), synthetic(5, 0.02, 2)
	for _, mode := range []string{"direct", "ebpf", "iptables"} {
		slower(b, rate, mode, 0.7)
	}
	if c := compare(t, a, b); c.Regressed() {
		t.Errorf("%v", with(c, Regression))
	}
}

func TestCompareSmallOrShort(t *testing.T) {
	for name, c := range map[string]struct {
		rounds int
		factor float64
		want   string
	}{
		"4 % less is nobody's concern":   {5, 0.96, Noise},
		"8 % in five rounds":             {5, 0.92, Regression},
		"8 % more in five rounds":        {5, 1.08, Better},
		"8 % in three rounds is little":  {3, 0.92, Noise},
		"20 % in three rounds is a hint": {3, 0.80, Indicative},
		"half in two rounds is none":     {2, 0.50, Noise},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := synthetic(c.rounds, 0.001, 1), synthetic(c.rounds, 0.001, 2)
			slower(b, rate, "ebpf", c.factor)
			compared := compare(t, a, b)
			if !slices.Contains(with(compared, c.want), rate) || compared.Regressed() != (c.want == Regression) {
				t.Errorf("want %s; all: %+v", c.want, compared.Changes)
			}
		})
	}
}

// A quick run has other samples than a full one, however many rounds somebody asks of it.
func TestCompareQuickRuns(t *testing.T) {
	a, b := synthetic(7, 0.01, 1), synthetic(7, 0.01, 2)
	b.Indicative = true
	slower(b, rate, "ebpf", 0.5)
	c := compare(t, a, b)
	var out strings.Builder
	c.Print(&out)
	if c.Regressed() || !strings.Contains(out.String(), "| indicative | ebpf | UDP, 64 bytes, same node: packets/s | 10") ||
		!strings.Contains(out.String(), "two full runs of 5 rounds") {
		t.Errorf("regressed %v\n%s", c.Regressed(), out.String())
	}
}

func TestCompareMissingRows(t *testing.T) {
	a, b := synthetic(5, 0.02, 1), synthetic(5, 0.02, 2)
	b.Samples = slices.DeleteFunc(b.Samples, func(s result.Sample) bool { return s.Workload == "rr" && s.Mode == "ebpf" })
	c := compare(t, a, b)
	if !c.Regressed() || len(with(c, Lost)) != 1 {
		t.Errorf("B was to measure rr, and has none: %v", with(c, Lost))
	}
	b.Workloads = []string{"udp64", "bpf", "cni", "nodes", "agent", "change"}
	if c = compare(t, a, b); c.Regressed() || len(with(c, NotRun)) != 1 {
		t.Errorf("B did not mean to measure rr: lost %v, not run %v", with(c, Lost), with(c, NotRun))
	}
	b.Samples, b.Workloads = nil, nil
	if _, err := Compare(a, b); err == nil {
		t.Error("nothing in common is no comparison")
	}
}

func TestCompareWarnsOfAnotherMachine(t *testing.T) {
	a, b := synthetic(5, 0.02, 1), synthetic(5, 0.02, 2)
	b.Environment.CPU, b.Environment.Kernel, b.Profile, b.Interrupted = "Other", "6.1", "quick", "got interrupt"
	c := compare(t, a, b)
	var out strings.Builder
	c.Print(&out)
	for _, want := range []string{"warning: another CPU", "warning: another kernel", "warning: another profile", "warning: incomplete: – in A, got interrupt in B"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in:\n%s", want, out.String())
		}
	}
	if c.Regressed() {
		t.Error("a warning is no regression")
	}
}

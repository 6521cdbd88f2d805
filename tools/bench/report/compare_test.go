package report

import (
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
			rows = append(rows, one.Row)
		}
	}
	return rows
}

func TestCompareIdentical(t *testing.T) {
	run := synthetic(5, 0.02, 1)
	c := compare(t, run, run)
	if c.Regressed() || len(with(c, Noise)) != len(c.Changes) || len(c.Warnings) > 0 || len(c.Changes) < 20 {
		t.Errorf("%+v", c)
	}
}

func TestCompareNoise(t *testing.T) {
	rows, alarms := 0, 0
	for seed := range uint64(100) {
		c := compare(t, synthetic(5, 0.03, 2*seed+1), synthetic(5, 0.03, 2*seed+2))
		rows += len(c.Changes)
		alarms += len(with(c, Regression)) + len(with(c, Better))
	}
	// Either way 0.4 % at most, of which the smallest change that counts leaves out some.
	if alarms > rows/100 {
		t.Errorf("%d of %d rows are said to have changed, and none has", alarms, rows)
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

func TestCompareLatencyUpIsWorse(t *testing.T) {
	a, b := synthetic(5, 0.01, 1), synthetic(5, 0.01, 2)
	row := result.Row{Workload: "cni", Metric: "add-p50"}
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
		want   bool
	}{
		"4 % less is nobody's concern":           {5, 0.96, false},
		"8 % in five rounds":                     {5, 0.92, true},
		"8 % in three rounds can't be told":      {3, 0.92, false},
		"20 % in three rounds":                   {3, 0.80, true},
		"in two rounds, nothing can be told yet": {2, 0.50, false},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := synthetic(c.rounds, 0.001, 1), synthetic(c.rounds, 0.001, 2)
			slower(b, rate, "ebpf", c.factor)
			if got := slices.Contains(with(compare(t, a, b), Regression), rate); got != c.want {
				t.Errorf("regression: %v, want %v", got, c.want)
			}
		})
	}
}

func TestCompareMissingRows(t *testing.T) {
	a, b := synthetic(5, 0.02, 1), synthetic(5, 0.02, 2)
	b.Samples = slices.DeleteFunc(b.Samples, func(s result.Sample) bool { return s.Workload == "rr" && s.Mode == "ebpf" })
	c := compare(t, a, b)
	if !c.Regressed() || len(with(c, Lost)) != 5 {
		t.Errorf("B was to measure rr, and has none: %v", with(c, Lost))
	}
	b.Workloads = []string{"udp64", "cni", "nodes", "agent"}
	if c = compare(t, a, b); c.Regressed() || len(with(c, NotRun)) != 5 {
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
	for _, want := range []string{"warning: another CPU", "warning: another kernel", "warning: another profile", "warning: B is incomplete"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in:\n%s", want, out.String())
		}
	}
	if c.Regressed() {
		t.Error("a warning is no regression")
	}
}

package report

import (
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

const (
	// significance is the probability with which noise alone may make one of all rows look worse, where the rounds allow so little.
	significance = 0.05
	// least is by how much a median has to be worse; leastShort where a run has fewer rounds than a judgement takes.
	least, leastShort = 0.05, 0.10
)

// Change is one row of two runs, as it is in B over what it was in A.
type Change struct {
	Row  result.Row
	Mode string
	// Base is the mode that both were divided by, to take out the machine; empty where there was none.
	Base string
	// Worse is by how much B's median is worse, 0.1 being 10 %; negative: better.
	Worse float64
	// P is the probability that noise alone makes B rank as bad as this.
	P       float64
	Verdict string
}

// The verdicts on a change.
const (
	Noise      = "no difference"
	Regression = "regression"
	Better     = "better"
	Lost       = "lost"
	NotRun     = "not run"
)

// Comparison is what has become of a run's rows in another one.
type Comparison struct {
	Changes  []Change
	Warnings []string
}

// Compare tells a regression from noise. Only this project's modes are judged; each value is first divided by that of the mode `direct` (else
// `iptables`) of the same round, which takes out how fast the machine was at the time. Without either, it stands as it is.
//
// A row has regressed when both hold:
//
//   - its median is worse by more than 5 %, 10 % where either run has fewer than five rounds of it: less is nobody's concern,
//   - the exact one-sided rank test of Mann and Whitney, which assumes nothing about the distribution, gives noise a
//     probability of at most 5 % divided by the number of rows tested (Bonferroni), or, where the rounds are too few to get there, of
//     what they can show at best: every round of B worse than every round of A (5 against 5 rounds: 0.4 %; 3 against 3: 5 %).
//
// "better" is the same the other way round. A row that B should have and has no sample of, though A had, counts as a regression
// too: it is lost. A row of a workload or mode that B did not run is only listed.
func Compare(a, b *result.Run) (*Comparison, error) {
	c := &Comparison{Warnings: differences(a, b)}
	tested := 0
	for _, subject := range subjects(a) {
		change := newChange(a, b, subject)
		if change.Verdict == "" {
			tested++
		}
		c.Changes = append(c.Changes, change)
	}
	if tested == 0 && !c.Regressed() {
		return nil, fmt.Errorf("the two runs have no row of this project's modes in common: nothing to compare")
	}
	for i := range c.Changes {
		if c.Changes[i].Verdict == "" {
			c.Changes[i].judge(a, b, tested)
		}
	}
	return c, nil
}

// subject is a row in a mode that is to be compared.
type subject struct {
	row  result.Row
	mode string
}

// subjects are the rows that a run has of our modes: every metric that a table shows, in the order of the report.
func subjects(run *result.Run) (all []subject) {
	for _, w := range result.Catalog() {
		for _, s := range run.Samples {
			if s.Workload != w.Name || s.Error != "" || !own(s.Mode) {
				continue
			}
			for _, m := range w.Metrics {
				one := subject{result.Row{Workload: s.Workload, Path: s.Path, Metric: m.Name, Point: s.Point}, s.Mode}
				if _, measured := s.Values[m.Name]; measured && !slices.Contains(all, one) {
					all = append(all, one)
				}
			}
		}
	}
	return all
}

func own(mode string) bool { return len(mode) >= 4 && mode[:4] == "ebpf" }

// newChange leaves the verdict empty where there is something to test.
func newChange(a, b *result.Run, s subject) Change {
	change := Change{Row: s.row, Mode: s.mode, P: 1}
	if len(b.Values(s.row, s.mode)) == 0 {
		change.Verdict = NotRun
		mode, known := b.Mode(s.mode)
		if known && mode.Missing == "" && slices.Contains(b.Workloads, s.row.Workload) && b.Interrupted == "" {
			change.Verdict = Lost
		}
		return change
	}
	for _, base := range []string{"direct", "iptables"} {
		if len(relative(a, s, base)) > 0 && len(relative(b, s, base)) > 0 {
			change.Base = base
			break
		}
	}
	return change
}

// relative is a row's values over another mode's, round by round; as they are without one.
func relative(run *result.Run, s subject, base string) (values []float64) {
	own := run.Values(s.row, s.mode)
	if base != "" {
		return result.Pairs(own, run.Values(s.row, base))
	}
	for _, v := range own {
		values = append(values, v)
	}
	return values
}

func (c *Change) judge(a, b *result.Run, tested int) {
	s := subject{c.Row, c.Mode}
	before, after := relative(a, s, c.Base), relative(b, s, c.Base)
	old, _ := result.Summarise(before)
	now, _ := result.Summarise(after)
	if !metricOf(c.Row).Lower {
		before, after = negated(before), negated(after)
	}
	c.Worse = worse(old.Median, now.Median, metricOf(c.Row).Lower)
	bound := least
	if min(len(before), len(after)) < judgedRounds {
		bound = leastShort
	}
	sure := max(significance/float64(tested), result.RankProbability(seq(len(before), 0), seq(len(after), len(before))))
	up, down := result.RankProbability(before, after), result.RankProbability(after, before)
	c.P, c.Verdict = up, Noise
	switch {
	case c.Worse > bound && up <= sure+1e-12 && enough(before, after):
		c.Verdict = Regression
	case c.Worse < -bound && down <= sure+1e-12 && enough(before, after):
		c.P, c.Verdict = down, Better
	}
}

// enough: two against two rounds would look worse by chance one time in six.
func enough(before, after []float64) bool { return min(len(before), len(after)) >= 3 }

// worse is by which share a median has become worse: a rate that falls by half is as bad as a time that doubles.
func worse(before, after float64, lower bool) float64 {
	if !lower {
		before, after = after, before
	}
	if before == after {
		return 0
	}
	if before <= 0 {
		return math.Inf(1)
	}
	return after/before - 1
}

func negated(values []float64) []float64 {
	out := make([]float64, len(values))
	for i, v := range values {
		out[i] = -v
	}
	return out
}

func seq(n, from int) []float64 {
	out := make([]float64, n)
	for i := range out {
		out[i] = float64(from + i)
	}
	return out
}

// Regressed says that something has become worse, or is lost.
func (c *Comparison) Regressed() bool {
	return slices.ContainsFunc(c.Changes, func(one Change) bool { return one.Verdict == Regression || one.Verdict == Lost })
}

// differences are what makes the two runs hard to compare.
func differences(a, b *result.Run) (warnings []string) {
	for _, d := range []struct{ what, a, b string }{
		{"CPU", a.Environment.CPU, b.Environment.CPU},
		{"number of cores", fmt.Sprint(a.Environment.Cores), fmt.Sprint(b.Environment.Cores)},
		{"kernel", a.Environment.Kernel, b.Environment.Kernel},
		{"profile", a.Profile, b.Profile},
		{"length of a sample", fmt.Sprint(a.Duration, " s"), fmt.Sprint(b.Duration, " s")},
	} {
		if d.a != d.b {
			warnings = append(warnings, fmt.Sprintf("another %s: %s in A, %s in B", d.what, dash(d.a), dash(d.b)))
		}
	}
	for _, one := range []struct {
		name string
		run  *result.Run
	}{{"A", a}, {"B", b}} {
		if one.run.Interrupted != "" {
			warnings = append(warnings, fmt.Sprintf("%s is incomplete: %s", one.name, one.run.Interrupted))
		}
	}
	return warnings
}

// Print writes a comparison as text: what has changed, and how much has not.
func (c *Comparison) Print(w io.Writer) {
	for _, warning := range c.Warnings {
		fmt.Fprintf(w, "warning: %s\n", warning)
	}
	same := 0
	for _, one := range c.Changes {
		name := one.Mode + ": " + rowTitle(one.Row)
		if one.Row.Metric == result.Rate || one.Row.Metric == result.Cost {
			name += ": " + metricOf(one.Row).Title
		}
		switch one.Verdict {
		case Noise:
			same++
		case Lost, NotRun:
			fmt.Fprintf(w, "%-13s %s\n", one.Verdict, name)
		default:
			fmt.Fprintf(w, "%-13s %s: %.0f %% %s, p = %.4f%s\n", one.Verdict, name, 100*math.Abs(one.Worse),
				map[bool]string{true: "worse", false: "better"}[one.Worse > 0], one.P, over(one.Base))
		}
	}
	fmt.Fprintf(w, "%s of %d without a difference beyond noise\n", plural(same, "row"), len(c.Changes))
}

func over(base string) string {
	if base == "" {
		return ""
	}
	return ", relative to " + base
}

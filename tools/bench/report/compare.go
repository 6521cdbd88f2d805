package report

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"golang.org/x/perf/benchmath"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

const (
	// significance is the probability with which noise alone may make even one of all rows look worse.
	significance = 0.05
	// least is by how much a median has to be worse; leastShort where the rounds are too few to tell.
	least, leastShort = 0.05, 0.10
)

// Change is one row of two runs, as it is in B over what it was in A.
type Change struct {
	// subject is divided by the mode that takes out the machine, where there was one.
	subject

	// Worse is by how much B's median is worse, 0.1 being 10 %; negative: better.
	Worse float64
	// P is the probability that noise alone makes this one row differ as much.
	P       float64
	Verdict string
}

// The verdicts on a change.
const (
	Noise      = "no difference"
	Regression = "regression"
	Better     = "better"
	Indicative = "indicative"
	Lost       = "lost"
	NotRun     = "not run"
)

// Comparison is what has become of a run's rows in another one.
type Comparison struct {
	Changes []Change
	// Indicative: the rounds are too few to prove anything.
	Indicative bool
	Warnings   []string
}

// Compare tells a regression from noise. Only this project's modes are judged, by each workload's main metric; each value is first divided by
// that of the mode `direct` (else `iptables`) of the same round, which takes out how fast the machine was at the time. Without either,
// it stands as it is.
//
// A row has regressed when both hold:
//
//   - its median is worse by more than 5 %: less is nobody's concern,
//   - Welch's t-test on the logarithms finds it, with a significance divided by the number of rows: two runs of the same program have even one
//     false alarm in at most one comparison of twenty.
//
// "better" is the same the other way round. A row that B should have and has no sample of, though A had, counts as a regression
// too: it is lost. A row of a workload or mode that B did not run is only listed.
//
// Fewer than five rounds, and runs that are indicative themselves, prove nothing: a row whose rounds are all more than a little worse is
// printed as "indicative", and nothing is a regression.
func Compare(a, b *result.Run) (*Comparison, error) {
	c := &Comparison{Warnings: differences(a, b), Indicative: a.Indicative || b.Indicative || min(a.Rounds, b.Rounds) < judgedRounds}
	rows := subjects(a)
	tested := 0
	for _, s := range rows {
		tested += count(len(s.values(b)) > 0)
	}
	for _, s := range rows {
		c.Changes = append(c.Changes, c.change(a, b, s, significance/float64(tested)))
	}
	if tested == 0 && !slices.ContainsFunc(c.Changes, func(one Change) bool { return one.Verdict == Lost }) {
		return nil, fmt.Errorf("the two runs have no row of this project's modes in common: nothing to compare")
	}
	return c, nil
}

// subjects are the rows that a run has of our modes, in the order of the report.
func subjects(run *result.Run) (all []subject) {
	for _, w := range result.Workloads() {
		// Nothing is divided by a loss, which is none most often.
		if w.Name == result.Rollout {
			continue
		}
		for _, s := range run.Samples {
			if s.Workload != w.Name || s.Error != "" || !strings.HasPrefix(s.Mode, result.EBPF) {
				continue
			}
			one := subject{row: result.Row{Workload: s.Workload, Path: s.Path, Metric: w.Metrics[0].Name, Point: s.Point}, mode: s.Mode}
			if _, measured := s.Values[one.row.Metric]; measured && !slices.Contains(all, one) {
				all = append(all, one)
			}
		}
	}
	return all
}

// change judges one row. The more of them there are, the surer each has to be: alpha is how unlikely noise alone has to be.
func (c *Comparison) change(a, b *result.Run, s subject, alpha float64) Change {
	one := Change{subject: s, P: 1, Verdict: Noise}
	if len(s.values(b)) == 0 {
		one.Verdict = NotRun
		if slices.Contains(b.Modes, s.mode) && slices.Contains(b.Workloads, s.row.Workload) && b.Interrupted == "" {
			one.Verdict = Lost
		}
		return one
	}
	for _, base := range []string{result.IPTables, result.Direct} {
		over := subject{row: s.row, mode: s.mode, base: base}
		if len(over.values(a)) > 0 && len(over.values(b)) > 0 {
			one.subject = over
		}
	}
	before, after := one.values(a), one.values(b)
	old, _ := result.Summarise(before)
	now, _ := result.Summarise(after)
	one.Worse = worse(old.Median, now.Median, s.row.Of().Lower)
	one.P = benchmath.AssumeNormal.Compare(logarithms(before), logarithms(after)).P
	switch short := c.Indicative || min(len(before), len(after)) < judgedRounds; {
	case short && math.Abs(one.Worse) > leastShort && apart(before, after):
		one.Verdict = Indicative
	case short || one.P > alpha || math.Abs(one.Worse) <= least:
	case one.Worse > 0:
		one.Verdict = Regression
	default:
		one.Verdict = Better
	}
	return one
}

// apart says that all of one are above all of the other, which three of each are by chance one time in ten, and two of each one in three.
func apart(a, b []float64) bool {
	if min(len(a), len(b)) < 3 {
		return false
	}
	return slices.Max(a) < slices.Min(b) || slices.Max(b) < slices.Min(a)
}

func logarithms(values []float64) *benchmath.Sample {
	out := make([]float64, len(values))
	for i, v := range values {
		out[i] = math.Log(max(v, math.SmallestNonzeroFloat64))
	}
	return benchmath.NewSample(out, &benchmath.DefaultThresholds)
}

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

// Regressed says that something has become worse, or is lost.
func (c *Comparison) Regressed() bool {
	return !c.Indicative && slices.ContainsFunc(c.Changes, func(one Change) bool { return one.Verdict == Regression || one.Verdict == Lost })
}

// differences are what makes the two runs hard to compare.
func differences(a, b *result.Run) (warnings []string) {
	for _, d := range []struct{ what, a, b string }{
		{"another CPU", a.Environment.CPU, b.Environment.CPU},
		{"another number of cores", fmt.Sprint(a.Environment.Cores), fmt.Sprint(b.Environment.Cores)},
		{"another kernel", a.Environment.Kernel, b.Environment.Kernel},
		{"another profile", a.Profile, b.Profile},
		{"another length of a sample", fmt.Sprint(a.Duration, " s"), fmt.Sprint(b.Duration, " s")},
		{"incomplete", a.Interrupted, b.Interrupted},
	} {
		if d.a != d.b {
			warnings = append(warnings, fmt.Sprintf("%s: %s in A, %s in B", d.what, dash(d.a), dash(d.b)))
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
	var lines [][]string
	for _, one := range c.Changes {
		if one.Verdict == Noise {
			same++
			continue
		}
		p := ""
		if one.Verdict == Regression || one.Verdict == Better {
			p = fmt.Sprintf("%.2g", one.P)
		}
		what := rowTitle(one.row)
		if one.row.Metric == result.Rate {
			what += ": " + one.row.Of().Title
		}
		lines = append(lines, []string{one.Verdict, one.mode, what, one.size(), one.base, p})
	}
	if len(lines) > 0 {
		fmt.Fprint(w, table([]string{"verdict", "mode", "what", "change", "relative to", "p"}, lines))
	}
	fmt.Fprintf(w, "%s of %d without a difference beyond noise\n", plural(same, "row"), len(c.Changes))
	if c.Indicative {
		fmt.Fprintf(w, "indicative only: it takes two full runs of %d rounds to prove a regression\n", judgedRounds)
	}
}

// size is how much a row has changed, if both runs have it.
func (c Change) size() string {
	word := "better"
	switch {
	case c.Verdict == Lost || c.Verdict == NotRun:
		return ""
	case c.Worse > 0:
		word = "worse"
	}
	return fmt.Sprintf("%.0f %% %s", 100*math.Abs(c.Worse), word)
}

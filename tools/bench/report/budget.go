package report

import (
	"fmt"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// judgedRounds is how many rounds a budget takes to be judged.
const judgedRounds = 5

// budget is a bound on one row of a run.
type budget struct {
	row  result.Row
	mode string
	// base is the mode that the row is divided by; empty: the row itself is bounded, or with from set, the same mode at that point.
	base  string
	from  int
	bound float64 // in the metric's unit, or of the ratio
	worst bool    // the upper end of the spread has to keep the bound: the design bounds the slowest of a hundred
}

// budgets are those of the design, in its order.
func budgets() []budget {
	var all []budget
	both := func(workload, path string, classical, direct float64) {
		row := result.Row{Workload: workload, Path: path, Metric: result.Rate}
		all = append(all, budget{row: row, mode: "ebpf", base: "iptables", bound: classical})
		if direct > 0 {
			all = append(all, budget{row: row, mode: "ebpf", base: "direct", bound: direct})
		}
	}
	both("udp64", result.SameNode, 1.5, 0.92)
	both("udp64", result.AcrossNodes, 1.6, 0.90)
	both("udp64", result.Egress, 1.5, 0.85)
	both("tcp1", result.SameNode, 1.15, 0.95)
	both("tcp1", result.AcrossNodes, 1.1, 0.95)
	both("crr", result.AcrossNodes, 1.3, 0.93)
	both("flows", result.Egress, 1.3, 0)
	for _, workload := range []string{"udp64", "tcp1", "crr"} {
		row := result.Row{Workload: workload, Path: result.AcrossNodes, Metric: result.Rate}
		all = append(all, budget{row: row, mode: "ebpf-vxlan", base: "iptables-vxlan", bound: 1.2})
	}
	return append(all,
		budget{row: result.Row{Workload: "cni", Metric: "pair-p50"}, mode: "ebpf", base: "iptables", bound: 0.5},
		budget{row: result.Row{Workload: "nodes", Path: result.AcrossNodes, Metric: result.Cost, Point: 5000}, mode: "ebpf", from: 2, bound: 1.03},
		budget{row: result.Row{Workload: "agent", Metric: "memory"}, mode: "ebpf", bound: 80},
		budget{row: result.Row{Workload: "agent", Metric: "complete"}, mode: "ebpf", bound: 2},
		budget{row: result.Row{Workload: "change", Metric: result.Slowest}, mode: "ebpf", bound: 50, worst: true},
	)
}

// The verdicts on a budget.
const (
	met       = "met"
	missed    = "missed"
	notJudged = "not judged"
	notYet    = "not yet"
	notRun    = "not measured"
)

// judgement is what a run says of a budget.
type judgement struct {
	budget
	measured result.Summary // in the metric's unit, or the ratio
	verdict  string
	why      string
}

// judge holds a budget against a run. The median decides; but what cannot be told from its base is no gain.
func judge(run *result.Run, b budget) judgement {
	j := judgement{budget: b}
	for _, name := range []string{b.mode, b.base} {
		if m, ok := run.Mode(name); ok && m.Missing != "" {
			j.verdict, j.why = notYet, m.Missing
			return j
		}
	}
	measured, ok := measure(run, b)
	if !ok {
		j.verdict, j.why = notRun, reason(run, b)
		return j
	}
	j.measured = measured
	metric := metricOf(b.row)
	switch {
	case run.Indicative || measured.N < judgedRounds:
		j.verdict = notJudged
		j.why = fmt.Sprintf("%s; a judgement takes a full run and %d rounds", plural(measured.N, "round"), judgedRounds)
	case b.keeps(measured, metric.Lower):
		j.verdict = met
	default:
		j.verdict = missed
	}
	return j
}

func (b budget) keeps(measured result.Summary, lower bool) bool {
	value := measured.Median
	if b.worst {
		value = measured.High
	}
	if b.base != "" && measured.Same() && b.bound != 1 && lower == (b.bound < 1) {
		return false
	}
	return value == b.bound || lower == (value < b.bound)
}

func measure(run *result.Run, b budget) (result.Summary, bool) {
	switch {
	case b.base != "":
		return run.Ratio(b.row, b.mode, b.base)
	case b.from != 0:
		return run.PointRatio(b.row, b.mode, b.from)
	}
	s, ok := run.Summary(b.row, b.mode)
	return scaled(s, metricOf(b.row)), ok
}

// reason says why there is no value: a sample was refused, or none was taken.
func reason(run *result.Run, b budget) string {
	for _, mode := range []string{b.mode, b.base} {
		if count, why := run.Refused(b.row, mode); count > 0 {
			return fmt.Sprintf("%s of %s refused: %s", plural(count, "sample"), mode, why)
		}
	}
	return "not part of this run"
}

func metricOf(row result.Row) result.Metric {
	workload, _ := result.Find(row.Workload)
	metric, _ := workload.Metric(row.Metric)
	return metric
}

func scaled(s result.Summary, m result.Metric) result.Summary {
	if m.Scale == 0 {
		return s
	}
	return result.Summary{N: s.N, Median: s.Median / m.Scale, Low: s.Low / m.Scale, High: s.High / m.Scale}
}

// bounds prints what the design asks of a row in one mode over another.
func bounds(run *result.Run, row result.Row, mode, base string) string {
	all := budgets()
	i := slices.IndexFunc(all, func(b budget) bool { return b.row == row && b.mode == mode && b.base == base })
	if i < 0 {
		return ""
	}
	j := judge(run, all[i])
	return fmt.Sprintf("%s: %s", j.text(), j.verdict)
}

// text is the bound as the design prints it.
func (b budget) text() string {
	metric, sign := metricOf(b.row), "≥"
	if metric.Lower {
		sign = "≤"
	}
	if b.base != "" || b.from != 0 {
		return fmt.Sprintf("%s %.4g x", sign, b.bound)
	}
	return fmt.Sprintf("%s %.4g %s", sign, b.bound, metric.Unit)
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

package report

import (
	"fmt"
	"strings"

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
	// how is added to the row's title, where that does not say all.
	how string
}

// budgets are those of the design, in its order. It asks for 1.2 x of flannel's VXLAN too, across nodes, in udp64, tcp1 and crr: once there is a mode for it.
func budgets() []budget {
	var all []budget
	both := func(workload, path string, classical, direct float64) {
		row := result.Row{Workload: workload, Path: path, Metric: result.Rate}
		all = append(all, budget{row: row, mode: result.EBPF, base: result.IPTables, bound: classical})
		if direct > 0 {
			all = append(all, budget{row: row, mode: result.EBPF, base: result.Direct, bound: direct})
		}
	}
	both("udp64", result.SameNode, 1.5, 0.92)
	both("udp64", result.AcrossNodes, 1.6, 0.90)
	both("udp64", result.Egress, 1.5, 0.85)
	both("tcp1", result.SameNode, 1.15, 0.95)
	both("tcp1", result.AcrossNodes, 1.1, 0.95)
	both("crr", result.AcrossNodes, 1.3, 0.93)
	both("flows", result.Egress, 1.3, 0)
	return append(all, ofItself()...)
}

// ofItself are the budgets that have nothing to do with how fast packets are.
func ofItself() []budget {
	row := func(workload, metric string) result.Row { return result.Row{Workload: workload, Metric: metric} }
	nodes := result.Row{Workload: "nodes", Path: result.AcrossNodes, Metric: result.Cost, Point: result.Nodes}
	return []budget{
		{row: row("cni", "pair-p50"), mode: result.EBPF, base: result.IPTables, bound: 0.5},
		{row: nodes, mode: result.EBPF, from: 2, bound: 1.03, how: "busy flow"},
		{row: row("agent", "memory"), mode: result.EBPF, bound: 80},
		{row: row("agent", "complete"), mode: result.EBPF, bound: 2},
		{row: row("agent-api", "memory"), mode: result.EBPF, bound: 80},
		{row: row("agent-api", "complete"), mode: result.EBPF, bound: 2},
		{row: row("change-api", result.P99), mode: result.EBPF, bound: 50, how: "an agent at rest"},
		{row: row("change", result.P99), mode: result.EBPF, bound: 50},
		{row: row("change5000", result.P99), mode: result.EBPF, bound: 50},
	}
}

// clusterBudgets are those that hold on a real cluster too.
func clusterBudgets() []budget {
	row := func(metric string) result.Row {
		return result.Row{Workload: result.AgentCluster, Metric: metric, Point: result.Nodes}
	}
	return []budget{{row: row("memory"), mode: result.KubeProxy, bound: 80}, {row: row("complete"), mode: result.KubeProxy, bound: 2}}
}

// key names a budget in the file of reasons.
func (b budget) key() string {
	key := join(b.row.Workload, b.row.Path)
	switch {
	case b.base != "":
		return key + " / " + b.base
	case b.from != 0:
		return fmt.Sprintf("%s, %d / %d", key, b.row.Point, b.from)
	}
	return key + ": " + b.row.Metric
}

func (b budget) title() string { return join(rowTitle(b.row), b.how) }

func (b budget) against() string { return dash(b.over()) }

// over is what the row is divided by, if anything.
func (b budget) over() string {
	if b.from != 0 {
		return fmt.Sprintf("itself with %d", b.from)
	}
	return b.base
}

// text is the bound as the design prints it.
func (b budget) text() string {
	metric, sign := b.row.Of(), "≥"
	if metric.Lower {
		sign = "≤"
	}
	if b.base != "" || b.from != 0 {
		return fmt.Sprintf("%s %.4g x", sign, b.bound)
	}
	return fmt.Sprintf("%s %.4g %s", sign, b.bound, metric.Unit)
}

// The verdicts on a budget.
const (
	met       = "met"
	missed    = "missed"
	notJudged = "not judged"
	notRun    = "not measured"
)

// judgement is what a run says of a budget.
type judgement struct {
	budget
	measured string
	verdict  string
	// beside is what was measured beside kube-proxy, which nothing is asked of; empty where that is the same, or was not measured.
	beside string
	// why is empty where the figures say all.
	why string
}

// judge holds a budget against a run.
func judge(run *result.Run, b budget) judgement {
	j := judgement{budget: b}
	r, ok := b.read(run)
	if !ok {
		j.verdict, j.why = notRun, reason(run, b)
		return j
	}
	j.measured, j.beside = r.text, b.beside(run)
	switch {
	case run.Indicative:
		j.verdict, j.why = notJudged, "a short run"
	case r.short != "":
		j.verdict, j.why = notJudged, r.short
	case b.keeps(r):
		j.verdict, j.why = met, b.doubt(r)
	default:
		j.verdict, j.why = missed, strings.TrimSuffix(reasons()[b.key()].String()+"; "+b.doubt(r), "; ")
	}
	return j
}

// beside is the same of the mode beside kube-proxy, which nothing is asked of.
func (b budget) beside(run *result.Run) string {
	if b.mode != result.EBPF {
		return ""
	}
	b.mode = result.KubeProxy
	r, _ := b.read(run)
	return r.text
}

// reading is what a run has of a budget's row, in the unit of the bound.
type reading struct {
	result.Summary

	text string
	// short says what there is too little of for a judgement.
	short string
}

func (b budget) read(run *result.Run) (r reading, ok bool) {
	metric := b.row.Of()
	if metric.Of != "" {
		t, ok := run.Tail(b.row, b.mode)
		v := t.Seconds / metric.Scale
		r = reading{Summary: result.Summary{N: t.N, Median: v, Low: v, High: v}}
		if ok {
			r.text = tail(t, metric) + " " + metric.Unit
		}
		if t.Slowest {
			r.short = fmt.Sprintf("%s are too few for a %s", plural(r.N, "value"), metric.Title)
		}
		return r, ok
	}
	switch {
	case b.base != "":
		r.Summary, ok = run.Ratio(b.row, b.mode, b.base)
		r.text = ratio(r.Summary)
	case b.from != 0:
		r.Summary, ok = run.PointRatio(b.row, b.mode, b.from)
		r.text = ratio(r.Summary)
	default:
		r.Summary, ok = run.Summary(b.row, b.mode)
		r.Summary = r.In(metric)
		r.text = value(r.Summary) + " " + metric.Unit
	}
	if !ok {
		return reading{}, false
	}
	if r.N < judgedRounds {
		r.short = fmt.Sprintf("%s; a judgement takes %d", plural(r.N, "round"), judgedRounds)
	}
	return r, ok
}

// keeps: the median decides; but what cannot be told from its base is no gain.
func (b budget) keeps(r reading) bool {
	if b.base != "" && r.Same() && b.bound != 1 && b.row.Of().Lower == (b.bound < 1) {
		return false
	}
	return b.holds(r.Median)
}

func (b budget) holds(v float64) bool { return v == b.bound || b.row.Of().Lower == (v < b.bound) }

// doubt says that the spread lies on both sides of the bound.
func (b budget) doubt(r reading) string {
	if b.holds(r.Low) == b.holds(r.High) {
		return ""
	}
	return "the spread holds the bound"
}

// reason says why there is no value: a sample was refused, or none was taken.
func reason(run *result.Run, b budget) string {
	for _, mode := range []string{b.mode, b.base} {
		if count, why := run.Refused(b.row, mode); count > 0 {
			return fmt.Sprintf("%s of %s refused: %s", plural(count, "sample"), mode, brief(why))
		}
	}
	return ""
}

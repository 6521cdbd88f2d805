package report

import (
	_ "embed"
	"fmt"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// judgedRounds is how many rounds a budget takes to be judged.
const judgedRounds = 5

// budget is a bound on a subject, in the metric's unit, or of the ratio.
type budget struct {
	subject

	bound float64
	// how is added to the row's title, where that does not say all.
	how string
}

// budgets are those of the design, in its order.
func budgets() (all []budget) {
	rate := func(workload, path, base string, bound float64) {
		all = append(all, budget{subject: subject{row: result.Row{Workload: workload, Path: path, Metric: result.Rate}, mode: result.EBPF, base: base}, bound: bound})
	}
	rate("udp64", result.SameNode, result.IPTables, 1.5)
	rate("udp64", result.SameNode, result.Direct, 0.92)
	rate("udp64", result.AcrossNodes, result.IPTables, 1.6)
	rate("udp64", result.AcrossNodes, result.Direct, 0.90)
	rate("udp64", result.Egress, result.IPTables, 1.5)
	rate("udp64", result.Egress, result.Direct, 0.85)
	rate("tcp1", result.SameNode, result.IPTables, 1.15)
	rate("tcp1", result.SameNode, result.Direct, 0.95)
	rate("tcp1", result.AcrossNodes, result.IPTables, 1.1)
	rate("tcp1", result.AcrossNodes, result.Direct, 0.95)
	rate("crr", result.AcrossNodes, result.IPTables, 1.3)
	rate("crr", result.AcrossNodes, result.Direct, 0.93)
	rate("flows", result.Egress, result.IPTables, 1.3)
	nodes := result.Row{Workload: "nodes", Path: result.AcrossNodes, Metric: result.Cost, Point: result.Nodes}
	all = append(all,
		budget{subject: subject{row: result.Row{Workload: "cni", Metric: "pair-p50"}, mode: result.KubeProxy, base: result.IPTables}, bound: 1.0, how: "beside kube-proxy, portmap chained"},
		budget{subject: subject{row: result.Row{Workload: "cni", Metric: "pair-p50"}, mode: result.EBPF, base: result.IPTables}, bound: 1.2},
		budget{subject: subject{row: nodes, mode: result.EBPF, itself: true, from: 2}, bound: 1.03, how: "busy flow"})
	itself := func(workload, metric string, bound float64, how string) {
		all = append(all, budget{subject: subject{row: result.Row{Workload: workload, Metric: metric}, mode: result.EBPF}, bound: bound, how: how})
	}
	itself("agent-api", "memory", 80, "")
	itself("agent-api", "complete", 2, "")
	itself("change-api", result.P99, 50, "an agent at rest")
	itself("agent-rest", "cpu", 1, "")
	itself("agent-rest", "memory", 80, "")
	itself("agent-routes", "cpu", 5, "")
	return slices.Concat(all, ipv6Budgets(), tunnelBudgets(), serviceBudgets(), portBudgets())
}

// ipv6Budgets hold IPv6 to be about as fast as IPv4.
func ipv6Budgets() (all []budget) {
	of := func(workload string, paths ...string) {
		for _, path := range paths {
			row := result.Row{Workload: workload, Path: path, Metric: result.Rate}
			all = append(all, budget{subject: subject{row: row, mode: result.IPv6, base: result.EBPF}, bound: 0.95, how: "IPv6"})
		}
	}
	of("udp64", result.Paths()...)
	of("tcp1", result.SameNode, result.AcrossNodes)
	of("crr", result.AcrossNodes)
	of("flows", result.Egress)
	for _, path := range []string{result.SameNode, result.AcrossNodes} {
		row := result.Row{Workload: "service-udp64", Path: path, Metric: result.Rate, Point: 1}
		all = append(all, budget{subject: subject{row: row, mode: result.IPv6, base: result.EBPF}, bound: 0.95, how: throughClusterIP + ", IPv6"})
	}
	return all
}

// tunnelBudgets are those of nodes that reach each other through a tunnel: faster than flannel's, and as flat as the direct way.
func tunnelBudgets() (all []budget) {
	of := func(workload, path, metric string) subject {
		return subject{row: result.Row{Workload: workload, Path: path, Metric: metric}, mode: result.VXLAN}
	}
	for _, workload := range []string{"udp64", "tcp1", "crr", "flows"} {
		over := of(workload, result.AcrossNodes, result.Rate)
		over.base = result.IPTablesVXLAN
		all = append(all, budget{subject: over, bound: 1.2})
	}
	nodes := of("nodes", result.AcrossNodes, result.Cost)
	nodes.row.Point, nodes.itself, nodes.from = result.Nodes, true, 2
	return append(all,
		budget{subject: nodes, bound: 1.03, how: "busy flow, VXLAN"},
		budget{subject: of("agent-api", "", "memory"), bound: 80, how: "VXLAN"},
		budget{subject: of("change-api", "", result.P99), bound: 50, how: "an agent at rest, VXLAN"})
}

// portBudgets are those of masquerading towards one address and port: as fast as netfilter, without a failure, and with room for many connections.
func portBudgets() (all []budget) {
	add := func(row result.Row, base string, bound float64) {
		all = append(all, budget{subject: subject{row: row, mode: result.EBPF, base: base}, bound: bound})
	}
	of := func(row result.Row) {
		row.Metric = result.Rate
		add(row, result.IPTables, 1)
		for _, row.Metric = range []string{result.Failed, result.Stalled} {
			add(row, "", 0)
		}
	}
	for _, c := range result.Closes() {
		for _, pods := range []int{1, result.ManyPods} {
			of(result.Row{Workload: result.ShortSNAT + string(c), Path: result.Egress, Point: pods})
		}
		of(result.Row{Workload: result.ShortNodePort + string(c), Path: result.Inbound})
	}
	open := result.Row{Workload: result.OpenSNAT, Path: result.Egress}
	for i, bound := range []float64{28_000, 8192, 48_000, 60_000} {
		open.Metric = []string{result.FirstPod, result.SecondPod, result.OnePlace, result.TwoPlaces}[i]
		add(open, "", bound)
	}
	return all
}

// throughClusterIP is what the rows of a sweep by the number of Services leave out of their titles.
const throughClusterIP = "through a ClusterIP"

// serviceBudgets are those of Services: faster than kube-proxy, hardly slower than without them, and as fast with many as with one.
func serviceBudgets() (all []budget) {
	of := func(workload, path, metric string, point int) subject {
		return subject{row: result.Row{Workload: workload, Path: path, Metric: metric, Point: point}, mode: result.EBPF}
	}
	through := func(s subject, base string, bound float64) {
		s.base = base
		all = append(all, budget{subject: s, bound: bound, how: howServed(s.row)})
	}
	itself := func(s subject, from int, bound float64) {
		s.itself, s.from = true, from
		all = append(all, budget{subject: s, bound: bound, how: howServed(s.row)})
	}
	packets := func(one subject) {
		through(one, result.IPTables, 1.5)
		through(one, result.NFTables, 1.5)
		itself(one, 0, 0.95)
	}
	packets(of("nodeport-local-udp64", result.InboundLocal, result.Rate, 1))
	for _, path := range []string{result.SameNode, result.AcrossNodes} {
		packets(of("service-udp64", path, result.Rate, 1))
		itself(of("service-many", path, result.Cost, result.ManyServices), 1, 1.03)
	}
	many := of("service-crr", result.AcrossNodes, result.Rate, result.ManyServices)
	through(many, result.IPTables, 2)
	itself(many, 0, 0.93)
	return append(all,
		budget{subject: of("agent-services", "", "maps", 0), bound: 20},
		budget{subject: of("agent-services", "", "memory", 0), bound: 150},
		budget{subject: of("agent-services", "", "complete", 0), bound: 2},
		budget{subject: of("change-services", "", result.P99, 0), bound: 50},
		budget{subject: of("change-services", "", "calls", 0), bound: 4})
}

// howServed says by which of a Service's addresses packets went.
func howServed(row result.Row) string {
	if row.Path == result.InboundLocal {
		return "through a NodePort"
	}
	return throughClusterIP
}

// clusterBudgets are those that hold on a real cluster too.
func clusterBudgets() []budget {
	of := func(metric string, bound float64) budget {
		row := result.Row{Workload: result.AgentCluster, Metric: metric, Point: result.Nodes}
		return budget{subject: subject{row: row, mode: result.KubeProxy}, bound: bound}
	}
	return []budget{of("memory", 80), of("complete", 2)}
}

// key names a budget in the file of reasons.
func (b budget) key() string {
	key := join(b.row.Workload, b.row.Path)
	if w, _ := result.Find(b.row.Workload); w.Kind == result.Closing && b.row.Point > 0 {
		key = join(key, fmt.Sprintf("%d %s", b.row.Point, w.Axis))
	}
	if b.mode == result.VXLAN || b.mode == result.IPv6 || b.mode == result.KubeProxy && b.base != "" {
		key = join(key, b.mode)
	}
	switch {
	case b.base != "":
		return key + " / " + b.base
	case b.itself:
		return fmt.Sprintf("%s, %d / %d", key, b.row.Point, b.from)
	}
	return key + ": " + b.row.Metric
}

func (b budget) title() string { return join(rowTitle(b.row), b.how) }

// text is the bound as the design prints it.
func (b budget) text() string {
	unit, sign := b.row.Of().Unit, "≥"
	if b.row.Of().Lower {
		sign = "≤"
	}
	if b.over() != "" {
		unit = "x"
	}
	return fmt.Sprintf("%s %.4g %s", sign, b.bound, unit)
}

// The verdicts on a budget.
const (
	met       = "met"
	missed    = "missed"
	notJudged = "not judged"
	notRun    = "not measured"
)

// asked are the budgets of a run: those of workloads that only a name asks for, only where it did.
func asked(run *result.Run, all []budget) []budget {
	return slices.DeleteFunc(all, func(b budget) bool {
		w, _ := result.Find(b.row.Workload)
		return w.Named && !slices.Contains(run.Workloads, w.Name)
	})
}

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
		j.verdict, j.why = notRun, b.refused(run)
		return j
	}
	j.measured = r.withUnit()
	if b.mode == result.EBPF {
		other := b.subject
		other.mode = result.KubeProxy
		if beside, ok := other.read(run); ok {
			j.beside = beside.withUnit()
		}
	}
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

// refused says why there is no value: a sample was refused, or none was taken.
func (b budget) refused(run *result.Run) string {
	for _, mode := range []string{b.mode, b.base} {
		if count, why := run.Refused(b.row, mode); count > 0 {
			return fmt.Sprintf("%s of %s refused: %s", plural(count, "sample"), mode, brief(why))
		}
	}
	return ""
}

// reasonsFile is written by hand, after somebody has found out.
//
//go:embed reasons.yaml
var reasonsFile []byte

// finding is why a budget was missed, and of what that was found out: another miss may have another reason.
type finding struct {
	Why    string `json:"why"`
	Commit string `json:"commit"`
	Kernel string `json:"kernel"`
}

// unexplained stands where nobody has found out yet.
const unexplained = "not found out yet"

func (f finding) String() string {
	if f.Why == "" {
		return unexplained
	}
	return fmt.Sprintf("%s (found out at commit %s, Linux %s)", f.Why, short(f.Commit), f.Kernel)
}

// reasons are by budget's key. The file is part of the program, and a test reads it.
func reasons() (all map[string]finding) {
	if err := yaml.UnmarshalStrict(reasonsFile, &all); err != nil {
		panic(err)
	}
	return all
}

package report

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

func TestJudge(t *testing.T) {
	at := func(ratio float64) *result.Run {
		run := synthetic(5, 0, 1)
		slower(run, rate, "ebpf", ratio/0.95) // ratio to direct
		return run
	}
	bound := budget{subject: subject{row: rate, mode: "ebpf", base: "direct"}, bound: 0.92}
	memory := budget{subject: subject{row: result.Row{Workload: "agent-api", Metric: "memory"}, mode: "ebpf"}, bound: 80}
	// once multiplies the first value of a row that it finds.
	once := func(run *result.Run, row result.Row, factor float64) *result.Run {
		for _, s := range run.Samples {
			if s.Workload == row.Workload && s.Path == row.Path && s.Mode == "ebpf" {
				s.Values[row.Metric] *= factor
				break
			}
		}
		return run
	}
	delay := result.Row{Workload: "change", Metric: result.P99}
	doubtful := once(at(1.05), rate, 0.9)
	gain := budget{subject: subject{row: rate, mode: "ebpf", base: "direct"}, bound: 1.02}
	quick := at(0.93)
	quick.Indicative = true
	short := synthetic(4, 0, 1)
	roomy := memory
	roomy.bound = 110
	for name, c := range map[string]struct {
		run  *result.Run
		b    budget
		want string
	}{
		"above":            {at(0.93), bound, met},
		"below":            {at(0.91), bound, missed},
		"less is better":   {at(1), memory, missed},
		"less than enough": {at(1), roomy, met},
		"a gain":           {at(1.05), gain, met},
		"a gain in doubt":  {doubtful, gain, missed},
		"a loss in doubt":  {doubtful, bound, met},
		"one of five":      {once(at(1), memory.row, 1.2), roomy, met},
		"p99 of 110":       {at(1), budget{subject: subject{row: delay, mode: "ebpf"}, bound: 50}, met},
		"a slower p99":     {at(1), budget{subject: subject{row: delay, mode: "ebpf"}, bound: 40}, missed},
		"p99 of 88":        {short, budget{subject: subject{row: delay, mode: "ebpf"}, bound: 50}, notJudged},
		"indicative":       {quick, bound, notJudged},
		"four rounds":      {short, bound, notJudged},
		"no such mode":     {at(1), budget{subject: subject{row: rate, mode: "ebpf-vxlan", base: "iptables"}, bound: 1}, notRun},
		"never measured":   {at(1), budget{subject: subject{row: result.Row{Workload: "tcp1", Metric: result.Rate}, mode: "ebpf", base: "direct"}, bound: 1}, notRun},
		"over the sweep":   {at(1), budget{subject: subject{row: result.Row{Workload: "nodes", Path: result.AcrossNodes, Metric: result.Cost, Point: 5000}, mode: "ebpf", itself: true, from: 2}, bound: 1.004}, missed},
		"sweep within":     {at(1), budget{subject: subject{row: result.Row{Workload: "nodes", Path: result.AcrossNodes, Metric: result.Cost, Point: 5000}, mode: "ebpf", itself: true, from: 2}, bound: 1.03}, met},
	} {
		t.Run(name, func(t *testing.T) {
			if got := judge(c.run, c.b); got.verdict != c.want {
				t.Errorf("%s (%s), measured %+v; want %s", got.verdict, got.why, got.measured, c.want)
			}
		})
	}
}

// Every budget is about a metric that the catalog has, in a mode that has a colour, and has a place for a reason.
func TestBudgetsFitTheCatalog(t *testing.T) {
	written := reasons()
	for _, b := range slices.Concat(budgets(), clusterBudgets()) {
		if b.row.Of().Name == "" {
			t.Errorf("no workload has the metric of %+v", b.row)
		}
		if colours[b.mode] == nil {
			t.Errorf("mode %s has no colour", b.mode)
		}
		found, ok := written[b.key()]
		if !ok {
			t.Errorf("reasons.yaml has no line %q", b.key())
		}
		if found.Why != "" && (found.Commit == "" || found.Kernel == "") {
			t.Errorf("reasons.yaml does not say on which commit and kernel was found out why %q is missed", b.key())
		}
		delete(written, b.key())
	}
	for key := range written {
		t.Errorf("reasons.yaml has %q, which is no budget", key)
	}
}

// One sample of five minutes is judged, and a run that did not ask for it has no line about it.
func TestBudgetsOfPorts(t *testing.T) {
	run := synthetic(5, 0, 1)
	if got := asked(run, portBudgets()); len(got) > 0 {
		t.Errorf("budgets of workloads that were left out: %v", got)
	}
	for mode, values := range map[string]map[string]float64{
		result.EBPF: {result.Rate: 9000, result.Failed: 1, result.Stalled: 0}, result.IPTables: {result.Rate: 8000, result.Failed: 0, result.Stalled: 3},
	} {
		run.Samples = append(run.Samples, result.Sample{Workload: "snat-udp", Path: result.Egress, Point: 1, Mode: mode, Round: 1, Values: values})
	}
	run.Workloads = append(run.Workloads, "snat-udp")
	got := map[string]string{}
	for _, b := range asked(run, portBudgets()) {
		got[b.key()] = judge(run, b).verdict
	}
	for key, want := range map[string]string{
		"snat-udp, egress, 1 pods / iptables": met, "snat-udp, egress, 1 pods: failed": missed, "snat-udp, egress, 1 pods: stalled": met,
		"snat-udp, egress, 10 pods / iptables": notRun,
	} {
		if got[key] != want {
			t.Errorf("%s: %q, want %q", key, got[key], want)
		}
	}
}

// A reason that somebody wrote is said of a row that is missed, and of no other.
func TestReasons(t *testing.T) {
	written := reasonsFile
	defer func() { reasonsFile = written }()
	reasonsFile = []byte("udp64, same node / direct: {why: the veth pair, commit: 0123456789abcdef, kernel: 6.18.0}\n")
	run := synthetic(5, 0, 1)
	missing := budget{subject: subject{row: rate, mode: "ebpf", base: "direct"}, bound: 0.97}
	if j := judge(run, missing); j.verdict != missed || j.why != "the veth pair (found out at commit 0123456789ab, Linux 6.18.0)" {
		t.Errorf("%s: %s", j.verdict, j.why)
	}
	missing.bound = 0.9
	if j := judge(run, missing); j.verdict != met || j.why != "" {
		t.Errorf("%s: %s", j.verdict, j.why)
	}
	unknown := budget{subject: subject{row: rate, mode: "ebpf", base: "iptables"}, bound: 2}
	if j := judge(run, unknown); j.verdict != missed || j.why != unexplained {
		t.Errorf("%s: %s", j.verdict, j.why)
	}
}

// A verdict says what it is of, and of nothing else.
func TestVerdictsAreQualified(t *testing.T) {
	for _, b := range budgets() {
		for workload, of := range map[string]string{"nodes": "busy flow", "change-api": "an agent at rest"} {
			if (b.row.Workload == workload) != strings.Contains(b.title(), of) {
				t.Errorf("%s: %s", workload, b.title())
			}
		}
	}
}

// A figure is of the commit that its programs were built from.
func TestCommit(t *testing.T) {
	e := result.Environment{Commit: "0123456789abcdef", Versions: map[string]string{"ebpf-agent": "0123456789abcdef", "bridge": "v1"}}
	if got := commit(e); got != "0123456789ab" {
		t.Error(got)
	}
	e.Dirty, e.Versions["ebpf-cni"] = true, "fedcba9876543210, with changes"
	if got := commit(e); got != "0123456789ab, with changes (ebpf-cni: fedcba987654, with changes)" {
		t.Error(got)
	}
}

// The median decides, but a reader sees when another run might decide otherwise.
func TestDoubt(t *testing.T) {
	b := budget{subject: subject{row: rate, mode: "ebpf", base: "direct"}, bound: 0.92}
	for low, want := range map[float64]string{0.91: "the spread holds the bound", 0.93: ""} {
		if got := b.doubt(reading{Summary: result.Summary{N: 5, Median: 0.95, Low: low, High: 0.97}}); got != want {
			t.Errorf("from %g: %q", low, got)
		}
	}
}

// A page has the budgets with their verdicts, the reasons of what is missed, and links to plots that are there; a first page has the main figures.
func TestPages(t *testing.T) {
	written := reasonsFile
	defer func() { reasonsFile = written }()
	reasonsFile = []byte("udp64, across nodes / iptables: {why: an rcu_barrier, commit: abc, kernel: 6.18}\n")
	dir := t.TempDir()
	run := withKubeProxy(synthetic(5, 0, 1))
	for i := range run.Samples {
		if s := &run.Samples[i]; s.Round == 5 && s.Path == result.Egress && s.Mode == "ebpf" {
			s.Values, s.Error = nil, "the packets went | another way\nsecond line"
		}
	}
	if err := Write(run, dir); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(filepath.Join(dir, "bench.md"))
	if err != nil {
		t.Fatal(err)
	}
	text := string(raw)
	for _, want := range []string{
		"Measured by `bench --profile full` on 2026-05-04 at commit 0123456789ab, with changes, in 20m0s, on Synthetic | 3000 (2 cores), Linux 6.18.0 x86_64.",
		"| UDP, 64 bytes, same node | direct | ≥ 0.92 x | 0.95 x [0.95, 0.95] | **met** | 0.76 x [0.76, 0.76] |",
		"| UDP, 64 bytes, egress | direct | ≥ 0.85 x | 0.95 x [0.95, 0.95] | not judged |",
		"- UDP, 64 bytes, across nodes, iptables (missed): an rcu_barrier (found out at commit abc, Linux 6.18)\n",
		"| UDP, 64 bytes, across nodes | 475 [475, 475] kpps | 300 kpps: 1.58 x [1.58, 1.58], ≥ 1.6 x **missed** | 500 kpps: 0.95 x [0.95, 0.95], ≥ 0.9 x **met** |",
		"- agent, 5000 nodes from an API server: resident memory (missed): not found out yet\n",
		"| same node | ebpf | 475 [475, 475] | 2105 [2105, 2105] | ",
		"| across nodes | ebpf | 5000 | 2116 [2116, 2116] | 2000 [2000, 2000] |",
		"| udp64 | egress | 0 | ebpf | 5 | the packets went \\| another way |",
		"| ebpf | 31.6 [31.6, 31.6] | 21.1 [21.1, 21.1] | 42.1 (of 100) | 10.5 [10.5, 10.5] | 10.5 (slowest of 50) |",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	for _, link := range regexp.MustCompile(`!\[.*?\]\((.*?)\)`).FindAllStringSubmatch(text, -1) {
		svg, err := os.ReadFile(filepath.Join(dir, link[1]))
		if err != nil || !strings.Contains(string(svg), "</svg>") {
			t.Errorf("%s: %v, or no whole SVG", link[1], err)
		}
	}
	if got, want := headline(run), "| UDP, 64 bytes, across nodes | 475 kpps | 1.58 x [1.58, 1.58] | 0.95 x [0.95, 0.95] | 1.27 x [1.27, 1.27] |"; !strings.Contains(got, want) {
		t.Errorf("no %q in\n%s", want, got)
	}
}

// Tables of one run never stand beside plots of another, and a figure without values is none.
func TestPlots(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"services.svg", "notes.txt"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := drawAll(plotsOf(synthetic(5, 0.02, 1)), dir); err != nil {
		t.Fatal(err)
	}
	files, _ := filepath.Glob(filepath.Join(dir, "*"))
	for i := range files {
		files[i] = filepath.Base(files[i])
	}
	if want := []string{"budgets.svg", "cni.svg", "latency.svg", "notes.txt", "udp.svg"}; !slices.Equal(files, want) {
		t.Errorf("there are %v, want %v", files, want)
	}
	if all := plotsOf(&result.Run{}); len(all) > 0 {
		t.Errorf("plots of nothing: %v", all)
	}
}

// Each thing that somebody asks who looks for a network is one sentence, and what is lost is said.
func TestClusterHeadline(t *testing.T) {
	run := clusterRun()
	run.Samples[2].Values[result.Lost] = 1
	want := "On a real Kubernetes v1.36.3 (all of it on one machine, with kube-proxy): a pod's first packet arrives 440 ms after its creation is asked for, 400 ms with bridge + " +
		"iptables (1.10 x [1.10, 1.10]). Rollouts of the DaemonSet lost 1 of 60000 packets. With 5000 nodes an agent takes 90.0 MiB, and its maps 80.0 MiB, and 300 ms of CPU time a " +
		"minute at rest. The image is 18.0 MiB. Commit –; all figures: [results](tools/bench/results/cluster.md).\n"
	if got := clusterHeadline(run); got != want {
		t.Errorf("got\n%s, want\n%s", got, want)
	}
	for i, want := range []string{missed, met} {
		if got := judge(run, clusterBudgets()[i]); got.verdict != want {
			t.Errorf("%s: %+v, want %s", got.title(), got, want)
		}
	}
}

// What is compared between two runs on clusters has no ratio of nothing to nothing.
func TestCompareClusters(t *testing.T) {
	a, b := clusterRun(), clusterRun()
	for i := range 6 {
		a.Samples[4*i].Values[result.P50] *= 1 + float64(i)/1000
		b.Samples[4*i].Values[result.P50] *= 1.5 + float64(i)/1000
	}
	for _, change := range compare(t, a, b).Changes {
		want := map[string]string{result.FirstPacket: Regression, result.AgentCluster: Noise, result.Image: Noise}[change.row.Workload]
		if change.Verdict != want {
			t.Errorf("%+v, want %s", change, want)
		}
	}
}

// clusterRun is a run on clusters of six rounds.
func clusterRun() *result.Run {
	run := &result.Run{Profile: result.ClusterProfile, Rounds: 6, Workloads: result.Names(true), Modes: []string{result.KubeProxy, result.IPTables}}
	run.Environment.Versions = map[string]string{"kubernetes": "v1.36.3"}
	for round := 1; round <= 6; round++ {
		add := func(workload, mode string, point int, values map[string]float64) {
			run.Samples = append(run.Samples, result.Sample{Workload: workload, Mode: mode, Point: point, Round: round, Values: values})
		}
		add(result.FirstPacket, result.KubeProxy, 0, map[string]float64{result.P50: 0.44})
		add(result.FirstPacket, result.IPTables, 0, map[string]float64{result.P50: 0.40})
		add(result.Rollout, result.KubeProxy, 0, map[string]float64{result.Lost: 0, result.Sent: 10000})
		add(result.AgentCluster, result.KubeProxy, result.Nodes, map[string]float64{"memory": 90 << 20, "maps": 80 << 20, "complete": 0.5, "cpu": 0.3})
	}
	run.Samples = append(run.Samples, result.Sample{Workload: result.Image, Mode: result.KubeProxy, Round: 1, Values: map[string]float64{"compressed": 18 << 20}})
	return run
}

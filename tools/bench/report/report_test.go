package report

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

var update = flag.Bool("update", false, "write testdata anew")

func TestMarkdown(t *testing.T) {
	run := withKubeProxy(synthetic(5, 0, 1))
	for i := range run.Samples {
		if s := &run.Samples[i]; s.Round == 5 && s.Workload == "udp64" && s.Path == result.Egress && s.Mode == "ebpf" {
			s.Values, s.Error = nil, "the packets went | another way\nsecond line"
		}
	}
	again := &run.Samples[1]
	again.Attempts = []string{
		"the sample did not measure what it says: another process was in its way: the client waited 22ms of 80ms for CPU 0",
		"the sample did not measure what it says: another process was in its way: the client waited 31ms of 80ms for CPU 0",
	}
	for i := range run.Modes {
		if m := &run.Modes[i]; m.Missing == "" {
			m.Sysctls = map[string]string{"net.ipv4.ip_forward": "1", "net.bridge.bridge-nf-call-iptables": fmt.Sprint(i / 3)}
		}
	}
	var got bytes.Buffer
	Markdown(&got, run, []Figure{{overview, "Budgets", ""}, {"udp64-same-node", "UDP", "udp64"}}, "plots")
	golden := filepath.Join("testdata", "bench.md")
	if *update {
		if err := os.WriteFile(golden, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got.String()); diff != "" {
		t.Errorf("(-want +got; go test -update writes it)\n%s", diff)
	}
}

func TestJudge(t *testing.T) {
	at := func(ratio float64) *result.Run {
		run := synthetic(5, 0, 1)
		slower(run, rate, "ebpf", ratio/0.95) // ratio to direct
		return run
	}
	bound := budget{row: rate, mode: "ebpf", base: "direct", bound: 0.92}
	memory := budget{row: result.Row{Workload: "agent", Metric: "memory"}, mode: "ebpf", bound: 80}
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
	gain := budget{row: rate, mode: "ebpf", base: "direct", bound: 1.02}
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
		"p99 of 110":       {at(1), budget{row: delay, mode: "ebpf", bound: 50}, met},
		"a slower p99":     {at(1), budget{row: delay, mode: "ebpf", bound: 40}, missed},
		"p99 of 88":        {short, budget{row: delay, mode: "ebpf", bound: 50}, notJudged},
		"from nowhere":     {at(1), budget{row: memory.row, mode: "ebpf", bound: 80, missing: "needs a cluster"}, notYet},
		"indicative":       {quick, bound, notJudged},
		"four rounds":      {short, bound, notJudged},
		"no such mode":     {at(1), budget{row: rate, mode: "ebpf-vxlan", base: "iptables", bound: 1}, notYet},
		"never measured":   {at(1), budget{row: result.Row{Workload: "tcp1", Metric: result.Rate}, mode: "ebpf", base: "direct", bound: 1}, notRun},
		"over the sweep":   {at(1), budget{row: result.Row{Workload: "nodes", Path: result.AcrossNodes, Metric: result.Cost, Point: 5000}, mode: "ebpf", from: 2, bound: 1.004}, missed},
		"sweep within":     {at(1), budget{row: result.Row{Workload: "nodes", Path: result.AcrossNodes, Metric: result.Cost, Point: 5000}, mode: "ebpf", from: 2, bound: 1.03}, met},
	} {
		t.Run(name, func(t *testing.T) {
			if got := judge(c.run, c.b); got.verdict != c.want {
				t.Errorf("%s (%s), measured %+v; want %s", got.verdict, got.why, got.measured, c.want)
			}
		})
	}
}

// Every budget is about a metric that the catalog has, in a mode that looks like something, and has a place for a reason.
func TestBudgetsFitTheCatalog(t *testing.T) {
	written, err := readReasons()
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range slices.Concat(budgets(), clusterBudgets()) {
		if metricOf(b.row).Name == "" {
			t.Errorf("no workload has the metric of %+v", b.row)
		}
		if !slices.ContainsFunc(looks(), func(l look) bool { return l.mode == b.mode }) {
			t.Errorf("mode %s has no look", b.mode)
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

// A reason that somebody wrote is said of a row that is missed, and of no other.
func TestReasons(t *testing.T) {
	written := reasonsFile
	defer func() { reasonsFile = written }()
	reasonsFile = []byte("udp64, same node / direct: {why: the veth pair, commit: 0123456789abcdef, kernel: 6.18.0}\n")
	run := synthetic(5, 0, 1)
	missing := budget{row: rate, mode: "ebpf", base: "direct", bound: 0.97}
	if j := judge(run, missing); j.verdict != missed || !j.explained || j.why != "the veth pair (found out at commit 0123456789ab, Linux 6.18.0)" {
		t.Errorf("%s: %s", j.verdict, j.why)
	}
	missing.bound = 0.9
	if j := judge(run, missing); j.verdict != met || j.why != "" || j.explained {
		t.Errorf("%s: %s", j.verdict, j.why)
	}
	unknown := budget{row: rate, mode: "ebpf", base: "iptables", bound: 2}
	if j := judge(run, unknown); j.verdict != missed || j.explained || j.why != unexplained {
		t.Errorf("%s: %s", j.verdict, j.why)
	}
}

// That reasons were found out is said only where each missed row has one.
func TestReasonsAreClaimedWhenTheyAreThere(t *testing.T) {
	written := reasonsFile
	defer func() { reasonsFile = written }()
	run := synthetic(5, 0, 1) // which misses three
	keys := []string{"udp64, across nodes / iptables", "cni / iptables", "agent: memory"}
	reasonsFile = nil
	for i := range keys {
		if text := markdown(run); strings.Contains(text, "was found out") || strings.Count(text, unexplained) != len(keys)-i {
			t.Errorf("with %d of %d reasons:\n%s", i, len(keys), text)
		}
		reasonsFile = fmt.Appendf(reasonsFile, "%q: {why: because, commit: abc, kernel: 6.18}\n", keys[i])
	}
	if text := markdown(run); !strings.Contains(text, "was found out") || strings.Contains(text, unexplained) {
		t.Errorf("with all reasons:\n%s", text)
	}
	for _, row := range []result.Row{
		{Workload: "udp64", Path: result.AcrossNodes, Metric: result.Rate}, {Workload: "cni", Metric: "pair-p50"}, {Workload: "agent", Metric: "memory"},
	} {
		factor := 0.5
		if row.Metric == result.Rate {
			factor = 1.1
		}
		slower(run, row, "ebpf", factor)
	}
	if text := markdown(run); strings.Contains(text, "was found out") || strings.Contains(text, "because") {
		t.Errorf("nothing is missed:\n%s", text)
	}
}

func markdown(run *result.Run) string {
	var text bytes.Buffer
	Markdown(&text, run, nil, "plots")
	return text.String()
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
	b := budget{row: rate, mode: "ebpf", base: "direct", bound: 0.92}
	for low, want := range map[float64]string{0.91: "the spread holds the bound", 0.93: ""} {
		if got := b.doubt(reading{Summary: result.Summary{N: 5, Median: 0.95, Low: low, High: 0.97}}); got != want {
			t.Errorf("from %g: %q", low, got)
		}
	}
}

func TestHeadline(t *testing.T) {
	dir := t.TempDir()
	readme := filepath.Join(dir, "README.md")
	write := func(text string) {
		if err := os.WriteFile(readme, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("before\n")
	if err := CheckHeadline(readme, "full"); err == nil || !strings.Contains(err.Error(), headlineBegins) {
		t.Errorf("no marks: %v", err)
	}
	write("before\n" + headlineBegins + "\nold\n" + headlineEnds + "\nafter\n")
	for range 2 { // the second time over the first
		if err := Headline(withKubeProxy(synthetic(5, 0, 1)), readme, filepath.Join(dir, "BENCHMARKS.md")); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(readme)
	if err != nil {
		t.Fatal(err)
	}
	got := string(text)
	for _, want := range []string{
		"before\n" + headlineBegins + "\n| ", headlineEnds + "\nafter\n", "[BENCHMARKS.md](BENCHMARKS.md)",
		"|  | bridge + iptables | ebpf-cni | ebpf-cni beside kube-proxy | ebpf-cni, of the machine's limit |",
		"| UDP, 64 bytes, same node | 300 kpps | 475 kpps: 1.58 x [1.58, 1.58] | 380 kpps: 1.27 x [1.27, 1.27] | 0.95 x [0.95, 0.95] |",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in:\n%s", want, got)
		}
	}
	if strings.Contains(got, "old") || strings.Count(got, headlineBegins) != 1 {
		t.Errorf("not replaced:\n%s", got)
	}
}

// Tables of one run never stand beside plots of another.
func TestStalePlotsAreRemoved(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"sweep-live.svg", "sweep-live.png", "notes.txt"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Figures(synthetic(5, 0.02, 1), dir, true); err != nil {
		t.Fatal(err)
	}
	left, _ := filepath.Glob(filepath.Join(dir, "sweep-*"))
	if want := []string{filepath.Join(dir, "sweep-nodes.png"), filepath.Join(dir, "sweep-nodes.svg")}; !slices.Equal(left, want) {
		t.Errorf("left: %v", left)
	}
	if _, err := os.Stat(filepath.Join(dir, "notes.txt")); err != nil {
		t.Error("what is no plot is none of its business")
	}
}

func TestWriteLinksToEveryPlot(t *testing.T) {
	dir := t.TempDir()
	for name, to := range map[string]Target{
		"beside": Beside(filepath.Join(dir, "out", "bench.json")),
		"into":   Into(filepath.Join(dir, "project", "BENCHMARKS.md")),
	} {
		t.Run(name, func(t *testing.T) {
			document, err := Write(synthetic(5, 0.02, 1), to)
			if err != nil {
				t.Fatal(err)
			}
			text, err := os.ReadFile(document)
			if err != nil {
				t.Fatal(err)
			}
			links := regexp.MustCompile(`!\[.*?\]\((.*?)\)`).FindAllStringSubmatch(string(text), -1)
			var linked []string
			for _, link := range links {
				linked = append(linked, filepath.Base(link[1]))
				svg, err := os.ReadFile(filepath.Join(filepath.Dir(document), link[1]))
				if err != nil || !bytes.Contains(svg, []byte("</svg>")) {
					t.Errorf("%s: %v, or no whole SVG", link[1], err)
				}
			}
			for _, want := range []string{"udp64-same-node.svg", "rr-across-nodes-rtt.svg", "cni.svg", "sweep-nodes.svg", "budgets.svg", "agent-memory.svg", "change-delay.svg"} {
				if !slices.Contains(linked, want) {
					t.Errorf("no link to %s among %v", want, linked)
				}
			}
			pngs, _ := filepath.Glob(filepath.Join(to.Plots, "*.png"))
			if to.PNG != (len(pngs) == len(linked)) {
				t.Errorf("%d PNGs for %d plots, wanted: %v", len(pngs), len(linked), to.PNG)
			}
		})
	}
}

func TestAxesBeginAtZero(t *testing.T) {
	for _, d := range drawings(synthetic(5, 0.02, 1)) {
		if d.plot == nil || d.Name == overview {
			continue
		}
		if d.plot.Y.Min != 0 || d.plot.Y.Max <= 0 {
			t.Errorf("%s: y from %g to %g", d.Name, d.plot.Y.Min, d.plot.Y.Max)
		}
		if !strings.ContainsAny(d.plot.Y.Label.Text, "sn/%M") {
			t.Errorf("%s: the axis %q has no unit", d.Name, d.plot.Y.Label.Text)
		}
	}
}

func TestNoValuesNoPlots(t *testing.T) {
	figures, err := Figures(&result.Run{}, t.TempDir(), true)
	if err != nil || len(figures) > 0 {
		t.Errorf("%v, %v", figures, err)
	}
}

package report

import (
	"bytes"
	"flag"
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
	run := synthetic(5, 0, 1)
	for i := range run.Samples {
		if s := &run.Samples[i]; s.Round == 5 && s.Workload == "udp64" && s.Path == result.Egress && s.Mode == "ebpf" {
			s.Values, s.Error = nil, "the packets went | another way\nsecond line"
		}
	}
	var got bytes.Buffer
	Markdown(&got, run, []Figure{{"udp64-same-node", "UDP", "udp64"}}, "plots")
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
		"the slowest":      {once(at(1), memory.row, 1.2), budget{row: memory.row, mode: "ebpf", bound: 110, worst: true}, missed},
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

// Every budget is about a metric that the catalog has, and the mode's name is one with a colour.
func TestBudgetsFitTheCatalog(t *testing.T) {
	for _, b := range budgets() {
		if metricOf(b.row).Name == "" {
			t.Errorf("no workload has the metric of %+v", b.row)
		}
		if _, ok := colours()[b.mode]; !ok {
			t.Errorf("mode %s has no colour", b.mode)
		}
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
			links := regexp.MustCompile(`\]\((.*?)\)`).FindAllStringSubmatch(string(text), -1)
			var linked []string
			for _, link := range links {
				linked = append(linked, filepath.Base(link[1]))
				svg, err := os.ReadFile(filepath.Join(filepath.Dir(document), link[1]))
				if err != nil || !bytes.Contains(svg, []byte("</svg>")) {
					t.Errorf("%s: %v, or no whole SVG", link[1], err)
				}
			}
			for _, want := range []string{"udp64-same-node.svg", "rr-across-nodes-rtt.svg", "cni.svg", "sweep-nodes.svg"} {
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
		if d.plot != nil && (d.plot.Y.Min != 0 || d.plot.Y.Max <= 0) {
			t.Errorf("%s: y from %g to %g", d.Name, d.plot.Y.Min, d.plot.Y.Max)
		}
		if d.plot != nil && !strings.ContainsAny(d.plot.Y.Label.Text, "sn/%") {
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

package report

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// writer writes the sections of a document, one after the other.
type writer struct {
	io.Writer

	run     *result.Run
	figures []Figure
	plots   string
	// below is what a section's title begins with: one level down where the document is not this run's.
	below string
	// kept: the document has a section of another run.
	kept bool
}

// Markdown writes the tables of a run, and links to figures in the directory plots: first what it comes to, then how it was come by, then
// every figure, then the machine.
func Markdown(w io.Writer, run *result.Run, figures []Figure, plots string) {
	(&writer{run: run, figures: figures, plots: plots}).document(w)
}

func (w *writer) document(to io.Writer) {
	var text bytes.Buffer
	w.Writer = &text
	w.head()
	w.budgets()
	w.compared()
	w.method()
	for _, workload := range result.Catalog() {
		if slices.Contains(w.run.Workloads, workload.Name) {
			w.workload(workload)
		}
	}
	w.retaken()
	w.refused()
	w.environment()
	fmt.Fprintf(to, "%s\n", bytes.TrimRight(text.Bytes(), "\n"))
}

func (w *writer) printf(format string, args ...any) { fmt.Fprintf(w.Writer, format, args...) }

func (w *writer) head() {
	r := w.run
	w.printf("# Benchmarks\n\n")
	but := ""
	if w.kept {
		but = ", but for those [on a real cluster](#on-a-real-cluster)"
	}
	w.printf("What `%s` measured on %s at commit %s, in %s: %s, %s, Linux %s. All figures, tables and plots on this page come from that one run%s; "+
		"`make bench-full` measures your machine.\n\n",
		r.Command, r.Started.UTC().Format("2006-01-02"), commit(r.Environment), r.Finished.Sub(r.Started).Round(time.Second),
		r.Environment.CPU, plural(r.Environment.Cores, "core"), r.Environment.Kernel, but)
	w.caveats()
}

// caveats say what the figures may be worth less for.
func (w *writer) caveats() {
	r := w.run
	if r.Indicative {
		w.printf("**Indicative**: a short run, which no budget is judged by.\n\n")
	}
	if r.Interrupted != "" {
		w.printf("**Incomplete**: %s. What was finished until then is here.\n\n", r.Interrupted)
	}
	for _, warning := range r.Environment.Warnings {
		w.printf("**Warning**: %s.\n\n", warning)
	}
}

// compared says what each mode is.
func (w *writer) compared() {
	var lines [][]string
	for _, l := range looks() {
		mode, ok := w.run.Mode(l.mode)
		if !ok {
			continue
		}
		about := l.about
		if mode.Missing != "" {
			about += ". **Not yet**: " + mode.Missing
		}
		lines = append(lines, []string{l.mode, about})
	}
	w.printf("## What is compared\n\n")
	w.lines([]string{"mode", "what"}, lines)
}

func (w *writer) method() {
	r := w.run
	w.printf("## Method\n\n")
	w.printf("- Each mode is a cluster of two nodes and a host outside, made of network namespaces on one machine. All stand at once, on links of the same kind, " +
		"MTU and offloads; an idle one handles no packet. There is no NIC: what a driver costs, or an offload saves, is not in the figures.\n")
	w.printf("- A round measures each workload in all modes, one right after the other, in the opposite order in every other round. %s, %g s a sample after "+
		"%g s of warm-up.\n", plural(r.Rounds, "round"), r.Duration, r.Warmup)
	w.printf("- The generators are the benchmark's own: one thread an end, each pinned to a CPU, the same system calls in all modes.\n")
	w.printf("- This project's agents run during all samples, the classical networks' too, while no flanneld and no kube-proxy runs: what an idle agent takes of " +
		"the CPUs is taken from all modes alike.\n")
	w.printf("- A sample counts only if the counters of links, of rules and of this project's programs show that the packets took the way that it claims, and " +
		"that none was dropped. One that something else on the machine disturbed is taken again, and listed below; any other is refused, and listed too. What lacks a " +
		"sample then is measured in one more round, in all modes that it is compared with.\n")
	w.printf("- A figure is the median of the rounds. In brackets stands its spread: the interval that holds the true median with at least 93 %% confidence, whatever " +
		"the distribution is; up to eight rounds that is the lowest to the highest (three rounds are sure to 75 %% only).\n")
	w.printf("- A ratio is taken round by round, then its median and spread; where the spread holds 1.0 it is printed as \"no difference\".\n")
	w.printf("- The median keeps a budget, or misses it; \"no difference\" is never a gain. A short run and fewer than %d rounds are not judged.\n", judgedRounds)
	w.printf("- Percentiles of rare things (pods added, nodes changed) are of all rounds' values together, with their number; below a hundred values " +
		"the slowest is printed, as such, and the p99 of a hundred is the second slowest: another run's may differ.\n")
	w.printf("- %s A receiver that finds nothing looks again after a moment; these looks are in it, and a slower network has more of them per packet.\n\n",
		result.CPUMeaning)
}

// workload is a section: the tables of one workload, then its plots.
func (w *writer) workload(workload result.Workload) {
	w.printf("%s## %s\n\n", w.below, strings.ToUpper(workload.Title[:1])+workload.Title[1:])
	if workload.Note != "" {
		w.printf("%s\n\n", workload.Note)
	}
	switch {
	case workload.Axis != "":
		w.sweep(workload)
	case workload.Name == "bpf":
		w.table(workload, nil)
		w.programs()
	case strings.HasPrefix(workload.Name, "agent") || strings.HasPrefix(workload.Name, "change"):
		w.table(workload, nil)
	case strings.HasPrefix(workload.Name, "cni") || w.run.Profile == result.ClusterProfile:
		w.table(workload, []string{"iptables"})
	default:
		w.table(workload, []string{"iptables", "direct"})
	}
	for _, f := range w.figures {
		if f.workload == workload.Name {
			w.link(f)
		}
	}
}

func (w *writer) link(f Figure) { w.printf("![%s](%s/%s.svg)\n\n", f.Title, w.plots, f.Name) }

// table has a line for each place and mode: every metric, and the main one's ratios. A mode that is missing has one line.
func (w *writer) table(workload result.Workload, bases []string) {
	head := []string{"path", "mode"}
	for _, m := range workload.Metrics {
		head = append(head, m.Title+", "+m.Unit)
	}
	for _, base := range bases {
		head = append(head, "/ "+base)
	}
	var lines [][]string
	for _, path := range append(result.Paths(), "") {
		if !w.has(workload.Name, path) {
			continue
		}
		for _, mode := range w.run.Modes {
			if line := w.line(workload, path, mode.Name, bases); line != nil {
				lines = append(lines, line)
			}
		}
	}
	for _, mode := range w.run.Modes {
		if mode.Missing != "" && len(lines) > 0 {
			lines = append(lines, append([]string{"", mode.Name, notYet}, make([]string, len(head)-3)...))
		}
	}
	w.lines(head, lines)
}

// line is nil for a mode that the workload is not for.
func (w *writer) line(workload result.Workload, path, mode string, bases []string) []string {
	row := result.Row{Workload: workload.Name, Path: path, Metric: workload.Metrics[0].Name}
	line := []string{path, mode}
	if _, ok := w.run.Summary(row, mode); !ok {
		if n, _ := w.run.Refused(row, mode); n == 0 {
			return nil
		}
		return append(append(line, "refused"), make([]string, len(workload.Metrics)-1+len(bases))...)
	}
	for _, m := range workload.Metrics {
		row.Metric = m.Name
		line = append(line, w.cell(row, mode))
	}
	row.Metric = workload.Metrics[0].Name
	for _, base := range bases {
		cell := ""
		if s, ok := w.run.Ratio(row, mode, base); ok && mode != base {
			cell = ratio(s)
		}
		line = append(line, cell)
	}
	return line
}

// cell is what a run says of a row in one mode; empty where it says nothing.
func (w *writer) cell(row result.Row, mode string) string {
	metric := metricOf(row)
	if t, ok := w.run.Tail(row, mode); ok {
		return tail(t, metric, "")
	}
	if s, ok := w.run.Summary(row, mode); ok {
		return value(scaled(s, metric))
	}
	return ""
}

func (w *writer) has(workload, path string) bool {
	return slices.ContainsFunc(w.run.Samples, func(s result.Sample) bool { return s.Workload == workload && s.Path == path })
}

// sweep has a line for each mode and point, and what the first point's cost is multiplied by.
func (w *writer) sweep(workload result.Workload) {
	points := Points(w.run, workload.Name)
	head := []string{workload.Axis, "mode", "path"}
	for _, m := range workload.Metrics {
		head = append(head, m.Title+", "+m.Unit)
	}
	var lines [][]string
	for _, mode := range w.run.Modes {
		for _, path := range append(result.Paths(), "") {
			for _, point := range points {
				row := result.Row{Workload: workload.Name, Path: path, Metric: workload.Metrics[0].Name, Point: point}
				if line := w.at(workload, row, mode.Name); line != nil {
					lines = append(lines, append(line, w.growth(row, mode.Name, points[0])))
				}
			}
		}
	}
	if len(points) > 0 {
		head = append(head, fmt.Sprintf("/ itself with %d", points[0]))
	}
	w.lines(head, lines)
}

func (w *writer) at(workload result.Workload, row result.Row, mode string) []string {
	line := []string{fmt.Sprint(row.Point), mode, row.Path}
	found := false
	for _, m := range workload.Metrics {
		row.Metric = m.Name
		cell := w.cell(row, mode)
		line, found = append(line, cell), found || cell != ""
	}
	if !found {
		return nil
	}
	return line
}

func (w *writer) growth(row result.Row, mode string, first int) string {
	s, ok := w.run.PointRatio(row, mode, first)
	if !ok || row.Point == first {
		return ""
	}
	return ratio(s)
}

// programs splits the run time of BPF programs by program.
func (w *writer) programs() {
	names := map[string]bool{}
	for _, s := range w.run.Samples {
		if s.Workload == "bpf" {
			for name := range s.Values {
				names[name] = name != result.BPFPer
			}
		}
	}
	var lines [][]string
	for _, path := range result.Paths() {
		for _, mode := range w.run.Modes {
			for _, name := range sorted(names) {
				s, ok := w.run.Summary(result.Row{Workload: "bpf", Path: path, Metric: name}, mode.Name)
				if ok && s.Median >= 1e-9 {
					lines = append(lines, []string{path, mode.Name, name, value(scaled(s, result.Metric{Scale: 1e-9}))})
				}
			}
		}
	}
	w.lines([]string{"path", "mode", "program", "run time per packet, ns"}, lines)
}

func sorted(set map[string]bool) (names []string) {
	for name, in := range set {
		if in {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	return names
}

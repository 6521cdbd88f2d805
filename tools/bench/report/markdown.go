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
}

// Markdown writes the tables of a run, and links to figures in the directory plots.
func Markdown(w io.Writer, run *result.Run, figures []Figure, plots string) {
	var text bytes.Buffer
	out := &writer{Writer: &text, run: run, figures: figures, plots: plots}
	out.head()
	out.budgets()
	out.modes()
	for _, workload := range result.Catalog() {
		if slices.Contains(run.Workloads, workload.Name) {
			out.workload(workload)
		}
	}
	out.refused()
	out.environment()
	fmt.Fprintf(w, "%s\n", bytes.TrimRight(text.Bytes(), "\n"))
}

func (w *writer) printf(format string, args ...any) { fmt.Fprintf(w.Writer, format, args...) }

func (w *writer) head() {
	r := w.run
	w.printf("# Benchmark\n\n")
	if r.Indicative {
		w.printf("**Indicative**: a short run, which no budget is judged by. `make bench-full` measures everything.\n\n")
	}
	if r.Interrupted != "" {
		w.printf("**Incomplete**: %s. What was finished until then is here.\n\n", r.Interrupted)
	}
	w.printf("%s finished, %g s a sample after %g s of warm-up, %s, %s.\n", plural(r.Rounds, "round"), r.Duration, r.Warmup,
		r.Started.UTC().Format("2006-01-02 15:04 MST"), r.Finished.Sub(r.Started).Round(time.Second))
	w.printf("Command: `%s`. Commit %s%s. %s, %s, Linux %s.\n\n", r.Command, short(r.Environment.Commit), dirty(r.Environment),
		r.Environment.CPU, plural(r.Environment.Cores, "core"), r.Environment.Kernel)
	for _, warning := range r.Environment.Warnings {
		w.printf("Warning: %s.\n\n", warning)
	}
	w.printf("Every figure is the median of the rounds. In brackets stands its spread: the interval that holds the true median with at least 93 %% " +
		"confidence, whatever the distribution; up to eight rounds that is the lowest to the highest (three rounds are sure to 75 %% only). A ratio is taken " +
		"round by round, from two samples next to each other, and \"no difference\" means that its spread holds 1.0. A sample counts only if the " +
		"dataplane's own counters show that the packets took the way that it claims.\n\n")
}

// budgets is what the design asks, row by row.
func (w *writer) budgets() {
	w.printf("## Budgets\n\n| what | mode | against | budget | measured | verdict |\n|---|---|---|---|---|---|\n")
	var notes []string
	for _, b := range budgets() {
		j := judge(w.run, b)
		against := b.base
		if b.from != 0 {
			against = fmt.Sprintf("itself with %d", b.from)
		}
		measured := ""
		if j.measured.N > 0 {
			measured = value(j.measured) + " " + metricOf(b.row).Unit
			if b.base != "" || b.from != 0 {
				measured = ratio(j.measured)
			}
		}
		w.printf("| %s | %s | %s | %s | %s | %s |\n", rowTitle(b.row), b.mode, dash(against), b.text(), dash(measured), strong(j.verdict))
		// A sentence that many rows share is said once.
		if note := j.verdict + ": " + j.why; j.why != "" && !slices.Contains(notes, note) {
			notes = append(notes, note)
		}
	}
	w.printf("\n")
	for _, note := range notes {
		w.printf("- %s\n", note)
	}
	if len(notes) > 0 {
		w.printf("\n")
	}
}

func (w *writer) modes() {
	missing := false
	for _, m := range w.run.Modes {
		if m.Missing != "" {
			w.printf("%s is not measured yet: it %s.\n", m.Name, m.Missing)
			missing = true
		}
	}
	if missing {
		w.printf("\n")
	}
}

// workload is a section: the tables of one workload, then its plots.
func (w *writer) workload(workload result.Workload) {
	w.printf("## %s\n\n", strings.ToUpper(workload.Title[:1])+workload.Title[1:])
	switch {
	case workload.Axis != "":
		w.sweep(workload)
	case workload.Name == "bpf":
		w.table(workload, nil)
		w.programs()
	case workload.Name == "agent" || workload.Name == "change":
		w.table(workload, nil)
	case strings.HasPrefix(workload.Name, "cni"):
		w.table(workload, []string{"iptables"})
	default:
		w.table(workload, []string{"iptables", "direct"})
	}
	for _, f := range w.figures {
		if f.workload == workload.Name {
			w.printf("![%s](%s/%s.svg)\n\n", f.Title, w.plots, f.Name)
		}
	}
}

// table has a line for each place and mode: every metric, and the main one's ratios and budgets.
func (w *writer) table(workload result.Workload, bases []string) {
	head := []string{"path", "mode"}
	for _, m := range workload.Metrics {
		head = append(head, m.Title+", "+m.Unit)
	}
	for _, base := range bases {
		head = append(head, "/ "+base, "budget")
	}
	var lines [][]string
	for _, path := range append(result.Paths(), "") {
		if !w.has(workload.Name, path) {
			continue
		}
		for _, mode := range w.run.Modes {
			if line := w.line(workload, path, mode, bases); line != nil {
				lines = append(lines, line)
			}
		}
	}
	w.lines(head, lines)
}

// line is nil for a mode that the workload is not for.
func (w *writer) line(workload result.Workload, path string, mode result.Mode, bases []string) []string {
	row := result.Row{Workload: workload.Name, Path: path, Metric: workload.Metrics[0].Name}
	if mode.Missing != "" {
		line := []string{path, mode.Name, notYet}
		return append(line, make([]string, len(workload.Metrics)-1+2*len(bases))...)
	}
	if _, ok := w.run.Summary(row, mode.Name); !ok {
		if n, _ := w.run.Refused(row, mode.Name); n == 0 {
			return nil
		}
		return append([]string{path, mode.Name, "refused"}, make([]string, len(workload.Metrics)-1+2*len(bases))...)
	}
	line := []string{path, mode.Name}
	for _, m := range workload.Metrics {
		row.Metric = m.Name
		s, ok := w.run.Summary(row, mode.Name)
		cell := ""
		if ok {
			cell = value(scaled(s, m))
		}
		line = append(line, cell)
	}
	row.Metric = workload.Metrics[0].Name
	for _, base := range bases {
		cell := ""
		if s, ok := w.run.Ratio(row, mode.Name, base); ok && mode.Name != base {
			cell = ratio(s)
		}
		line = append(line, cell, bounds(w.run, row, mode.Name, base))
	}
	return line
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
		for _, path := range result.Paths() {
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
		s, ok := w.run.Summary(row, mode)
		cell := ""
		if ok {
			cell, found = value(scaled(s, m)), true
		}
		line = append(line, cell)
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

package report

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// lines writes a table; nothing when it would be empty but for a word.
func (w *writer) lines(head []string, lines [][]string) {
	if len(lines) == 0 {
		w.printf("Not measured.\n\n")
		return
	}
	w.printf("| %s |\n|%s\n", strings.Join(head, " | "), strings.Repeat("---|", len(head)))
	for _, line := range lines {
		cells := make([]string, len(line))
		for i, cell := range line {
			cells[i] = strings.ReplaceAll(cell, "|", "\\|")
		}
		w.printf("| %s |\n", strings.Join(cells, " | "))
	}
	w.printf("\n")
}

// refused lists the samples that did not measure what they claim.
func (w *writer) refused() {
	var lines [][]string
	for _, s := range w.run.Samples {
		if s.Error != "" {
			why, _, _ := strings.Cut(s.Error, "\n")
			what := s.Workload
			if workload, _ := result.Find(s.Workload); workload.Axis != "" {
				what = fmt.Sprintf("%s %d", what, s.Point)
			}
			lines = append(lines, []string{what, s.Path, s.Mode, fmt.Sprint(s.Round), why})
		}
	}
	if len(lines) == 0 {
		return
	}
	w.printf("## Refused samples\n\n")
	w.lines([]string{"workload", "path", "mode", "round", "why"}, lines)
}

func (w *writer) environment() {
	e := w.run.Environment
	lines := [][]string{
		{"kernel", "Linux " + e.Kernel}, {"CPU", e.CPU}, {"cores", fmt.Sprint(e.Cores)}, {"memory", fmt.Sprintf("%d MiB", e.MemoryMB)},
		{"runs in", dash(e.Virtual)}, {"commit", e.Commit + dirty(e)}, {"load average at the start", fmt.Sprintf("%.2f", e.Load)},
	}
	for _, name := range slices.Sorted(maps.Keys(e.Versions)) {
		lines = append(lines, []string{name, e.Versions[name]})
	}
	for _, name := range slices.Sorted(maps.Keys(e.Sysctls)) {
		lines = append(lines, []string{name, e.Sysctls[name]})
	}
	w.printf("## Environment\n\n")
	w.lines([]string{"what", "value"}, lines)
}

// value prints a median and its spread.
func value(s result.Summary) string {
	if s.N == 1 {
		return number(s.Median)
	}
	return fmt.Sprintf("%s [%s, %s]", number(s.Median), number(s.Low), number(s.High))
}

func ratio(s result.Summary) string {
	if s.N == 1 {
		return fmt.Sprintf("%.2f x", s.Median)
	}
	return fmt.Sprintf("%s [%.2f, %.2f]", s.Verdict(), s.Low, s.High)
}

func rowTitle(row result.Row) string {
	workload, _ := result.Find(row.Workload)
	title := join(workload.Title, row.Path)
	if workload.Axis != "" {
		title = join(fmt.Sprintf("cost per packet, %d %s", row.Point, workload.Axis), row.Path)
	}
	if row.Metric == result.Rate || row.Metric == result.Cost {
		return title
	}
	return title + ": " + metricOf(row).Title
}

func strong(verdict string) string {
	if verdict == met || verdict == missed {
		return "**" + verdict + "**"
	}
	return verdict
}

func dash(text string) string {
	if text == "" {
		return "–"
	}
	return text
}

func short(commit string) string {
	if commit == "" {
		return "unknown"
	}
	return commit[:min(len(commit), 12)]
}

func dirty(e result.Environment) string {
	if e.Dirty {
		return ", with changes"
	}
	return ""
}

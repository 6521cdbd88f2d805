package report

import (
	"fmt"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// lines writes a table, without the columns that are empty in all lines; instead of an empty one, that there is nothing.
func (w *writer) lines(head []string, lines [][]string) {
	if len(lines) == 0 {
		w.printf("Not measured.\n\n")
		return
	}
	head, lines = filled(head, lines)
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

func filled(head []string, lines [][]string) (filledHead []string, filledLines [][]string) {
	filledLines = make([][]string, len(lines))
	for column, name := range head {
		if !slices.ContainsFunc(lines, func(line []string) bool { return line[column] != "" }) {
			continue
		}
		filledHead = append(filledHead, name)
		for i, line := range lines {
			filledLines[i] = append(filledLines[i], line[column])
		}
	}
	return filledHead, filledLines
}

// value prints a median and its spread.
func value(s result.Summary) string {
	if s.N == 1 {
		return number(s.Median)
	}
	return fmt.Sprintf("%s [%s, %s]", number(s.Median), number(s.Low), number(s.High))
}

// tail prints a quantile of all rounds together, and of how many durations it is.
func tail(t result.Tail, m result.Metric, unit string) string {
	of := "of"
	if t.Slowest {
		of = "slowest of"
	}
	return fmt.Sprintf("%s%s (%s %d)", number(t.Seconds/m.Scale), unit, of, t.N)
}

func scaled(s result.Summary, m result.Metric) result.Summary {
	if m.Scale == 0 {
		return s
	}
	return result.Summary{N: s.N, Median: s.Median / m.Scale, Low: s.Low / m.Scale, High: s.High / m.Scale}
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
		return join(fmt.Sprintf("%s, %d %s", metricOf(row).Title, row.Point, workload.Axis), row.Path)
	}
	if row.Metric == result.Rate {
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

// commit says what was measured: the checkout's, and that of each program that is of another.
func commit(e result.Environment) string {
	text := short(e.Commit) + dirty(e)
	for _, name := range result.Ours() {
		built := e.Versions[name]
		if built == "" || built == e.Commit {
			continue
		}
		of, changes, _ := strings.Cut(built, ",")
		if changes != "" {
			changes = "," + changes
		}
		text += fmt.Sprintf(" (%s: %s%s)", name, short(of), changes)
	}
	return text
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

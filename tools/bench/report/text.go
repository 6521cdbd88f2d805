package report

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// table is one in Markdown, without the columns that are empty in all lines; instead of an empty one, that there is nothing.
func table(head []string, lines [][]string) string {
	if len(lines) == 0 {
		return "Not measured.\n\n"
	}
	var columns []int
	for column := range head {
		if slices.ContainsFunc(lines, func(line []string) bool { return line[column] != "" }) {
			columns = append(columns, column)
		}
	}
	row := func(cells []string) string {
		text := "|"
		for _, column := range columns {
			text += " " + strings.ReplaceAll(cells[column], "|", "\\|") + " |"
		}
		return text + "\n"
	}
	text := row(head) + "|" + strings.Repeat("---|", len(columns)) + "\n"
	for _, line := range lines {
		text += row(line)
	}
	return text + "\n"
}

// number prints three significant digits, without an exponent.
func number(v float64) string {
	switch {
	case v >= 99.95 || v == 0:
		return fmt.Sprintf("%.0f", v)
	case v >= 9.995:
		return fmt.Sprintf("%.1f", v)
	case v >= 0.9995:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.3f", v)
}

// value prints a median and its spread.
func value(s result.Summary) string {
	if s.N == 1 {
		return number(s.Median)
	}
	return fmt.Sprintf("%s [%s, %s]", number(s.Median), number(s.Low), number(s.High))
}

// median is a row's in its unit; empty where there is none.
func median(run *result.Run, row result.Row, mode string) string {
	s, ok := run.Summary(row, mode)
	if !ok {
		return ""
	}
	m := row.Of()
	return number(s.In(m).Median) + " " + m.Unit
}

// ratio prints one, or that it is none, and its spread.
func ratio(s result.Summary) string {
	text := fmt.Sprintf("%.2f x", s.Median)
	if s.N == 1 {
		return text
	}
	if s.Same() {
		text = "no difference"
	}
	return fmt.Sprintf("%s [%.2f, %.2f]", text, s.Low, s.High)
}

// tail prints a percentile of all rounds together, and of how many durations it is.
func tail(t result.Tail, m result.Metric) string {
	of := "of"
	if t.Slowest {
		of = "slowest of"
	}
	return fmt.Sprintf("%s (%s %d)", number(t.Seconds/m.Scale), of, t.N)
}

func rowTitle(row result.Row) string {
	w, _ := result.Find(row.Workload)
	if w.Axis != "" {
		return join(fmt.Sprintf("%s, %d %s", row.Of().Title, row.Point, w.Axis), row.Path)
	}
	title := join(w.Title, row.Path)
	if row.Metric == result.Rate {
		return title
	}
	return title + ": " + row.Of().Title
}

func join(title, more string) string {
	if more == "" {
		return title
	}
	return title + ", " + more
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

// brief is the first line of an error, without what each of them begins with.
func brief(why string) string {
	first, _, _ := strings.Cut(why, "\n")
	for _, common := range []string{"it says: ", "sample claims: "} {
		if _, after, found := strings.Cut(first, common); found {
			return after
		}
	}
	return first
}

func short(commit string) string { return commit[:min(len(commit), 12)] }

// commit says what was measured: the checkout's, and that of each program that is of another.
func commit(e result.Environment) string {
	text := dash(short(e.Commit))
	if e.Dirty {
		text += ", with changes"
	}
	for _, name := range result.Ours() {
		if built := e.Versions[name]; built != "" && built != e.Commit {
			commit, _, _ := strings.Cut(built, ",")
			text += fmt.Sprintf(" (%s: %s)", name, strings.Replace(built, commit, short(commit), 1))
		}
	}
	return text
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func sorted(set map[string]string) []string { return slices.Sorted(maps.Keys(set)) }

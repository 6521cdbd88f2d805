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

// subject is what a figure is of: a row in a mode, divided by the same in another mode, or in the same mode at another point of a sweep, or by nothing.
type subject struct {
	row  result.Row
	mode string
	base string
	// itself says that it is divided by itself at the point from.
	itself bool
	from   int
}

// over is what the row is divided by, if anything.
func (s subject) over() string {
	if s.itself {
		return fmt.Sprintf("itself with %d", s.from)
	}
	return s.base
}

// values are a subject's, one for each round that has it.
func (s subject) values(run *result.Run) []float64 {
	own := run.Values(s.row, s.mode)
	if s.base == "" && !s.itself {
		return slices.Collect(maps.Values(own))
	}
	by := s.divisor()
	return result.Pairs(own, run.Values(by.row, by.mode))
}

// divisor is the subject whose values this one's are divided by.
func (s subject) divisor() subject {
	if s.itself {
		row := s.row
		row.Point = s.from
		return subject{row: row, mode: s.mode}
	}
	return subject{row: s.row, mode: s.base}
}

// reading is what a run says of a subject, in the unit of its metric.
type reading struct {
	result.Summary

	// text is the median, and the spread if there is one.
	text, unit string
	// short says what there is too little of for a judgement.
	short string
}

func (r reading) withUnit() string { return strings.TrimSuffix(r.text+" "+r.unit, " ") }

// read reads a subject. A percentile of durations is of all rounds together, with their number; ok is false when there is no sample.
func (s subject) read(run *result.Run) (r reading, ok bool) {
	m := s.row.Of()
	if m.Of != "" {
		t, ok := run.Tail(s.row, s.mode)
		v, of := t.Seconds/m.Scale, "of"
		r = reading{Summary: result.Summary{N: t.N, Median: v, Low: v, High: v}, unit: m.Unit}
		if t.Slowest {
			of, r.short = "slowest of", fmt.Sprintf("%s are too few for a %s", plural(t.N, "value"), m.Title)
		}
		r.text = fmt.Sprintf("%s (%s %d)", number(v), of, t.N)
		return r, ok
	}
	r.unit = m.Unit
	if r.Summary, ok = result.Summarise(s.values(run)); s.over() == "" {
		r.Summary = r.In(m)
	}
	r.text = number(r.Median)
	spread := fmt.Sprintf(" [%s, %s]", number(r.Low), number(r.High))
	if s.over() != "" {
		r.unit, r.text, spread = "", fmt.Sprintf("%.2f x", r.Median), fmt.Sprintf(" [%.2f, %.2f]", r.Low, r.High)
		if r.N > 1 && r.Same() {
			r.text = "no difference"
		}
	}
	if r.N > 1 {
		r.text += spread
	}
	w, _ := result.Find(s.row.Workload)
	if r.N < judgedRounds && !w.Once {
		r.short = fmt.Sprintf("%s; a judgement takes %d", plural(r.N, "round"), judgedRounds)
	}
	return r, ok
}

// median is a row's in its unit; empty where there is none.
func median(run *result.Run, row result.Row, mode string) string {
	r, ok := subject{row: row, mode: mode}.read(run)
	if !ok {
		return ""
	}
	return number(r.Median) + " " + r.unit
}

// ratio is a row's in a mode to that in another, and its spread; empty where there is none.
func ratio(run *result.Run, row result.Row, mode, base string) string {
	r, ok := subject{row: row, mode: mode, base: base}.read(run)
	if !ok {
		return ""
	}
	return r.text
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

package typed

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Column is a column of a table.
type Column struct {
	Name string
	// Right aligns numbers.
	Right bool
}

// Table is the sorted content of a map. Rows are made on demand, since a flow table
// may have hundreds of thousands.
type Table struct {
	Name    string
	Columns []Column
	// Len is the number of rows.
	Len int
	// Cells returns row i as text, a cell per column.
	Cells func(i int) []string
	// Object returns row i with all fields under their C names.
	Object func(i int) Object
}

// gap separates columns.
const gap = "  "

// WriteText writes the table as text: a header, and a line per row.
func (t Table) WriteText(w io.Writer) error {
	widths := make([]int, len(t.Columns))
	header := make([]string, len(t.Columns))
	for i, c := range t.Columns {
		header[i], widths[i] = c.Name, utf8.RuneCountInString(c.Name)
	}
	for i := range t.Len {
		for j, cell := range t.Cells(i) {
			widths[j] = max(widths[j], utf8.RuneCountInString(cell))
		}
	}
	b := bufio.NewWriter(w)
	t.writeLine(b, widths, header)
	for i := range t.Len {
		t.writeLine(b, widths, t.Cells(i))
	}
	return b.Flush()
}

func (t Table) writeLine(w *bufio.Writer, widths []int, cells []string) {
	var line strings.Builder
	for i, cell := range cells {
		if i > 0 {
			line.WriteString(gap)
		}
		pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
		if t.Columns[i].Right {
			line.WriteString(pad + cell)
		} else {
			line.WriteString(cell + pad)
		}
	}
	// bufio keeps the first error for Flush.
	_, _ = w.WriteString(Printable(strings.TrimRight(line.String(), " ")) + "\n")
}

// Printable replaces control characters, so that text from outside, such as a
// container's ID, cannot control the terminal.
func Printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, text)
}

// WriteJSON writes the rows as an array of objects, each on a line of its own or
// all on one line. There is no newline at the end.
func (t Table) WriteJSON(w io.Writer, oneLine bool) error {
	first, between, last := "\n  ", ",\n  ", "\n"
	if oneLine {
		first, between, last = "", ", ", ""
	}
	b := bufio.NewWriter(w)
	_, _ = b.WriteString("[")
	for i := range t.Len {
		object, err := t.Object(i).MarshalJSON()
		if err != nil {
			return fmt.Errorf("encode map %s: %w", t.Name, err)
		}
		if i == 0 {
			_, _ = b.WriteString(first)
		} else {
			_, _ = b.WriteString(between)
		}
		_, _ = b.Write(object)
	}
	if t.Len > 0 {
		_, _ = b.WriteString(last)
	}
	_, _ = b.WriteString("]")
	return b.Flush()
}

// MarshalJSON implements json.Marshaler: an array of objects.
func (t Table) MarshalJSON() ([]byte, error) {
	objects := make([]Object, t.Len)
	for i := range objects {
		objects[i] = t.Object(i)
	}
	return json.Marshal(objects)
}

// Age is how long ago a time stamp of a map was, such as "12s", "5m" or "3h";
// "-" for the stamp 0, which means never.
func Age(now, stamp uint64) string {
	if stamp == 0 {
		return "-"
	}
	// A packet may pass between the reading of the clock and of the map.
	var d time.Duration
	if stamp < now {
		d = time.Duration(now - stamp)
	}
	switch {
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	return fmt.Sprintf("%dd", d/(24*time.Hour))
}

package main

import (
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"
)

// screen writes for people. Without colour it writes the same words.
type screen struct {
	out    io.Writer
	colour bool
	failed int // how many checks did not hold
}

const (
	bold  = "1"
	dim   = "2"
	red   = "31"
	green = "32"
	cyan  = "36"
)

func (s *screen) paint(code, text string) string {
	if !s.colour || text == "" {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

func (s *screen) line(format string, args ...any) { fmt.Fprintf(s.out, format+"\n", args...) }

func (s *screen) heading(text string) { s.line("\n%s", s.paint(bold, text)) }

func (s *screen) mark(ok bool) string {
	if ok {
		return s.paint(green, "✓")
	}
	return s.paint(red, "✗")
}

// check writes one line that says whether something held, and remembers when it did not.
func (s *screen) check(ok bool, format string, args ...any) {
	if !ok {
		s.failed++
	}
	s.line("  %s %s", s.mark(ok), fmt.Sprintf(format, args...))
}

// step runs one step of the work with its name and its time on a line. An error ends the demo.
func (s *screen) step(name string, work func() error) error {
	started := time.Now()
	fmt.Fprintf(s.out, "  %s %s", s.paint(cyan, "·"), pad(name, 58))
	if err := work(); err != nil {
		s.failed++
		s.line(" %s", s.mark(false))
		return err
	}
	s.line(" %s %s", s.mark(true), s.paint(dim, seconds(time.Since(started))))
	return nil
}

// quote writes the output of a program, indented, at most so many lines of it.
func (s *screen) quote(output string, most int) {
	lines := strings.Split(strings.TrimRight(output, "\n"), "\n")
	for i, line := range lines {
		if i == most && len(lines) > most+1 {
			s.line("    %s", s.paint(dim, fmt.Sprintf("… and %d more", len(lines)-most)))
			return
		}
		s.line("    %s", line)
	}
}

func seconds(d time.Duration) string {
	if d < time.Second {
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}

// pad fills up to a width that is counted in characters, not bytes.
func pad(text string, width int) string {
	return text + strings.Repeat(" ", max(0, width-utf8.RuneCountInString(text)))
}

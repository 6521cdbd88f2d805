package main

import (
	"fmt"
	"io"
	"time"
)

// progress tells a person how far a run is, and how long it will go on.
type progress struct {
	w io.Writer
	// terminal: one line that is written over; else one line per item.
	terminal bool
	rounds   int
	// left is what remains of the plan's estimate; spent and estimated, what the finished part took and was thought to take.
	left, spent, estimated time.Duration
	// retaken is how often a sample was disturbed and taken again.
	retaken int
	last    string
}

// at says what is being measured.
func (p *progress) at(round int, i item, mode string) {
	line := fmt.Sprintf("round %d of %d, %s left%s: %s", round, p.rounds, p.remaining(), p.disturbed(), i)
	if p.terminal {
		fmt.Fprintf(p.w, "\r\x1b[K%s [%s]", line, mode)
		return
	}
	if what := fmt.Sprintf("round %d: %s", round, i); what != p.last {
		fmt.Fprintln(p.w, line)
		p.last = what
	}
}

// more adds a round of some items.
func (p *progress) more(items []item) {
	p.rounds++
	for _, i := range items {
		p.left += time.Duration(len(i.modes)) * i.takes
	}
}

// again counts a sample that was disturbed.
func (p *progress) again() { p.retaken++ }

func (p *progress) disturbed() string {
	if p.retaken == 0 {
		return ""
	}
	return fmt.Sprintf(", %d taken again", p.retaken)
}

// done takes a sample off the estimate.
func (p *progress) done(estimate, took time.Duration) {
	p.left -= estimate
	p.estimated += estimate
	p.spent += took
}

// remaining is the estimate, corrected by how wrong it has been so far.
func (p *progress) remaining() string {
	left := p.left
	if p.estimated > 10*time.Second {
		left = time.Duration(float64(left) * float64(p.spent) / float64(p.estimated))
	}
	return max(left, 0).Round(time.Second).String()
}

// end leaves the line.
func (p *progress) end() {
	if p.terminal {
		fmt.Fprintln(p.w)
	}
}

package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/test/vm/wire"
)

// report collects what a machine says and prints it as go test does.
type report struct {
	*session
	out     io.Writer
	kernel  kernel
	suites  []suite
	release string
	results []*result
	done    bool
	failed  bool
	broken  bool // by more than tests that failed
	// unsteady are tests that failed, and passed when they ran once more.
	unsteady string
}

// current is the suite that runs.
func (r *report) current() *result {
	if n := len(r.results); n > 0 && r.results[n-1].ended == nil {
		return r.results[n-1]
	}
	if len(r.results) == len(r.suites) {
		return nil
	}
	next := &result{suite: r.suites[len(r.results)]}
	r.results = append(r.results, next)
	return next
}

func (r *report) frame(f wire.Frame) {
	switch {
	case f.Booted != "":
		r.release = f.Booted
		fmt.Fprintf(r.out, "=== kernel %s: Linux %s\n", r.kernel.name, f.Booted)
	case f.Line != nil:
		c := r.current()
		if c == nil {
			r.fault("output of no suite: %s", *f.Line)
			return
		}
		c.output = append(c.output, *f.Line)
		if r.options.verbose {
			fmt.Fprint(r.out, *f.Line)
		}
	case f.File != nil:
		r.keep(*f.File)
	case f.Ended != nil:
		c := r.current()
		if c == nil || c.suite.Dir != f.Ended.Dir {
			r.fault("the end of %s comes unexpectedly", f.Ended.Dir)
			return
		}
		c.ended = f.Ended
		r.print(c)
	case f.Broken != "":
		r.fault("in the machine: %s", f.Broken)
	case f.Done:
		r.done = true
	}
}

func (r *report) fault(format string, args ...any) {
	r.broken = true
	r.complain(format, args...)
}

func (r *report) complain(format string, args ...any) {
	r.failed = true
	fmt.Fprintf(r.out, "test-kernels: kernel "+r.kernel.name+": "+format+"\n", args...)
}

// keep writes a file that a suite was asked for into the tree. The bounds of other kernels than the running one are those that
// the machine was given, and may be older than what is there by now.
func (r *report) keep(f wire.File) {
	version, err := parseRelease(r.release)
	if err != nil {
		r.fault("a file from %q: %v", r.release, err)
		return
	}
	if filepath.Base(f.Path) != "verifier-"+version.String()+".txt" {
		return
	}
	if !filepath.IsLocal(f.Path) {
		r.fault("the machine sends %s", f.Path)
		return
	}
	if err := os.WriteFile(filepath.Join(r.workshop.root, f.Path), f.Content, 0o644); err != nil {
		r.fault("%v", err)
	}
}

// print says how a suite has ended, in full when it has not passed.
func (r *report) print(c *result) {
	faults := c.faults()
	seconds := 0.0
	if c.ended != nil {
		seconds = c.ended.Seconds
	}
	if len(faults) == 0 {
		fmt.Fprintf(r.out, "ok  \t%s/%s\t%.3fs\n", modulePath, c.suite.Dir, seconds)
		return
	}
	if !r.options.verbose {
		for _, line := range c.output {
			fmt.Fprint(r.out, line)
		}
	}
	for _, fault := range faults {
		r.complain("%s: %s", c.suite.Dir, fault)
	}
	r.broken = r.broken || !c.onlyTestsFailed()
	fmt.Fprintf(r.out, "FAIL\t%s/%s\t%.3fs\n", modulePath, c.suite.Dir, seconds)
}

const modulePath = "github.com/ebpf-cni/ebpf-cni"

// finish judges the whole.
func (r *report) finish(console string, broken error) {
	if broken != nil {
		r.fault("%v", broken)
	}
	if !r.done {
		r.fault("the machine did not come to its end; the last lines of its console:\n%s", tail(console, 40))
	}
	if c := r.last(); c != nil && c.ended == nil {
		r.print(c)
	}
	for _, s := range r.suites[len(r.results):] {
		r.fault("%s did not run", s.Dir)
	}
	if lines := complaints(console); len(lines) > 0 {
		r.fault("the kernel complains:\n%s\nThe end of its console:\n%s", strings.Join(lines, "\n"), tail(console, 60))
	}
	r.judgeSkips()
}

func (r *report) last() *result {
	if len(r.results) == 0 {
		return nil
	}
	return r.results[len(r.results)-1]
}

// judgeSkips prints what was skipped and compares it with what may be.
func (r *report) judgeSkips() {
	var got []string
	ran := make(map[string]bool)
	for _, c := range r.results {
		got = append(got, c.skipped()...)
		ran[c.suite.Dir] = r.options.whole() && c.ended != nil && c.ended.Status == 0
	}
	for _, name := range got {
		fmt.Fprintf(r.out, "skipped on %s: %s\n", r.kernel.name, name)
	}
	version, err := parseRelease(r.release)
	if err != nil {
		r.fault("%v", err)
		return
	}
	expected, exact, err := expectedSkips(filepath.Join(r.workshop.root, "test", "vm"), version)
	if err != nil {
		r.fault("%v", err)
	}
	for _, problem := range compareSkips(got, expected, ran, exact) {
		r.fault("%s", problem)
	}
	if r.kernel.series != "" && r.kernel.series != version.String() {
		r.fault("this is Linux %s", r.release)
	}
}

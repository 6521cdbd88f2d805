// Command testsum reads what `go test -json` prints and shows a person what matters: a line per package, the whole output of
// each test that failed, and the tests that took longest. Its last line counts the tests. Its exit status is 0 only if at least one test has
// passed, none has failed, and each that was skipped may be skipped.
//
//	go test -json ./... | go run ./tools/testsum -may-skip FILE -again FILE
//
// The first file names tests, one a line; what follows a # is a comment. Lines of the input that are no JSON are passed on.
// The second is written: a line with package and name for each test that failed, if they are few and nothing else is wrong.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

func main() {
	file := flag.String("may-skip", "", "file with the names of tests that may be skipped")
	again := flag.String("again", "", "file to write, with the tests that may run once more")
	flag.Parse()
	maySkip, err := names(*file)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
		os.Exit(2)
	}
	s := summary{out: os.Stdout, maySkip: maySkip}
	ok, err := s.run(os.Stdin)
	if err == nil && *again != "" {
		err = os.WriteFile(*again, []byte(s.again()), 0o600)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
		os.Exit(2)
	}
	if !ok {
		os.Exit(1)
	}
}

// names reads the names in a file; none when there is no file to read.
func names(file string) (map[string]bool, error) {
	found := map[string]bool{}
	if file == "" {
		return found, nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		name, _, _ := strings.Cut(line, "#")
		if name = strings.TrimSpace(name); name != "" {
			found[name] = true
		}
	}
	return found, nil
}

// event is one line of `go test -json`; of a build it has an ImportPath instead of a Package.
type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64
}

// unit is what an event belongs to: a test, or without Test the package itself.
type unit struct{ Package, Test string }

type summary struct {
	out     io.Writer
	maySkip map[string]bool
	// output is kept until the unit's verdict is known.
	output                  map[unit]*strings.Builder
	passed, failed, skipped int
	failures                []string
	failedTests             []unit // without their cases
	broken                  bool   // by more than tests that failed
	took                    []timed
}

// timed is a test, without its cases, and the seconds it took.
type timed struct {
	unit
	seconds float64
}

// Of a stage's tests so many are named that took at least so many seconds: what is worth looking at first when it is too slow.
const (
	slowest = 10
	slow    = 5
)

// run reads events to their end and says whether all is well.
func (s *summary) run(in io.Reader) (bool, error) {
	s.output = map[unit]*strings.Builder{}
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			s.line(line)
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return false, fmt.Errorf("read events: %w", err)
		}
	}
	s.unfinished()
	s.showSlowest()
	for _, failure := range s.failures {
		fmt.Fprintln(s.out, failure)
	}
	if s.passed == 0 {
		s.broken = true
		fmt.Fprintln(s.out, "no test has passed")
	}
	fmt.Fprintf(s.out, "%d passed, %d failed, %d skipped\n", s.passed, s.failed, s.skipped)
	return s.passed > 0 && len(s.failures) == 0, nil
}

func (s *summary) line(line string) {
	var e event
	if json.Unmarshal([]byte(line), &e) != nil || e.Action == "" {
		fmt.Fprint(s.out, line)
		return
	}
	u := unit{e.Package, e.Test}
	switch e.Action {
	case "build-output":
		fmt.Fprint(s.out, e.Output)
	case "start", "run":
		s.output[u] = &strings.Builder{}
	case "output":
		s.keep(u, e.Output)
	case "pass", "fail", "skip":
		s.verdict(u, e)
	}
}

// keep notes output of a unit. The names of cases that begin and end would hide what the cases say.
func (s *summary) keep(u unit, output string) {
	// The package's other tests have not run.
	if strings.HasPrefix(output, "panic: ") || strings.HasPrefix(output, "fatal error: ") {
		s.broken = true
	}
	for _, frame := range []string{"=== RUN ", "=== PAUSE ", "=== CONT ", "=== NAME "} {
		if strings.HasPrefix(output, frame) {
			return
		}
	}
	if s.output[u] == nil {
		s.output[u] = &strings.Builder{}
	}
	s.output[u].WriteString(output)
}

func (s *summary) verdict(u unit, e event) {
	defer delete(s.output, u)
	if u.Test == "" {
		s.endPackage(u, e)
		return
	}
	if e.Elapsed >= slow && !strings.Contains(u.Test, "/") {
		s.took = append(s.took, timed{u, e.Elapsed})
	}
	switch e.Action {
	case "pass":
		s.passed++
	case "skip":
		s.skipped++
		if !s.maySkip[u.Test] {
			s.broken = true
			s.failures = append(s.failures, fmt.Sprintf("skipped without leave: %s %s", u.Package, u.Test))
			s.show(u)
		}
	case "fail":
		s.failed++
		if !strings.Contains(u.Test, "/") {
			s.failedTests = append(s.failedTests, u)
		}
		s.failures = append(s.failures, fmt.Sprintf("failed: %s %s", u.Package, u.Test))
		s.show(u)
	}
}

// endPackage shows a package's verdict. One can fail without a test that does: it does not build, or its process dies.
func (s *summary) endPackage(u unit, e event) {
	word := map[string]string{"pass": "ok", "fail": "FAIL", "skip": "-"}[e.Action]
	if e.Action == "fail" {
		s.broken = s.broken || !slices.ContainsFunc(s.failedTests, func(t unit) bool { return t.Package == u.Package })
		s.failures = append(s.failures, "failed: "+u.Package)
		s.show(u)
	}
	fmt.Fprintf(s.out, "%-4s %7.1f s  %s\n", word, e.Elapsed, u.Package)
}

// showSlowest names the tests that took longest, the longest first.
func (s *summary) showSlowest() {
	slices.SortStableFunc(s.took, func(a, b timed) int { return cmp.Compare(b.seconds, a.seconds) })
	for _, t := range s.took[:min(slowest, len(s.took))] {
		fmt.Fprintf(s.out, "slow %7.1f s  %s %s\n", t.seconds, t.Package, t.Test)
	}
}

// unfinished reports what has begun and never ended, as when the process was killed.
func (s *summary) unfinished() {
	for u := range s.output {
		s.broken = true
		s.failures = append(s.failures, strings.TrimSpace(fmt.Sprintf("never ended: %s %s", u.Package, u.Test)))
		s.show(u)
	}
}

// few is how many failed tests at most run once more.
const few = 3

// again are the tests that may run once more, a line each; none where that could not make all well.
func (s *summary) again() string {
	if s.broken || len(s.failedTests) > few {
		return ""
	}
	var lines strings.Builder
	for _, t := range s.failedTests {
		fmt.Fprintln(&lines, t.Package, t.Test)
	}
	return lines.String()
}

func (s *summary) show(u unit) {
	if kept := s.output[u]; kept != nil {
		fmt.Fprint(s.out, kept.String())
	}
}

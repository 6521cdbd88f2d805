package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/test/vm/wire"
)

// verdict is what go test -v prints when a test has ended. Another process may have begun the line: a test's child that
// was killed while it wrote.
var verdict = regexp.MustCompile(`--- (PASS|FAIL|SKIP): (\S+) \(`)

// result is what has come back of one suite.
type result struct {
	suite  suite
	output []string
	ended  *wire.Ended
}

// verdicts are the tests that ended in one way, in order.
func (r *result) verdicts(how string) []string {
	var names []string
	for _, line := range r.output {
		if m := verdict.FindStringSubmatch(line); m != nil && m[1] == how {
			names = append(names, m[2])
		}
	}
	return names
}

// faults are all reasons why the suite has not passed.
func (r *result) faults() []string {
	if r.ended == nil {
		return []string{"it has not ended"}
	}
	var out []string
	if r.ended.Status != 0 {
		out = append(out, fmt.Sprintf("exit status %d: %s", r.ended.Status, r.ended.Error))
	}
	for _, name := range r.verdicts("FAIL") {
		out = append(out, name+" failed")
	}
	for _, name := range r.withoutResult() {
		out = append(out, name+" has no result")
	}
	return out
}

// withoutResult are the tests that were to run, and of whose end nothing was said.
func (r *result) withoutResult() []string {
	ended := slices.Concat(r.verdicts("PASS"), r.verdicts("FAIL"), r.verdicts("SKIP"))
	return slices.DeleteFunc(slices.Clone(r.suite.tests), func(name string) bool { return slices.Contains(ended, name) })
}

// skipped are the suite's skips as the files of expected ones name them.
func (r *result) skipped() []string {
	names := r.verdicts("SKIP")
	for i := range names {
		names[i] = r.suite.Dir + " " + names[i]
	}
	return names
}

// trouble is what a kernel prints when something is wrong with it.
var trouble = regexp.MustCompile(`WARNING:|BUG:|Oops|Kernel panic|general protection fault|Call Trace:|stack segment|` +
	`divide error|invalid opcode|UBSAN:|KASAN:|KFENCE:|lockdep|INFO: task .* blocked|detected stall|soft lockup|` +
	`unregister_netdevice: waiting|refcount_t:|Out of memory|oom-kill|page allocation failure|segfault at`)

// complaints are the lines of a console that say so.
func complaints(console string) []string {
	var out []string
	for line := range strings.Lines(console) {
		if trouble.MatchString(line) {
			out = append(out, strings.TrimSpace(line))
		}
	}
	return out
}

// tail is the end of a text.
func tail(text string, lines int) string {
	all := strings.Split(strings.TrimRight(text, "\r\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// release is a kernel's version as numbers.
type release struct{ major, minor int }

var releaseText = regexp.MustCompile(`^([0-9]+)\.([0-9]+)`)

func parseRelease(s string) (release, error) {
	m := releaseText.FindStringSubmatch(s)
	if m == nil {
		return release{}, fmt.Errorf("%q is no kernel release", s)
	}
	major, err1 := strconv.Atoi(m[1])
	minor, err2 := strconv.Atoi(m[2])
	return release{major, minor}, errors.Join(err1, err2)
}

func (r release) after(o release) bool {
	return r.major > o.major || r.major == o.major && r.minor > o.minor
}

func (r release) String() string { return fmt.Sprintf("%d.%d", r.major, r.minor) }

// expectedSkips reads skips-X.Y.txt of the kernel, or else that of the newest kernel before it: a newer one lacks no more.
// exact says that the file is the kernel's own, so that what it names must have been skipped.
func expectedSkips(dir string, of release) (skips []string, exact bool, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "skips-*.txt"))
	if err != nil {
		return nil, false, err
	}
	var best release
	path := ""
	for _, file := range files {
		r, err := parseRelease(strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), "skips-"), ".txt"))
		if err != nil {
			return nil, false, fmt.Errorf("%s: %w", file, err)
		}
		if !r.after(of) && (path == "" || r.after(best)) {
			best, path = r, file
		}
	}
	if path == "" {
		return nil, false, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, false, err
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	for s.Scan() {
		line, _, _ := strings.Cut(s.Text(), "#")
		if line = strings.Join(strings.Fields(line), " "); line != "" {
			skips = append(skips, line)
		}
	}
	return skips, best == of, s.Err()
}

// compareSkips says what is wrong with the skips: nothing may be skipped that is not expected, and when all tests of their
// package ran, the expected ones must have been, or the file is out of date.
func compareSkips(got, expected []string, ran map[string]bool, exact bool) []string {
	var out []string
	for _, name := range got {
		if !slices.Contains(expected, name) {
			out = append(out, name+" was skipped, which the file of skips does not expect")
		}
	}
	for _, name := range expected {
		dir, _, _ := strings.Cut(name, " ")
		if exact && ran[dir] && !slices.Contains(got, name) {
			out = append(out, name+" stands in the file of skips, but was not skipped")
		}
	}
	return out
}

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// pkg wraps events of tests into those of a package that ended with the given verdict.
func pkg(verdict string, events ...string) string {
	all := append([]string{`{"Action":"start","Package":"p"}`}, events...)
	return strings.Join(append(all, `{"Action":"`+verdict+`","Package":"p","Elapsed":1.5}`), "\n") + "\n"
}

const (
	passA = `{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestA","Output":"=== RUN   TestA\n"}
{"Action":"output","Package":"p","Test":"TestA","Output":"said by A\n"}
{"Action":"pass","Package":"p","Test":"TestA","Elapsed":0.1}`
	failB = `{"Action":"run","Package":"p","Test":"TestB"}
{"Action":"output","Package":"p","Test":"TestB","Output":"    b_test.go:7: is wrong\n"}
{"Action":"fail","Package":"p","Test":"TestB","Elapsed":0.1}`
	skipC = `{"Action":"run","Package":"p","Test":"TestC"}
{"Action":"output","Package":"p","Test":"TestC","Output":"    c_test.go:7: no such kernel\n"}
{"Action":"skip","Package":"p","Test":"TestC","Elapsed":0.1}`
	runD = `{"Action":"run","Package":"p","Test":"TestD"}
{"Action":"output","Package":"p","Test":"TestD","Output":"panic: at work\n"}`
)

// runCase is an input, and what of it a person is shown.
type runCase struct {
	in      string
	ok      bool
	shows   []string
	hides   []string
	maySkip string
	again   string
}

func runCases() map[string]runCase {
	return map[string]runCase{
		"all pass": {
			in: pkg("pass", passA), ok: true,
			shows: []string{"ok       1.5 s  p\n", "1 passed, 0 failed, 0 skipped\n"},
			hides: []string{"said by A", "=== RUN"},
		},
		"one fails": {
			in: pkg("fail", passA, failB), again: "p TestB\n",
			shows: []string{"b_test.go:7: is wrong", "failed: p TestB\n", "FAIL     1.5 s  p\n", "1 passed, 1 failed, 0 skipped\n"},
			hides: []string{"said by A"},
		},
		"one panics": {
			in:    pkg("fail", passA, strings.Replace(failB, "    b_test.go:7: is wrong", "panic: x", 1)),
			shows: []string{"failed: p TestB\n"},
		},
		"many fail": {
			in:    pkg("fail", passA, failB, failB, failB, failB),
			shows: []string{"1 passed, 4 failed, 0 skipped\n"},
		},
		"one fails and one is cut off": {
			in:    pkg("fail", passA, failB) + runD + "\n",
			shows: []string{"failed: p TestB\n", "never ended: p TestD\n"},
		},
		"a skip": {
			in:    pkg("pass", passA, skipC),
			shows: []string{"skipped without leave: p TestC\n", "no such kernel", "1 passed, 0 failed, 1 skipped\n"},
		},
		"a skip with leave": {
			in: pkg("pass", passA, skipC), maySkip: "TestC", ok: true,
			shows: []string{"1 passed, 0 failed, 1 skipped\n"},
			hides: []string{"without leave"},
		},
		"nothing ran":         {in: "", shows: []string{"no test has passed\n", "0 passed, 0 failed, 0 skipped\n"}},
		"only packages":       {in: pkg("skip"), shows: []string{"no test has passed\n"}},
		"does not build":      {in: `{"ImportPath":"p","Action":"build-output","Output":"p.go:1: undefined\n"}` + "\n" + pkg("pass", passA) + pkg("fail"), shows: []string{"p.go:1: undefined\n", "failed: p\n"}},
		"the process is gone": {in: `{"Action":"start","Package":"p"}` + "\n" + passA + "\n" + runD + "\n", shows: []string{"never ended: p TestD\n", "never ended: p\n", "panic: at work\n"}},
		"a test that quotes a verdict": {
			in: pkg("pass", passA, `{"Action":"output","Package":"p","Test":"TestA","Output":"--- FAIL: TestZ (0.00s)\n"}`,
				`{"Action":"pass","Package":"p","Test":"TestA"}`), ok: true,
			hides: []string{"TestZ"},
		},
		"slow tests": {
			in: pkg("pass", passA, `{"Action":"pass","Package":"p","Test":"TestE","Elapsed":6}`, `{"Action":"pass","Package":"p","Test":"TestF","Elapsed":7}`,
				`{"Action":"pass","Package":"p","Test":"TestF/case","Elapsed":7}`), ok: true,
			shows: []string{"slow     7.0 s  p TestF\nslow     6.0 s  p TestE\n"},
			hides: []string{"p TestA", "TestF/case"},
		},
		"other lines": {in: "go build ./...\n{}\n" + pkg("pass", passA), ok: true, shows: []string{"go build ./...\n", "{}\n"}},
	}
}

func TestRun(t *testing.T) {
	for name, c := range runCases() {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			s := summary{out: &out, maySkip: map[string]bool{c.maySkip: true}}
			ok, err := s.run(strings.NewReader(c.in))
			if err != nil {
				t.Fatal(err)
			}
			if again := s.again(); again != c.again {
				t.Errorf("%q runs once more, want %q", again, c.again)
			}
			if ok != c.ok {
				t.Errorf("ok is %v, want %v", ok, c.ok)
			}
			for _, want := range c.shows {
				if !strings.Contains(out.String(), want) {
					t.Errorf("%q is not shown", want)
				}
			}
			for _, hidden := range c.hides {
				if strings.Contains(out.String(), hidden) {
					t.Errorf("%q is shown", hidden)
				}
			}
			if t.Failed() {
				t.Log(out.String())
			}
		})
	}
}

func TestNames(t *testing.T) {
	file := filepath.Join(t.TempDir(), "may-skip")
	if err := os.WriteFile(file, []byte("# why\nTestA # because\n\n  TestB/case\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	found, err := names(file)
	if err != nil {
		t.Fatal(err)
	}
	if len(found) != 2 || !found["TestA"] || !found["TestB/case"] {
		t.Errorf("found %v", found)
	}
	if _, err := names(file + "x"); err == nil {
		t.Error("a file that is not there is no error")
	}
}

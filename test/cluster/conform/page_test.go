package main

import (
	"flag"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the golden page anew")

var someRuns = []runOf{
	{family: "ipv4", results: []result{
		{"DNS works", passed, ""}, {"Services a<b|c", failed, "want 1"}, {"dual", left, "wants both"}, {"sctp", left, "no SCTP"}, {"zones", skipped, "one zone"},
	}},
	{family: "dual", results: []result{
		{"DNS works", passed, ""}, {"Services a<b|c", passed, ""}, {"dual", passed, ""}, {"sctp", left, "no SCTP"}, {"zones", skipped, "one zone"},
	}},
}

func TestDocument(t *testing.T) {
	const file = "testdata/page.md"
	got := document(subject{version: "v1.2.3", kubernetes: "v1.36.3", kernel: "6.12.1", nodes: 6}, someRuns)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("the page is not %s (-update writes it anew):\n%s", file, got)
	}
}

func TestTableEndsWithWhatMattersMost(t *testing.T) {
	got := table(someRuns)
	last := -1
	for _, part := range []string{"| DNS works | passed | passed |", "## Left out", "## Skipped", "## Failed", "| ipv4 | 1 | 1 | 1 | 2 |"} {
		at := strings.Index(got, part)
		if at <= last {
			t.Errorf("%q is not there, or too early:\n%s", part, got)
		}
		last = at
	}
	if strings.Contains(got, "| sctp |") {
		t.Errorf("what ran nowhere has a line:\n%s", got)
	}
}

func TestOutcomeOfARun(t *testing.T) {
	if err := judge([]runOf{{results: []result{{outcome: passed}, {outcome: skipped}, {outcome: left}}}}, "out"); err != nil {
		t.Errorf("nothing has failed, and yet: %v", err)
	}
	for _, what := range []outcome{failed, notRun} {
		if err := judge([]runOf{{results: []result{{outcome: what}}}}, "out"); err == nil {
			t.Errorf("a test that is %s is no error", what)
		}
	}
}

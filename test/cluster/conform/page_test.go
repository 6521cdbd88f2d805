package main

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

var update = flag.Bool("update", false, "write the golden page anew")

var aSubject = subject{Version: "v1.2.3", Kubernetes: cluster.KubernetesVersion, Kernel: "6.12.1", Nodes: 6}

var someRuns = []runOf{
	{subject: aSubject, Family: "ipv4", Results: []result{
		{"DNS works", passed, ""}, {"Services a<b|c", failed, "want 1"}, {"dual", left, "wants both"}, {"sctp", left, "no SCTP"}, {"zones", skipped, "one zone."},
	}},
	{subject: aSubject, Family: "dual", Results: []result{
		{"DNS works", passed, ""}, {"Services a<b|c", passed, ""}, {"dual", passed, ""}, {"sctp", left, "no SCTP"}, {"zones", skipped, "one zone."},
	}},
}

func TestDocument(t *testing.T) {
	const file = "testdata/page.md"
	got := document(someRuns)
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

// Of a family that no run was made of, the page says so.
func TestPageOfOneFamily(t *testing.T) {
	const said = "Of these clusters there is no such run: "
	if got := document(someRuns[1:]); !strings.Contains(got, said+"ipv4.\n") {
		t.Errorf("nothing says that ipv4 is missing:\n%s", got)
	}
	if got := document(someRuns); strings.Contains(got, said) {
		t.Errorf("nothing is missing, and yet:\n%s", got)
	}
}

func TestTableEndsWithWhatMattersMost(t *testing.T) {
	got := table(someRuns)
	last := -1
	for _, part := range []string{"| DNS works | passed | passed |", "## Left out", "## Skipped", "## Failed", "| ipv4 | v1.2.3 | 6.12.1 | 6 | 1 | 1 | 1 | 2 |"} {
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
	if err := judge([]runOf{{Results: []result{{Outcome: passed}, {Outcome: skipped}, {Outcome: left}}}}, "out"); err != nil {
		t.Errorf("nothing has failed, and yet: %v", err)
	}
	for _, what := range []outcome{failed, notRun} {
		if err := judge([]runOf{{Results: []result{{Outcome: what}}}}, "out"); err == nil {
			t.Errorf("a test that is %s is no error", what)
		}
	}
}

package main

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/onsi/ginkgo/v2/types"
)

// spec is a test's report as ginkgo writes it.
func spec(name string, state types.SpecState, said string) types.SpecReport {
	group, leaf, _ := strings.Cut(name, " ")
	return types.SpecReport{
		ContainerHierarchyTexts: []string{group}, LeafNodeText: leaf, LeafNodeType: types.NodeTypeIt, State: state,
		Failure: types.Failure{Message: said},
	}
}

// read is what readReport makes of ginkgo's JSON.
func read(t *testing.T, specs ...types.SpecReport) types.Report {
	t.Helper()
	raw, err := json.Marshal([]types.Report{{SpecReports: specs}})
	if err != nil {
		t.Fatal(err)
	}
	report, err := readReport(raw)
	if err != nil {
		t.Fatal(err)
	}
	return report
}

func TestResults(t *testing.T) {
	before := types.SpecReport{LeafNodeType: types.NodeTypeSynchronizedBeforeSuite, State: types.SpecStateFailed, Failure: types.Failure{Message: "no nodes"}}
	fine := types.SpecReport{LeafNodeType: types.NodeTypeSynchronizedAfterSuite, State: types.SpecStatePassed}
	report := read(t, before, fine,
		spec("[sig-network] works", types.SpecStatePassed, ""),
		spec("[sig-network] breaks", types.SpecStateFailed, "\nwant 1\ngot 2"),
		spec("[sig-network] hangs", types.SpecStateTimedout, "took too long"),
		spec("[sig-network] asks for ssh", types.SpecStateSkipped, "no ssh"),
		spec("[sig-network] sctp", types.SpecStateSkipped, ""),
		spec("[sig-network] never began", types.SpecStateSkipped, ""),
		spec("[sig-network] someday", types.SpecStatePending, ""),
		spec("[sig-network] unwanted", types.SpecStateSkipped, ""),
		spec("[sig-node] works", types.SpecStatePassed, ""),
	)
	got := results(report, func(name string) bool { return !strings.HasSuffix(name, "unwanted") }, func(name string) string {
		if strings.Contains(name, "sctp") {
			return "no SCTP"
		}
		return ""
	})
	want := []result{
		{"SynchronizedBeforeSuite", failed, "no nodes"},
		{"asks for ssh", skipped, "no ssh"},
		{"breaks", failed, "want 1"},
		{"hangs", failed, "took too long"},
		{"never began", notRun, "the run ended before"},
		{"sctp", left, "no SCTP"},
		{"someday", skipped, "pending"},
		{"works", passed, ""},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%q\nwant\n%q", got, want)
	}
	if n := (runOf{Results: got}).count(failed); n != 3 {
		t.Errorf("%d have failed, want 3", n)
	}
}

func TestNamesAreThoseOfTheNetwork(t *testing.T) {
	names, err := namesIn(read(t, spec("[sig-network] works", types.SpecStatePassed, ""), spec("[sig-node] works", types.SpecStatePassed, "")))
	if want := []string{"[sig-network] works"}; err != nil || !slices.Equal(names, want) {
		t.Errorf("got %q, %v; want %q", names, err, want)
	}
	if _, err := namesIn(read(t, spec("[sig-node] works", types.SpecStatePassed, ""))); err == nil {
		t.Error("a report without a test of the network is no error")
	}
}

func TestReportOfNoSuiteIsRefused(t *testing.T) {
	for _, raw := range []string{"", "{}", "[]", "[{},{}]"} {
		if _, err := readReport([]byte(raw)); err == nil {
			t.Errorf("%q: read without an error", raw)
		}
	}
}

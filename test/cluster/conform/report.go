package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/onsi/ginkgo/v2/types"
)

// prefix begins the name of every test of the network; label is what upstream gives them for ginkgo's filter.
const (
	prefix = "[sig-network] "
	label  = "sig-network"
)

// outcome is what became of a test.
type outcome string

const (
	passed  outcome = "passed"
	failed  outcome = "failed"
	skipped outcome = "skipped" // by upstream's own decision, while it ran
	left    outcome = "left out"
	notRun  outcome = "not run" // it was to run, and the run ended before
)

// result is one test's, without the prefix that all have. The reason says why it did not pass.
type result struct {
	Name    string  `json:"name"`
	Outcome outcome `json:"outcome"`
	Reason  string  `json:"reason,omitempty"`
}

// runOf is what came of the tests on one cluster, by name.
type runOf struct {
	subject
	Family  string   `json:"family"`
	Results []result `json:"results"`
}

func (r runOf) count(what outcome) (n int) {
	for _, one := range r.Results {
		if one.Outcome == what {
			n++
		}
	}
	return n
}

// readReport reads ginkgo's report of the one suite.
func readReport(raw []byte) (types.Report, error) {
	var all []types.Report
	if err := json.Unmarshal(raw, &all); err != nil {
		return types.Report{}, fmt.Errorf("read ginkgo's report: %w", err)
	}
	if len(all) != 1 {
		return types.Report{}, fmt.Errorf("read ginkgo's report: it is about %d suites, not one", len(all))
	}
	return all[0], nil
}

// namesIn are the tests of the network that a report names, whether they ran or not.
func namesIn(report types.Report) (names []string, err error) {
	for _, spec := range report.SpecReports {
		if isTest(spec) {
			names = append(names, spec.FullText())
		}
	}
	if len(names) == 0 {
		return nil, errors.New("ginkgo's report has no test whose name begins with " + prefix)
	}
	return names, nil
}

func isTest(spec types.SpecReport) bool {
	return spec.LeafNodeType == types.NodeTypeIt && strings.HasPrefix(spec.FullText(), prefix)
}

// results says what became of each test of the network that wanted takes, and of what the suite itself does before and after.
func results(report types.Report, wanted func(name string) bool, reason func(name string) string) (all []result) {
	for _, spec := range report.SpecReports {
		name := spec.FullText()
		switch {
		case isTest(spec) && wanted(name):
			one := resultOf(spec, reason(name))
			one.Name = strings.TrimPrefix(name, prefix)
			all = append(all, one)
		case spec.LeafNodeType != types.NodeTypeIt && spec.Failed():
			all = append(all, result{Name: spec.LeafNodeType.String(), Outcome: failed, Reason: firstLine(spec.FailureMessage())})
		}
	}
	slices.SortStableFunc(all, func(a, b result) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// resultOf is a test's, which is left out if there is a reason for it.
func resultOf(spec types.SpecReport, reason string) result {
	switch said := firstLine(spec.FailureMessage()); {
	case reason != "":
		return result{Outcome: left, Reason: reason}
	case spec.State == types.SpecStatePassed:
		return result{Outcome: passed}
	case spec.Failed():
		return result{Outcome: failed, Reason: said}
	// Ginkgo gives no message where it skips by itself.
	case spec.State == types.SpecStateSkipped && said != "":
		return result{Outcome: skipped, Reason: said}
	case spec.State == types.SpecStatePending:
		return result{Outcome: skipped, Reason: "pending"}
	default:
		return result{Outcome: notRun, Reason: "the run ended before"}
	}
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	return line
}

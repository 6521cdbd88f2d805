package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// test runs suites on a machine, and the tests that fail there once more on another, if they are few.
func (s *session) test(ctx context.Context, r *report) error {
	if err := s.testOnce(ctx, r); err != nil {
		return err
	}
	suites := r.failedTests(s.again)
	if len(suites) == 0 {
		return nil
	}
	fmt.Fprintf(r.out, "=== kernel %s: once more, alone: %s\n", r.kernel.name, testsOf(suites))
	alone := session{workshop: s.workshop, machine: s.machine, options: s.options}
	alone.options.run = testsOf(suites) // so that no skips of other tests are expected
	second := &report{session: &alone, out: r.out, kernel: r.kernel, suites: suites}
	if err := s.testOnce(ctx, second); err != nil {
		return err
	}
	if !second.failed {
		r.failed, r.unsteady = false, testsOf(suites)
	}
	return nil
}

// failedTests are the suites with nothing but the tests that failed; none if all passed, more than limit failed, or anything else is wrong.
func (r *report) failedTests(limit int) (suites []suite) {
	failed := 0
	for _, c := range r.results {
		names := c.failedTests()
		if len(names) == 0 {
			continue
		}
		failed += len(names)
		s := c.suite
		s.tests = names
		s.Args = r.options.args(s.Dir, tests(names...))
		suites = append(suites, s)
	}
	if r.broken || failed > limit {
		return nil
	}
	return suites
}

func testsOf(suites []suite) string {
	var names []string
	for _, s := range suites {
		for _, name := range s.tests {
			names = append(names, s.Dir+" "+name)
		}
	}
	return strings.Join(names, ", ")
}

// failedTests are the tests that have failed, without their cases.
func (r *result) failedTests() []string {
	return slices.DeleteFunc(r.verdicts("FAIL"), func(name string) bool { return strings.Contains(name, "/") })
}

// onlyTestsFailed says whether the suite ran to its end, and tests have failed in it.
func (r *result) onlyTestsFailed() bool {
	return r.ended != nil && len(r.failedTests()) > 0 && len(r.withoutResult()) == 0
}

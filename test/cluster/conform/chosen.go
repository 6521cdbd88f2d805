package main

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
)

// chosen are the regular expressions of a file, one a line, by which tests are chosen.
type chosen []string

// readChosen reads such a file; # begins a comment.
func readChosen(file string) (chosen, error) {
	if file == "" {
		return nil, nil
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read which tests are wanted: %w", err)
	}
	var all chosen
	for line := range strings.Lines(string(raw)) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if _, err := regexp.Compile(line); err != nil {
			return nil, fmt.Errorf("read which tests are wanted, of %s: %w", file, err)
		}
		all = append(all, line)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s names no test", file)
	}
	return all, nil
}

// expression matches what is chosen.
func (c chosen) expression() string { return strings.Join(c, "|") }

// check is an error about lines that match no test: upstream has renamed it or taken it away.
func (c chosen) check(tests []string) error {
	var failed []error
	for _, line := range c {
		if !slices.ContainsFunc(tests, regexp.MustCompile(line).MatchString) {
			failed = append(failed, fmt.Errorf("%q is wanted and matches no test: take the line away, or mend it", line))
		}
	}
	return errors.Join(failed...)
}

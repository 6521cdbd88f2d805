package main

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// exclusion is an entry of left-out.yaml: the tests whose names match do not run, for a reason.
type exclusion struct {
	Match  string `json:"match"`
	Reason string `json:"reason"`
	// In are the clusters that it is about; none: all.
	In []string `json:"in,omitempty"`

	match *regexp.Regexp
}

type leftOut []exclusion

// readLeftOut reads left-out.yaml.
func readLeftOut(raw []byte) (leftOut, error) {
	var all leftOut
	if err := yaml.UnmarshalStrict(raw, &all); err != nil {
		return nil, fmt.Errorf("read what is left out: %w", err)
	}
	for i := range all {
		e := &all[i]
		if e.Match == "" || e.Reason == "" {
			return nil, fmt.Errorf("read what is left out: entry %d: wants match and reason", i+1)
		}
		for _, family := range e.In {
			if cluster.FamilyChoices[family] == nil {
				return nil, fmt.Errorf("read what is left out: %q: takes place in %q; there are ipv4, ipv6 and dual", e.Match, family)
			}
		}
		var err error
		if e.match, err = regexp.Compile(e.Match); err != nil {
			return nil, fmt.Errorf("read what is left out: %w", err)
		}
	}
	return all, nil
}

func (e exclusion) isIn(family string) bool { return len(e.In) == 0 || slices.Contains(e.In, family) }

// reason is why a test is left out of a cluster's run, by the first entry that matches; empty: it runs.
func (l leftOut) reason(family, test string) string {
	for _, e := range l {
		if e.isIn(family) && e.match.MatchString(test) {
			return e.Reason
		}
	}
	return ""
}

// expression matches what is left out of a cluster's run, for ginkgo; empty: nothing is.
func (l leftOut) expression(family string) string {
	var all []string
	for _, e := range l {
		if e.isIn(family) {
			all = append(all, "(?:"+e.Match+")")
		}
	}
	return strings.Join(all, "|")
}

// check is an error about entries that match no test: upstream has renamed it or taken it away.
func (l leftOut) check(tests []string) error {
	var failed []error
	for _, e := range l {
		if !slices.ContainsFunc(tests, e.match.MatchString) {
			failed = append(failed, fmt.Errorf("left-out.yaml: %q matches no test: take the entry away, or mend it", e.Match))
		}
	}
	return errors.Join(failed...)
}

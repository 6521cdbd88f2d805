package main

import (
	"strings"
	"testing"
)

const someLeftOut = `
- {match: 'SCTP|sctp', reason: no SCTP}
- {match: 'DualStack', reason: wants both, in: [ipv4]}
`

func TestLeftOutByClusterAndName(t *testing.T) {
	all, err := readLeftOut([]byte(someLeftOut))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ family, test, want string }{
		{"ipv4", "[sig-network] pods: sctp", "no SCTP"},
		{"dual", "[sig-network] SCTP hostPort", "no SCTP"},
		{"ipv4", "[sig-network] [Feature:IPv6DualStack] pods", "wants both"},
		{"dual", "[sig-network] [Feature:IPv6DualStack] pods", ""},
		{"ipv4", "[sig-network] Services", ""},
	} {
		if got := all.reason(c.family, c.test); got != c.want {
			t.Errorf("%s in %s: left out because of %q, want %q", c.test, c.family, got, c.want)
		}
	}
	if got, want := all.expression("ipv4"), "(?:SCTP|sctp)|(?:DualStack)"; got != want {
		t.Errorf("ginkgo skips %q in ipv4, want %q", got, want)
	}
	if got, want := all.expression("dual"), "(?:SCTP|sctp)"; got != want {
		t.Errorf("ginkgo skips %q in dual, want %q", got, want)
	}
}

func TestStaleEntryIsNamed(t *testing.T) {
	all, err := readLeftOut([]byte(someLeftOut))
	if err != nil {
		t.Fatal(err)
	}
	if err := all.check([]string{"a SCTP test", "a DualStack test"}); err != nil {
		t.Errorf("every entry matches, and yet: %v", err)
	}
	err = all.check([]string{"a SCTP test"})
	if err == nil || !strings.Contains(err.Error(), "DualStack") || strings.Contains(err.Error(), "SCTP") {
		t.Errorf("the entry that matches nothing: got %v, want one error, about DualStack", err)
	}
}

func TestBadEntriesAreRefused(t *testing.T) {
	for name, text := range map[string]string{
		"no reason":       `[{match: a}]`,
		"no match":        `[{reason: b}]`,
		"unknown field":   `[{match: a, reason: b, why: c}]`,
		"unknown cluster": `[{match: a, reason: b, in: [ipv5]}]`,
		"no expression":   `[{match: 'a(', reason: b}]`,
	} {
		if _, err := readLeftOut([]byte(text)); err == nil {
			t.Errorf("%s: read without an error", name)
		}
	}
}

// Only with the tests themselves can be said that each entry matches one: prepare does.
func TestOwnFileIsRead(t *testing.T) {
	all, err := readLeftOut(leftOutYAML)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) == 0 {
		t.Error("left-out.yaml is empty")
	}
	for _, runs := range []string{
		"[sig-network] Services should be able to create a functioning NodePort service [Conformance]",
		"[sig-network] Services should serve endpoints on same port and different protocol for internal traffic on Type LoadBalancer",
		"[sig-network] DNS should provide DNS for services [Conformance]",
		"[sig-network] KubeProxy should update metric for tracking accepted packets destined for localhost nodeports",
	} {
		if reason := all.reason("ipv4", runs); reason != "" {
			t.Errorf("%s: left out: %s", runs, reason)
		}
	}
}

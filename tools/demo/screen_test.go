package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

func parties() (a, b, host, outside party) {
	return party{Namespace: new(lab.Namespace), name: "n1/a", node: "k8s-n1", pod: true},
		party{Namespace: new(lab.Namespace), name: "n2/a", node: "k8s-n2", pod: true},
		party{Namespace: new(lab.Namespace), name: "n1", node: "k8s-n1"},
		party{Namespace: new(lab.Namespace), name: "outside"}
}

func TestMatrix(t *testing.T) {
	a, b, host, outside := parties()
	lost := meeting{from: a, to: outside}
	lost.problems[2] = errors.New("UDP did not arrive")
	all := []meeting{
		{from: a, to: b, rtt: time.Millisecond}, {from: a, to: host, rtt: time.Millisecond}, lost,
		{from: host, to: a, rtt: 2 * time.Millisecond}, {from: host, to: b, rtt: 3 * time.Millisecond},
	}
	var out bytes.Buffer
	s := &screen{out: &out}
	s.drawMatrix([]party{a, host}, []party{a, b, host, outside}, all)
	want := strings.TrimPrefix(`
             n1/a    n2/a    n1      outside
    n1/a      ·      ✓✓✓     ✓✓✓     ✓✓✗
    n1       ✓✓✓     ✓✓✓      ·       ·
    UDP did not arrive
`, "\n")
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}
	if s.failed != 1 {
		t.Errorf("%d failures counted, want 1", s.failed)
	}

	out.Reset()
	s.drawKinds(all)
	want = strings.TrimPrefix(`
    host to pod, across nodes   1 pairs   ✓ ping 1/1    ✓ TCP 1/1     ✓ UDP 1/1     median ping 3.00 ms
    host to pod, same node      1 pairs   ✓ ping 1/1    ✓ TCP 1/1     ✓ UDP 1/1     median ping 2.00 ms
    pod to host, same node      1 pairs   ✓ ping 1/1    ✓ TCP 1/1     ✓ UDP 1/1     median ping 1.00 ms
    pod to outside              1 pairs   ✓ ping 1/1    ✓ TCP 1/1     ✗ UDP 0/1     median ping 0.00 ms
    pod to pod, across nodes    1 pairs   ✓ ping 1/1    ✓ TCP 1/1     ✓ UDP 1/1     median ping 1.00 ms
`, "\n")
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}
}

func TestColourChangesNoWords(t *testing.T) {
	draw := func(colour bool) string {
		var out bytes.Buffer
		s := &screen{out: &out, colour: colour}
		s.heading("A heading")
		s.check(true, "held")
		s.check(false, "did not hold")
		s.quote("one\ntwo\nthree\nfour\n", 2)
		if err := s.step("fails", func() error { return os.ErrInvalid }); !errors.Is(err, os.ErrInvalid) || s.failed != 2 {
			t.Errorf("step returned %v, %d failures counted", err, s.failed)
		}
		return out.String()
	}
	plain, coloured := draw(false), draw(true)
	if strings.Contains(plain, "\x1b") || !strings.Contains(coloured, "\x1b[32m✓") {
		t.Errorf("plain output %q, coloured output %q", plain, coloured)
	}
	for _, code := range []string{bold, dim, red, green, cyan, "0"} {
		coloured = strings.ReplaceAll(coloured, "\x1b["+code+"m", "")
	}
	if diff := cmp.Diff(plain, coloured); diff != "" {
		t.Error(diff)
	}
	if !strings.Contains(plain, "… and 2 more") {
		t.Errorf("long output is not shortened: %q", plain)
	}
}

func TestWrongArgumentsAreUsage(t *testing.T) {
	for args, want := range map[string]string{"-nonsense": "-nonsense", "3f2a": `"3f2a"; only -clean takes some`} {
		var out, problems bytes.Buffer
		e := env{args: []string{args}, getenv: func(string) string { return "" }, stdout: &out, stderr: &problems}
		if status := run(context.Background(), e); status != 2 || !strings.Contains(problems.String(), want) {
			t.Errorf("%s: status %d, stderr %q", args, status, problems.String())
		}
	}
}

func TestSettingsAreChecked(t *testing.T) {
	for _, c := range []struct{ family, mode, links, says string }{
		{"", "ipip", "", "auto, direct, vxlan or docker"}, {"dual", "docker", "", "FAMILY=ipv4 and LINKS=1"}, {"", "docker", "2", "FAMILY=ipv4 and LINKS=1"}, {"", "", "3", "1 or 2"}, {"", "direct", "2", "auto or vxlan only"}, {"ipv5", "", "", "ipv4, ipv6 or dual"},
	} {
		var out, problems bytes.Buffer
		set := map[string]string{"FAMILY": c.family, "MODE": c.mode, "LINKS": c.links}
		e := env{getenv: func(name string) string { return set[name] }, stdout: &out, stderr: &problems}
		if status := run(t.Context(), e); status != 2 || out.Len() > 0 || !strings.Contains(problems.String(), c.says) {
			t.Errorf("%+v: status %d, stdout %q, stderr %q", c, status, out.String(), problems.String())
		}
	}
}

func TestCleanOfAClusterThatIsNotThere(t *testing.T) {
	priv.Require(t)
	var out, problems bytes.Buffer
	e := env{args: []string{"-clean", "zzzz", "../x"}, getenv: func(string) string { return "" }, stdout: &out, stderr: &problems}
	if status := run(context.Background(), e); status != 1 || out.Len() > 0 || strings.Count(problems.String(), "four hexadecimal digits") != 2 {
		t.Errorf("status %d, stdout %q, stderr %q", status, out.String(), problems.String())
	}
}

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// endless are the hints that run until they are interrupted.
var endless = []string{"what leaves the node meanwhile", "drops as they come"}

// TestHintsAreTrue keeps a cluster, of both families and with nodes on two links, and runs each command that the demo prints, in the order printed.
func TestHintsAreTrue(t *testing.T) {
	priv.Require(t)
	t.Chdir("../..") // where the commands are for
	var out bytes.Buffer
	d := newDemo(env{stdout: &out}, setting{family: "dual", mode: "auto", links: "2"}, true)
	kept := false
	t.Cleanup(func() { d.discard(t, kept) })
	if err := d.build(t.Context()); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	if err := errors.Join(d.each(d.matrix)(t.Context()), d.between(t.Context())); err != nil || d.failed > 0 {
		t.Fatalf("%d checks failed, error %v\n%s", d.failed, err, out.String())
	}
	hints, err := d.hints()
	if err != nil {
		t.Fatal(err)
	}
	d.leave(t.Context())
	kept = true

	// What each must show, as a regular expression, and no error. On the machine the pods' interfaces have other names.
	shows := map[string]string{
		"everything that is there":            "ec" + d.lab.ID + "-n1",
		"on a node over IPv4":                 `10\.244\.1\.`,
		"on a node over IPv6":                 `fd00:10:244:1::/64`,
		"from pod to pod over IPv4":           " 0% packet loss",
		"from pod to pod over IPv6":           " 0% packet loss",
		"from a pod to the outside over IPv4": " 0% packet loss",
		"from a pod to the outside over IPv6": " 0% packet loss",
		"what leaves the node meanwhile":      "listening on " + lab.Uplink,
		"status":                              `(?s)attached +[0-9]+ (tcx|clsact)\n.*No problems\.`,
		"the maps":                            "== devices ==",
		"drops as they come":                  "REASON",
		"kill the agent of that node":         "msg=ready",
		"end it":                              "ended cluster " + d.lab.ID,
	}
	for _, h := range hints {
		if !strings.Contains(out.String(), h.what) || !strings.Contains(out.String(), h.command) {
			t.Errorf("%q is not printed:\n%s", h.command, out.String())
		}
		shown, ok := shows[h.what]
		if !ok {
			continue
		}
		want := regexp.MustCompile(shown)
		delete(shows, h.what)
		if strings.Contains(h.command, "tcpdump") && !installed("tcpdump") {
			continue
		}
		var until *regexp.Regexp
		if slices.Contains(endless, h.what) {
			until = want
		}
		said, err := shell(t, h.command, until)
		if err != nil || !want.MatchString(said) {
			t.Errorf("%s: %v, want %q in\n%s", h.command, err, want, said)
		}
	}
	if len(shows) > 0 {
		t.Errorf("there is no hint for %v", shows)
	}
}

// discard ends the cluster, or looks whether the command that ends it has.
func (d *demo) discard(t *testing.T, kept bool) {
	switch {
	case d.lab == nil:
	case !kept:
		if err := d.lab.Close(); err != nil {
			t.Error(err)
		}
	default:
		if left, err := lab.Remains(d.lab.ID); err != nil || len(left) > 0 {
			t.Errorf("after the command that ends it there is %q; error %v", left, errors.Join(err, lab.End(d.lab.ID)))
		}
	}
}

func installed(program string) bool {
	_, err := exec.LookPath(program)
	return err == nil
}

// shell runs a command line to its end; one that has none, until it has shown what is wanted and has gone on for a while.
func shell(t *testing.T, line string, until *regexp.Regexp) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", line)
	said := &transcript{until: until, seen: func() { time.AfterFunc(time.Second, cancel) }}
	cmd.Stdout, cmd.Stderr = said, said
	err := cmd.Run()
	switch {
	case until == nil:
		return said.text.String(), err
	case ctx.Err() == nil:
		return said.text.String(), fmt.Errorf("it ended by itself (%v)", err)
	}
	return said.text.String(), nil
}

// transcript keeps what a command says, and says when that is enough.
type transcript struct {
	text  bytes.Buffer
	until *regexp.Regexp // nil: it never is
	seen  func()
}

func (s *transcript) Write(p []byte) (int, error) {
	n, err := s.text.Write(p)
	if s.until != nil && s.until.Match(s.text.Bytes()) {
		s.until = nil
		s.seen()
	}
	return n, err
}

func TestQuoted(t *testing.T) {
	for word, want := range map[string]string{"/a/b-c": "/a/b-c", "/a b": "'/a b'", "it's": `'it'\''s'`, "": "''"} {
		if got := quoted(word); got != want {
			t.Errorf("%q becomes %s, want %s", word, got, want)
		}
	}
}

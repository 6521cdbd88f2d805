package main

import (
	"bytes"
	"context"
	"errors"
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

// TestHintsAreTrue keeps a cluster and runs each command that the demo prints, in the order printed.
func TestHintsAreTrue(t *testing.T) {
	priv.Require(t)
	t.Chdir("../..") // where make demo runs, and so where the commands are for
	var out bytes.Buffer
	d := newDemo(env{stdout: &out}, true)
	kept := false
	t.Cleanup(func() { d.discard(t, kept) })
	if err := d.build(t.Context()); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	hints, err := d.hints()
	if err != nil {
		t.Fatal(err)
	}
	d.leave(t.Context())
	kept = true

	// What each must show, as a regular expression, and no error. On the machine the pods' interfaces have other names.
	shows := map[string]string{
		"everything that is there":       "ec" + d.lab.ID + "-n1",
		"on a node":                      `10\.244\.1\.`,
		"from pod to pod":                " 0% packet loss",
		"from a pod to the outside":      " 0% packet loss",
		"what leaves the node meanwhile": "listening on " + lab.Uplink,
		"status":                         `(?s)from_pod +ec[0-9a-f]{11} .*No problems\.`,
		"the maps":                       "== devices ==",
		"drops as they come":             "REASON",
		"kill the agent of that node":    "msg=ready",
		"end it":                         "ended cluster " + d.lab.ID,
	}
	for _, h := range hints {
		if !strings.Contains(out.String(), h.what) || !strings.Contains(out.String(), h.command) {
			t.Errorf("%q is not printed:\n%s", h.command, out.String())
		}
		want, ok := shows[h.what]
		if !ok {
			continue
		}
		delete(shows, h.what)
		if strings.Contains(h.command, "tcpdump") && !installed("tcpdump") {
			continue
		}
		said, err := shell(t, h.command, slices.Contains(endless, h.what))
		if err != nil || !regexp.MustCompile(want).MatchString(said) {
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

// shell runs a command line to its end, or a short while if it has none.
func shell(t *testing.T, line string, endless bool) (string, error) {
	t.Helper()
	limit := time.Minute
	if endless {
		limit = 2 * time.Second
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	out, err := exec.CommandContext(ctx, "bash", "-c", line).CombinedOutput()
	if endless && ctx.Err() != nil {
		err = nil
	}
	return string(out), err
}

func TestQuoted(t *testing.T) {
	for word, want := range map[string]string{"/a/b-c": "/a/b-c", "/a b": "'/a b'", "it's": `'it'\''s'`, "": "''"} {
		if got := quoted(word); got != want {
			t.Errorf("%q becomes %s, want %s", word, got, want)
		}
	}
}

package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// Who holds a lock, and for how long by now, is no other complaint.
func TestLockThatIsNotToBeHadIsToldOnce(t *testing.T) {
	log := &bytes.Buffer{}
	mode := newMode(&node{complaints: newComplaints(slog.New(slog.NewTextHandler(log, nil)))})
	dir := t.TempDir()
	holder, err := bpffs.Shared(t.Context(), dir, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Release()
	texts := map[string]bool{}
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		_, err := bpffs.Exclusive(ctx, dir, "test")
		cancel()
		if !errors.Is(err, bpffs.ErrLocked) {
			t.Fatal(err)
		}
		texts[err.Error()] = true
		mode.changed(t.Context(), outcome{true, explainMode(fmt.Errorf("replace the programs: %w", err), true)}, time.Now())
	}
	if n := strings.Count(log.String(), "about=\"netfilter's translation\""); n != 1 || len(texts) == 1 {
		t.Errorf("%d texts are told %d times, want several once", len(texts), n)
	}
	mode.changed(t.Context(), outcome{true, errors.New("another reason")}, time.Now())
	if n := strings.Count(log.String(), "about=\"netfilter's translation\""); n != 2 {
		t.Errorf("told %d times after another reason, want twice", n)
	}
}

func TestTooManyUplinksAreToldOnce(t *testing.T) {
	l := testLoop(t)
	log := logged(l)
	for more := range 4 {
		v := &view{}
		for i := range uplinks.Bits + 1 + more%3 {
			v.uplinks = append(v.uplinks, plan.Link{Index: uint32(1000 + i)})
		}
		if err := l.uplinks.complete(v); err != nil {
			t.Fatal(err)
		}
	}
	if n := strings.Count(log.String(), "more than 64 uplinks"); n != 1 {
		t.Errorf("told %d times, want once", n)
	}
}

func TestBrokenStateIsToldOnce(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	log := logged(l)
	if err := os.MkdirAll(endpoint.Dir(l.cfg.State), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(endpoint.Dir(l.cfg.State), "c1:eth0.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		l.pass(t.Context())
	}
	if n := strings.Count(log.String(), "some endpoints' state"); n != 1 {
		t.Errorf("told %d times", n)
	}
}

func TestComplaintsOfOneKind(t *testing.T) {
	log := &bytes.Buffer{}
	c := newComplaints(slog.New(slog.NewTextHandler(log, nil)))
	for _, step := range []struct {
		errs   map[string]error
		logged int // of all so far
	}{
		{map[string]error{"a": errors.New("bad"), "b": errors.New("bad")}, 2},
		{map[string]error{"a": errors.New("bad"), "b": errors.New("worse")}, 3},
		{map[string]error{"b": errors.New("worse")}, 3},
		{map[string]error{"a": errors.New("bad"), "b": errors.New("worse")}, 4}, // it was over, and is back
		{nil, 4},
	} {
		c.noteEach("route ", step.errs)
		if got := strings.Count(log.String(), "about=\"route "); got != step.logged || len(c.texts) != len(step.errs) {
			t.Errorf("%v: %d lines, want %d; kept %v", step.errs, got, step.logged, c.texts)
		}
	}
	c.note("routes", errors.New("bad"))
	if c.noteEach("route ", nil); len(c.texts) != 1 {
		t.Error("what is about something else is forgotten")
	}
}

// What is complained of goes with its pod.
func TestForget(t *testing.T) {
	c := newComplaints(slog.New(slog.DiscardHandler))
	for _, about := range []string{"endpoint a", "endpoint b", "pass: files"} {
		c.note(about, errors.New("no"))
	}
	c.forget("endpoint ", func(name string) bool { return name == "a" })
	if len(c.texts) != 2 || c.texts["endpoint a"] != "" {
		t.Errorf("%v is left", c.texts)
	}
}

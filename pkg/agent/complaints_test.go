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
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
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
		mode.changed(t.Context(), outcome{programMode{level: netfilter.Translates}, explainMode(fmt.Errorf("replace the programs: %w", err), netfilter.Translates)}, time.Now())
	}
	if n := strings.Count(log.String(), "about=\"mode/netfilter's translation\""); n != 1 || len(texts) == 1 {
		t.Errorf("%d texts are told %d times, want several once", len(texts), n)
	}
	mode.changed(t.Context(), outcome{programMode{level: netfilter.Translates}, errors.New("another reason")}, time.Now())
	if n := strings.Count(log.String(), "about=\"mode/netfilter's translation\""); n != 2 {
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
	if n := strings.Count(log.String(), "endpoints/state files"); n != 1 {
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
		{map[string]error{"b": errors.New("worse")}, 4},                         // one is over
		{map[string]error{"a": errors.New("bad"), "b": errors.New("worse")}, 5}, // and is back
		{nil, 7},
	} {
		c.noteEach("cluster/route ", step.errs)
		if got := strings.Count(log.String(), "about=\"cluster/route "); got != step.logged || len(c.current) != len(step.errs) {
			t.Errorf("%v: %d lines, want %d; kept %v", step.errs, got, step.logged, c.current)
		}
	}
	c.note("cluster/routes", errors.New("bad"))
	if c.noteEach("cluster/route ", nil); len(c.current) != 1 {
		t.Error("what is about something else is forgotten")
	}
}

// What is complained of goes with its pod.
func TestForget(t *testing.T) {
	c := newComplaints(slog.New(slog.DiscardHandler))
	for _, about := range []string{"endpoints/pod a", "endpoints/pod b", "files/pass"} {
		c.note(about, errors.New("no"))
	}
	c.forget("endpoints/pod ", func(name string) bool { return name == "a" })
	if _, left := c.current["endpoints/pod a"]; len(c.current) != 2 || left {
		t.Errorf("%v is left", c.current)
	}
}

// What was complained of is over with one line, which says how often it was found and how long it lasted.
func TestEndIsTold(t *testing.T) {
	log := &bytes.Buffer{}
	c := newComplaints(slog.New(slog.NewTextHandler(log, nil)))
	now := time.Unix(1000, 0)
	c.now = func() time.Time { return now }
	for range 7 {
		c.note("files/pass", errors.New("disk full"))
		now = now.Add(time.Second)
	}
	if !c.hasChanged() || c.hasChanged() {
		t.Error("that there is another complaint is not told once")
	}
	c.note("files/pass", nil)
	c.note("files/pass", nil)
	if got := log.String(); strings.Count(got, "\n") != 2 || !strings.Contains(got, `msg="no longer the case" about=files/pass lasted=7s times=7`) {
		t.Errorf("logged:\n%s", got)
	}
	if !c.hasChanged() {
		t.Error("that there is one complaint less is not told")
	}
}

// Five thousand of one kind have one cause.
func TestManyComplaintsAtOnce(t *testing.T) {
	log := &bytes.Buffer{}
	c := newComplaints(slog.New(slog.NewTextHandler(log, nil)))
	errs := map[string]error{}
	for i := range 5000 {
		errs[fmt.Sprintf("%04d", i)] = errors.New("taken")
	}
	for range 3 {
		c.noteEach("cluster/route ", errs)
	}
	c.noteEach("cluster/route ", nil)
	want := map[string]int{"problem, trying again": mostLines, "no longer the case": mostLines, "more=4995": 2, "\n": 2*mostLines + 2}
	for text, n := range want {
		if got := strings.Count(strings.ReplaceAll(log.String(), "are no longer the case", "are over"), text); got != n {
			t.Errorf("%q is logged %d times, want %d", text, got, n)
		}
	}
}

// A complaint degrades its controller by what of it is no obstacle.
func TestComplaintsDegrade(t *testing.T) {
	c := newComplaints(slog.New(slog.DiscardHandler))
	c.note("cluster/pass", errors.Join(errors.New("a map is full"), hinder(errors.New("no config"))))
	c.note("sysctls/pass", hinder(errors.New("read-only")))
	c.note("endpoints/pod x", errors.New("no link"))
	got := c.degraded()
	if len(got) != 2 || got["cluster/pass"] != "a map is full" || got["endpoints/pod x"] != "no link" {
		t.Errorf("degraded: %v", got)
	}
	are := controllersOf(got)
	if !are["cluster"] || !are["endpoints"] || are["sysctls"] {
		t.Errorf("controllers: %v", are)
	}
}

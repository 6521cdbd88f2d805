package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// readTold is what ebpfctl finds.
func (l *loop) readTold(t *testing.T) (c observe.Cluster) {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(l.cfg.State, observe.ClusterFile))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(content, &c); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestToldIsForPeopleOnly(t *testing.T) {
	l := testLoop(t)
	inTheWay := filepath.Join(l.cfg.State, observe.ClusterFile+".next")
	if err := os.Mkdir(inTheWay, 0o700); err != nil {
		t.Fatal(err)
	}
	ready(t, l)
	if err := os.Remove(inTheWay); err != nil {
		t.Fatal(err)
	}
	l.pass(t.Context())
	if c := l.readTold(t); len(c.Nodes) != 1 || c.Nodes[0].Name != "n2" {
		t.Errorf("told %+v once it could be", c)
	}
}

func TestToldWhyNotReady(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	told, err := publishStarting(l.cfg.State)
	if err != nil {
		t.Fatal(err)
	}
	if c := l.readTold(t); c.NotReady != starting || len(c.Nodes) != 1 {
		t.Errorf("at the start of the next agent: %+v", c)
	}
	l.published, l.known, l.nodes, l.view = told, false, nil, nil
	l.accept(source.Update{Err: os.ErrDeadlineExceeded})
	l.judge()
	if c := l.readTold(t); !strings.Contains(c.NotReady, os.ErrDeadlineExceeded.Error()) || len(c.Nodes) != 1 {
		t.Errorf("without a list of Nodes: %+v", c)
	}
	l.accept(list(n2()))
	l.standing = plan.Standing{}
	l.pass(t.Context())
	if c := l.readTold(t); c.NotReady != l.status.reason() || !strings.Contains(c.NotReady, "no Node n1") {
		t.Errorf("without a Node of its own: %+v", c)
	}
}

func TestToldIsMadeAnew(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, observe.ClusterFile)
	for _, content := range []string{"", "{", `{"nodes": 5}`, "[]"} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if c, err := publishStarting(dir); err != nil || c.NotReady != starting || c.Nodes != nil {
			t.Errorf("over %q: %+v, %v", content, c, err)
		}
	}
}

// TestToldIsWrittenAgain: what somebody has done to the file is undone as soon as to other files, although nothing new is to be told.
func TestToldIsWrittenAgain(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	log := &bytes.Buffer{} // read once the loop has ended
	l.log = slog.New(slog.NewTextHandler(log, nil))
	path := filepath.Join(l.cfg.State, observe.ClusterFile)
	want, err := os.ReadFile(path)
	must(t, err)
	spoils := map[string]func() error{
		"removed":   func() error { return os.Remove(path) },
		"truncated": func() error { return os.Truncate(path, 0) },
		"corrupt":   func() error { return os.WriteFile(path, bytes.Repeat([]byte("x"), len(want)), 0o600) },
		"replaced":  func() error { return replaceFile(path, []byte("{}")) },
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer cancel()
		for how, spoil := range spoils {
			if err := spoil(); err != nil {
				t.Errorf("%s: %v", how, err)
			}
			const promise = 3 * time.Second // four inspections; a pass over the whole node is later
			for end := time.Now().Add(priv.Patience(promise)); ; time.Sleep(20 * time.Millisecond) {
				if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, want) {
					break
				} else if time.Now().After(end) {
					t.Errorf("%s: %q, error %v", how, have, err)
					return
				}
			}
		}
		time.Sleep(3 * inspectInterval)
	}()
	if err := l.run(ctx, newLatest()); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if n := strings.Count(log.String(), "the file for ebpfctl was changed or removed"); n != len(spoils) {
		t.Errorf("told %d times, want %d:\n%s", n, len(spoils), log)
	}
}

// TestToldThatTheLoopGoesRound: each pass leaves a sign of life, also where there is nothing new to say and no room to say it.
func TestToldThatTheLoopGoesRound(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	path := filepath.Join(l.cfg.State, observe.ClusterFile)
	for _, full := range []bool{false, true} {
		old := time.Now().Add(-time.Hour)
		if err := os.Chtimes(path, old, old); err != nil {
			t.Fatal(err)
		}
		if full {
			if err := os.Mkdir(path+".next", 0o700); err != nil {
				t.Fatal(err)
			}
			l.accept(list())
		}
		l.pass(t.Context())
		if info, err := os.Stat(path); err != nil || time.Since(info.ModTime()) > observe.MaxSilence {
			t.Errorf("after a pass, with a full disk %v: %v, %v", full, info, err)
		}
	}
}

// However much is wrong, that Nodes can't be read is said.
func TestLossOfTheSourceIsToldFirst(t *testing.T) {
	degraded := map[string]string{observe.AboutNodes: "connection refused"}
	for i := range 2 * mostDegraded {
		degraded[fmt.Sprintf("cluster/route 10.244.%d.0/24", i)] = "somebody else's"
	}
	if list := listed(degraded); len(list) != mostDegraded || list[0].About != observe.AboutNodes || list[1].About != "cluster/route 10.244.0.0/24" {
		t.Errorf("%d are listed: %v", len(list), list)
	}
}

// A loss of the source keeps no pod from being carried. It is told at its beginning and at its end, to all who ask.
func TestLossOfTheSourceIsTold(t *testing.T) {
	l := testLoop(t)
	expect := func(when string, connected bool, lost time.Time) {
		t.Helper()
		l.judge()
		f, c := l.status.read(), l.readTold(t)
		if f.connected != connected || !c.Lost.Equal(lost) || f.degraded["source"] == f.connected && l.known {
			t.Errorf("%s: connected %v, degraded %v, lost %v", when, f.connected, f.degraded["source"], c.Lost)
		}
	}
	expect("before the first list", false, time.Time{})
	ready(t, l)
	if last := l.status.read().lastSync; time.Since(last) > time.Minute {
		t.Errorf("the last sync was at %v", last)
	}
	expect("after it", true, time.Time{})
	log, began := logged(l), time.Now().Add(-time.Hour)
	for i, why := range []string{"connection refused", "i/o timeout"} {
		l.accept(source.Update{Err: errors.New(why), Changed: began.Add(time.Duration(i) * time.Minute)})
		expect(why, false, began)
		if why := l.status.reason(); why != "" {
			t.Errorf("not ready: %s", why)
		}
	}
	l.accept(source.Update{Nodes: []plan.Node{n1(), n2()}, Changed: began.Add(90 * time.Second)})
	expect("when it is back", true, time.Time{})
	for text, n := range map[string]int{"level=WARN": 2, `"Nodes can't be read; what was known stays"`: 2, `"Nodes can be read again" nodes=2 after=1m30s`: 1} {
		if got := strings.Count(log.String(), text); got != n {
			t.Errorf("%s is logged %d times, want %d:\n%s", text, got, n, log)
		}
	}
}

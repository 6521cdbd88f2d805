package agent

import (
	"bytes"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/install"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"golang.org/x/sys/unix"
)

// TestPortmapIsChained where that is asked for, and there it must be.
func TestPortmapIsChained(t *testing.T) {
	l := testLoop(t)
	path := filepath.Join(l.cfg.Bin, install.Portmap)
	expect := func(when string, on, there, chained bool, refusal string) {
		t.Helper()
		_ = os.Remove(path)
		if there {
			if err := os.WriteFile(path, []byte("#!/bin/sh"), 0o700); err != nil { //nolint:gosec // a program
				t.Fatal(err)
			}
		}
		l.cfg.Portmap = on
		l.accept(list(n1(), n2()))
		l.pass(t.Context())
		if why := l.status.reason(); (why == "") != (refusal == "") || !strings.Contains(why, refusal) {
			t.Errorf("%s: not ready because of %q, want %q", when, why, refusal)
		}
		l.assertChained(t, when, chained)
	}
	expect("off, absent", false, false, false, "")
	expect("off, there", false, true, false, "")
	expect("on, there", true, true, true, "")
	expect("on, gone", true, false, true, "there is no "+path)
	expect("off, gone", false, false, false, "")
}

// assertChained compares the list with whether portmap is to be in it; our plugin then serves no host ports.
func (l *loop) assertChained(t *testing.T, when string, want bool) {
	t.Helper()
	content, err := os.ReadFile(l.files.listPath())
	if err != nil {
		t.Fatal(err)
	}
	chained, own := bytes.Contains(content, []byte(`"type": "portmap"`)), bytes.Contains(content, []byte(`"portMappings": true
      },
      "ipam"`))
	if chained != want || own == want {
		t.Errorf("%s: want it chained: %v, the list is\n%s", when, want, content)
	}
}

// Between two passes, another portmap may speak other versions.
func TestAnotherPortmapIsNoticed(t *testing.T) {
	l := testLoop(t)
	l.cfg.Portmap = true
	path := filepath.Join(l.cfg.Bin, install.Portmap)
	must(t, os.WriteFile(path, []byte("#!/bin/sh"), 0o700)) //nolint:gosec // a program
	ready(t, l)
	seen := l.files.portmap.stamp
	must(t, os.WriteFile(path, []byte("#!/bin/sh -e"), 0o700)) //nolint:gosec // a program
	l.inspect(t.Context())
	l.assertChained(t, "another", true)
	if now := l.files.portmap.stamp; now == seen || now != stampOf(path) {
		t.Errorf("the other one was not looked at: %+v", now)
	}
}

// What others do to our files is put right, or seen to in a pass. Before the node is ready there is no list.
func TestFilesAreLookedAfter(t *testing.T) {
	dir := t.TempDir()
	log := slog.New(slog.DiscardHandler)
	c := &fileController{node: &node{cfg: Config{Directories: Directories{
		Conf: filepath.Join(dir, "conf"), Bin: filepath.Join(dir, "bin"), Plugin: filepath.Join(dir, "image"),
	}}, log: log, status: newStatus(log)}}
	s := &state{view: &view{}, plan: plan.Result{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}}}
	for _, err := range []error{os.Mkdir(c.cfg.Conf, 0o700), os.Mkdir(c.cfg.Bin, 0o700), os.WriteFile(c.cfg.Plugin, []byte("one"), 0o700)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	inspect := func(when string, list bool, next time.Duration) {
		t.Helper()
		s.next = resync
		if err := c.inspect(s); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		if _, err := os.Stat(c.listPath()); (err == nil) != list || s.next != next {
			t.Errorf("%s: the list: %v; the next pass after %v, want %v", when, err, s.next, next)
		}
	}
	inspect("no plugin, not ready", false, 0)
	if err := c.installPlugin(s); err != nil {
		t.Fatal(err)
	}
	inspect("not ready", false, resync)
	c.status.setNotReady("")
	if err := c.writeList(s); err != nil {
		t.Fatal(err)
	}
	inspect("ready", true, resync)
	if err := os.Remove(c.listPath()); err != nil {
		t.Fatal(err)
	}
	inspect("the list was removed", true, resync)
	if err := os.WriteFile(c.cfg.Plugin, []byte("another"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := c.installPlugin(s); err != nil {
		t.Fatal(err)
	}
	if content, err := os.ReadFile(c.pluginPath()); string(content) != "another" {
		t.Errorf("after an update the plugin is %q, error %v", content, err)
	}
}

// Somebody has to mend what keeps the new plugin out; until then the old one must not pass for it.
func TestPluginThatCannotBeInstalled(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	l.cfg.Plugin = filepath.Join(t.TempDir(), "gone")
	for range 3 {
		l.pass(t.Context())
		if why := l.status.reason(); !strings.Contains(why, "files: ") {
			t.Fatalf("not ready because of %q, want the plugin", why)
		}
	}
}

// Where no pod can be added for want of room the node says so, until there is some.
func TestStateDirectoryIsFull(t *testing.T) {
	l := testLoop(t)
	must(t, os.MkdirAll(l.cfg.State, 0o700))
	ready(t, l)
	must(t, unix.Mount("tmpfs", l.cfg.State, "tmpfs", 0, "size=64k"))
	t.Cleanup(func() { _ = unix.Unmount(l.cfg.State, unix.MNT_DETACH) })
	l.pass(t.Context())
	if why := l.status.reason(); why != "" {
		t.Fatalf("with room: %s", why)
	}
	full := filepath.Join(l.cfg.State, "full")
	if err := os.WriteFile(full, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("the test means a full directory: %v", err)
	}
	l.pass(t.Context())
	if why := l.status.reason(); !strings.Contains(why, l.cfg.State+" is full") {
		t.Errorf("full: %q", why)
	}
	must(t, os.Remove(full))
	l.pass(t.Context())
	if why := l.status.reason(); why != "" {
		t.Errorf("with room again: %s", why)
	}
}

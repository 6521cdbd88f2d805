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

// TestPortmapComesAndGoes follows the plugin in the directory, as the modes say.
func TestPortmapComesAndGoes(t *testing.T) {
	l := testLoop(t)
	path := filepath.Join(l.cfg.Bin, install.Portmap)
	expect := func(when string, mode PortmapMode, there, chained bool, refusal string) {
		t.Helper()
		_ = os.Remove(path)
		if there {
			if err := os.WriteFile(path, []byte("#!/bin/sh"), 0o700); err != nil { //nolint:gosec // a program
				t.Fatal(err)
			}
		}
		l.cfg.Portmap = mode
		l.accept(list(n1(), n2()))
		l.pass(t.Context())
		if why := l.status.reason(); (why == "") != (refusal == "") || !strings.Contains(why, refusal) {
			t.Errorf("%s: not ready because of %q, want %q", when, why, refusal)
		}
		content, err := os.ReadFile(l.files.listPath())
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(content, []byte(`"portmap"`)) != chained {
			t.Errorf("%s: want it chained: %v, the list is\n%s", when, chained, content)
		}
	}
	expect("auto, absent", PortmapAuto, false, false, "")
	expect("auto, there", PortmapAuto, true, true, "")
	expect("off, there", PortmapOff, true, false, "")
	expect("on, there", PortmapOn, true, true, "")
	expect("on, absent", PortmapOn, false, true, "there is no "+path)
	expect("auto, gone", PortmapAuto, false, false, "")
}

// Between two passes, pods would not start with a plugin that is gone.
func TestPortmapIsNoticed(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	path := filepath.Join(l.cfg.Bin, install.Portmap)
	inspected := func(when string, chained bool) {
		t.Helper()
		l.inspect(t.Context())
		content, err := os.ReadFile(l.files.listPath())
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(content, []byte(`"portmap"`)) != chained {
			t.Errorf("%s: want it chained: %v, the list is\n%s", when, chained, content)
		}
	}
	if err := os.WriteFile(path, []byte("#!/bin/sh"), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	inspected("there", true)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	inspected("gone", false)
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

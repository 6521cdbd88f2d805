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
	seen := l.files.chained[install.Portmap].stamp
	must(t, os.WriteFile(path, []byte("#!/bin/sh -e"), 0o700)) //nolint:gosec // a program
	l.inspect(t.Context())
	l.assertChained(t, "another", true)
	if now := l.files.chained[install.Portmap].stamp; now == seen || now != stampOf(path) {
		t.Errorf("the other one was not looked at: %+v", now)
	}
}

// What others do to our files is put right, or seen to in a pass. Before the node is ready there is no list.
func TestFilesAreLookedAfter(t *testing.T) {
	dir := t.TempDir()
	log := slog.New(slog.DiscardHandler)
	c := &fileController{node: &node{cfg: Config{Directories: Directories{
		Conf: filepath.Join(dir, "conf"), Bin: filepath.Join(dir, "bin"), Plugin: filepath.Join(dir, "image"),
	}}, log: log, status: newStatus(log), complaints: newComplaints(log)}}
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
	if _, err := c.writeList(s); err != nil {
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

// TestOthersInTheList stay: a program that puts itself into the list again whenever it is not there has nothing to do, nor has the agent.
func TestOthersInTheList(t *testing.T) {
	dir := t.TempDir()
	log := slog.New(slog.DiscardHandler)
	c := &fileController{node: &node{
		cfg: Config{Directories: Directories{Conf: filepath.Join(dir, "conf"), Bin: filepath.Join(dir, "bin")}, Chain: []install.Entry{install.Entry(`{"type": "sbr"}`)}},
		log: log, status: newStatus(log), complaints: newComplaints(log),
	}}
	c.status.setNotReady("")
	s := &state{view: &view{}, plan: plan.Result{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}}}
	must(t, os.MkdirAll(c.cfg.Bin, 0o700))
	must(t, os.WriteFile(c.pluginPath(), nil, 0o700))                                  //nolint:gosec // a program
	must(t, os.WriteFile(filepath.Join(c.cfg.Bin, "sbr"), []byte("#!/bin/sh"), 0o700)) //nolint:gosec // a program
	must(t, c.publish(s))
	read := func() string {
		content, err := os.ReadFile(c.listPath())
		must(t, err)
		return string(content)
	}
	insert := func(entry string) { // in a form of its own, as by jq
		content := strings.TrimSuffix(strings.ReplaceAll(read(), "\n  ]\n}\n", ""), "\n") + ", " + entry + "]}"
		must(t, os.WriteFile(c.listPath(), []byte(content), 0o600))
	}
	insert(`{"type": "istio-cni"}`)
	inserted := read()
	for range 3 {
		must(t, c.inspect(s))
		must(t, c.publish(s))
	}
	if now := read(); now != inserted {
		t.Fatalf("the agent has written\n%s\ninstead of\n%s", now, inserted)
	}
	counted := &loop{node: c.node}
	if n := counted.repairs(t, repairedList); n != 0 {
		t.Errorf("%v repairs, although our part was as it should be", n)
	}
	if is := c.complaints.degraded()["files/chained plugins"]; !strings.Contains(is, ": istio-cni;") {
		t.Errorf("that istio-cni is not installed is no problem, but %q", is)
	}
	must(t, os.WriteFile(filepath.Join(c.cfg.Bin, "istio-cni"), []byte("#!/bin/sh"), 0o700)) //nolint:gosec // a program
	must(t, c.inspect(s))
	if is := c.complaints.degraded(); len(is) > 0 {
		t.Errorf("with it installed: %q", is)
	}
	c.cfg.MTU = 1300
	must(t, c.publish(s))
	if now := read(); !strings.Contains(now, `"mtu": 1300`) || !strings.Contains(now, `"istio-cni"`) || !strings.Contains(now, `"sbr"`) {
		t.Errorf("after our own change:\n%s", now)
	}
	must(t, os.WriteFile(c.listPath(), []byte(strings.Replace(read(), "1300", "9000", 1)), 0o600))
	must(t, c.inspect(s))
	if now := read(); !strings.Contains(now, `"mtu": 1300`) || !strings.Contains(now, `"istio-cni"`) || counted.repairs(t, repairedList) != 1 {
		t.Errorf("after another one's change of our part:\n%s", now)
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

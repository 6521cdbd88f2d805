package agent

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/pkg/install"
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

package install

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestPortmapIsChained(t *testing.T) {
	for speaks, want := range map[string]struct {
		usual string
		all   []string
	}{
		"1.1.0": {"1.0.0", []string{"0.4.0", "1.0.0", "1.1.0"}},
		"1.0.0": {"1.0.0", []string{"0.4.0", "1.0.0"}},
		"0.4.0": {"0.4.0", []string{"0.4.0"}},
	} {
		l := list()
		l.Portmap, l.Newest = true, speaks
		var got struct {
			CNIVersion  string
			CNIVersions []string
			Plugins     []map[string]any
		}
		if err := json.Unmarshal(l.Encode(), &got); err != nil {
			t.Fatal(err)
		}
		if got.CNIVersion != want.usual || !cmp.Equal(got.CNIVersions, want.all) {
			t.Errorf("beside one that speaks %s the list offers %v, usually %s", speaks, got.CNIVersions, got.CNIVersion)
		}
		if ours := got.Plugins[0]; ours["portmap"] != true || ours["capabilities"].(map[string]any)["portMappings"] != false {
			t.Errorf("beside portmap our plugin has %v", ours)
		}
		chained := map[string]any{"type": "portmap", "capabilities": map[string]any{"portMappings": true}}
		if len(got.Plugins) != 2 || got.Plugins[0]["type"] != "ebpf-cni" || !cmp.Equal(got.Plugins[1], chained) {
			t.Errorf("plugins %v", got.Plugins)
		}
	}
}

func TestSpokenBy(t *testing.T) {
	for library, want := range map[string]string{
		"v0.8.1": "0.4.0", "v1.0.1": "1.0.0", "v1.1.2": "1.0.0", "v1.2.0": "1.1.0", "v1.3.1-rc1": "1.1.0", "v2.0.0": "1.1.0", "(devel)": "1.0.0", "": "1.0.0",
	} {
		if got := supportedBy(library); got != want {
			t.Errorf("a plugin built with %q speaks %q, want %q", library, got, want)
		}
	}
}

func TestNewestVersion(t *testing.T) {
	dir := t.TempDir()
	if v, err := NewestVersion(dir, Portmap); v != "" || err != nil {
		t.Errorf("in an empty directory: %q, %v", v, err)
	}
	if _, err := NewestVersion(os.DevNull, Portmap); err == nil {
		t.Error("below a file: no error")
	}
	path := filepath.Join(dir, Portmap)
	if err := os.Symlink("/elsewhere/on/the/host", path); err != nil {
		t.Fatal(err)
	}
	if v, err := NewestVersion(dir, Portmap); err != nil || v != "1.0.0" {
		t.Errorf("a link that leads out of the container: %q, %v", v, err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("#!/bin/sh"), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	if v, err := NewestVersion(dir, Portmap); err != nil || v != "1.0.0" {
		t.Errorf("a script: %q, %v", v, err)
	}
}

func TestOlder(t *testing.T) {
	for _, tt := range []struct{ a, b, want string }{
		{"", "", ""}, {"", "1.0.0", "1.0.0"}, {"0.4.0", "", "0.4.0"}, {"1.1.0", "1.0.0", "1.0.0"}, {"0.4.0", "1.1.0", "0.4.0"},
	} {
		if got := Older(tt.a, tt.b); got != tt.want {
			t.Errorf("of %q and %q %q is the older, want %q", tt.a, tt.b, got, tt.want)
		}
	}
}

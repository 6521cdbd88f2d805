package cluster

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// Programs are compiled when they are not there or come from something else, and only then.
func TestBuild(t *testing.T) {
	module, err := moduleDir()
	if err != nil {
		t.Fatal(err)
	}
	dir, programs := t.TempDir(), map[string]string{"pause": "./pause", "greet": "./greet"}
	again := func() (made []string) {
		t.Helper()
		before := map[string]os.FileInfo{}
		for name := range programs {
			before[name], _ = os.Stat(filepath.Join(dir, name))
		}
		if err := build(t.Context(), module, dir, programs); err != nil {
			t.Fatal(err)
		}
		for name, was := range before {
			now, err := os.Stat(filepath.Join(dir, name))
			if err != nil {
				t.Fatal(err)
			}
			if was == nil || !os.SameFile(was, now) {
				made = append(made, name)
			}
		}
		slices.Sort(made)
		return made
	}
	if made := again(); !slices.Equal(made, []string{"greet", "pause"}) {
		t.Errorf("made at first: %q", made)
	}
	if made := again(); len(made) > 0 {
		t.Errorf("made though they are there: %q", made)
	}
	if err := os.WriteFile(stampOf(filepath.Join(dir, "pause")), []byte("something else"), 0o600); err != nil {
		t.Fatal(err)
	}
	if made := again(); !slices.Equal(made, []string{"pause"}) {
		t.Errorf("made when one comes from something else: %q", made)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) != 4 {
		t.Errorf("left are %q, error %v", left, err)
	}
}

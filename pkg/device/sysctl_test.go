package device

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

func TestSysctlOfANamespace(t *testing.T) {
	ns := newNS(t)
	must(t, ns.Do(func() error {
		if wrote, err := (Sysctl{}).Set("net/ipv4/conf/lo/rp_filter", "2"); err != nil || !wrote {
			t.Errorf("first Set: wrote %v, %v", wrote, err)
		}
		if wrote, err := (Sysctl{}).Set("net/ipv4/conf/lo/rp_filter", "2"); err != nil || wrote {
			t.Errorf("second Set: wrote %v, %v", wrote, err)
		}
		v, err := Sysctl{}.Get("net/ipv4/conf/lo/rp_filter")
		if v != "2" {
			t.Errorf("value %q, want 2", v)
		}
		return err
	}))
}

func TestSysctlDirectory(t *testing.T) {
	dir := t.TempDir()
	s := Sysctl{Dir: dir}
	if _, err := s.Set("net/x", "1"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a sysctl that does not exist: %v", err)
	}
	must(t, os.Mkdir(filepath.Join(dir, "net"), 0o755))
	must(t, os.WriteFile(filepath.Join(dir, "net/x"), []byte("0\n"), 0o644))
	if wrote, err := s.Set("net/x", "1"); err != nil || !wrote {
		t.Errorf("wrote %v, %v", wrote, err)
	}
	if v, err := s.Get("net/x"); err != nil || v[0] != '1' {
		t.Errorf("value %q, %v", v, err)
	}
}

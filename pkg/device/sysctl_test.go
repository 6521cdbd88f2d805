package device

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
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

// A long list is read to its end, and a sysctl that is kept open is read anew each time.
func TestSysctlOfAnyLength(t *testing.T) {
	inside(t)
	const ports = "net/ipv4/ip_local_reserved_ports"
	open, err := Sysctl{}.Open(ports)
	must(t, err)
	defer open.Close()
	for _, count := range []int{0, 400, 1, 10_000} {
		var list []string
		for i := range count {
			list = append(list, strconv.Itoa(20_001+2*i))
		}
		want := strings.Join(list, ",")
		_, err := Sysctl{}.Set(ports, want+"\n")
		must(t, err)
		for how, get := range map[string]func() (string, error){"kept open": open.Get, "by its name": func() (string, error) { return Sysctl{}.Get(ports) }} {
			if have, err := get(); have != want || err != nil {
				t.Errorf("%d ports, read %s: %d bytes, error %v; want %d bytes", count, how, len(have), err, len(want))
			}
		}
	}
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

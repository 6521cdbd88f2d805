package bpffs

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

func TestPaths(t *testing.T) {
	d := Dir("/sys/fs/bpf/x")
	for got, want := range map[string]string{
		d.Map("endpoints"):       "/sys/fs/bpf/x/maps/endpoints",
		d.Program("ec_from_pod"): "/sys/fs/bpf/x/progs/ec_from_pod",
		d.Link("from_pod", 42):   "/sys/fs/bpf/x/links/from_pod_42",
	} {
		if got != want {
			t.Errorf("%s, want %s", got, want)
		}
		// bpffs refuses such names.
		if strings.Contains(filepath.Base(got), ".") {
			t.Errorf("%s has a dot", got)
		}
	}
}

func TestParseLink(t *testing.T) {
	for name, want := range map[string]struct {
		hook    string
		ifindex int
		ok      bool
	}{
		"from_pod_42":   {"from_pod", 42, true},
		"to_uplink_3":   {"to_uplink", 3, true},
		"from_pod_0":    {ok: false},
		"from_pod_-1":   {ok: false},
		"from_pod_":     {ok: false},
		"from_pod_4x":   {ok: false},
		"frompod42":     {ok: false},
		"":              {ok: false},
		"from_pod_9999": {"from_pod", 9999, true},
	} {
		hook, ifindex, ok := ParseLink(name)
		if ok != want.ok || ok && (hook != want.hook || ifindex != want.ifindex) {
			t.Errorf("ParseLink(%q) = %q, %d, %v; want %+v", name, hook, ifindex, ok, want)
		}
	}
	for _, hook := range []string{"from_pod", "from_uplink", "to_uplink"} {
		name := filepath.Base(Dir("/x").Link(hook, 17))
		if got, ifindex, ok := ParseLink(name); got != hook || ifindex != 17 || !ok {
			t.Errorf("%s comes back as %q, %d, %v", name, got, ifindex, ok)
		}
	}
}

func TestPrepareRefusesAnotherFileSystem(t *testing.T) {
	base := t.TempDir()
	d := Dir(filepath.Join(base, "a", "b"))
	err := d.Prepare()
	if !errors.Is(err, ErrNotBPFFS) || !strings.Contains(err.Error(), base) || !strings.Contains(err.Error(), "mount -t bpf") {
		t.Errorf("error must name the directory and the remedy: %v", err)
	}
	if _, err := os.Stat(filepath.Join(base, "a")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a directory was made all the same: %v", err)
	}
}

func TestPrepare(t *testing.T) {
	d := Dir(priv.Isolate(t) + "/deep/ebpf-cni")
	old := unix.Umask(0)
	defer unix.Umask(old)
	for range 2 { // again, over what is there
		if err := d.Prepare(); err != nil {
			t.Fatal(err)
		}
		for _, dir := range []string{string(d), d.Maps(), d.Programs(), d.Links()} {
			info, err := os.Stat(dir)
			if err != nil || !info.IsDir() || info.Mode().Perm() != 0o700 {
				t.Errorf("%s: %v, %v; want a directory with mode 0700", dir, info, err)
			}
		}
		if err := os.Chmod(d.Maps(), 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// Where everybody may make directories, nobody else's is taken for ours.
func TestPrepareRefusesForeignDirectories(t *testing.T) {
	base := priv.Isolate(t)
	d := Dir(base + "/ebpf-cni")
	for _, foreign := range []string{string(d), d.Maps(), d.Programs(), d.Links()} {
		for name, plant := range map[string]func() error{
			"another user's": func() error { return os.Chown(foreign, 1000, 1000) },
			"a symbolic link": func() error {
				if err := os.RemoveAll(foreign); err != nil {
					return err
				}
				return os.Symlink(base, foreign)
			},
		} {
			if err := d.Prepare(); err != nil {
				t.Fatal(err)
			}
			if err := plant(); err != nil {
				t.Fatal(err)
			}
			if err := d.Prepare(); !errors.Is(err, ErrForeign) || !strings.Contains(err.Error(), foreign) {
				t.Errorf("%s is %s: %v", foreign, name, err)
			}
			if err := os.RemoveAll(foreign); err != nil {
				t.Fatal(err)
			}
		}
	}
}

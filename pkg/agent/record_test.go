package agent

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// An agent that starts again while /run is full.
func TestStartWithAFullStateDirectory(t *testing.T) {
	priv.Isolate(t)
	dir := t.TempDir()
	state := filepath.Join(dir, "state")
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("state", state, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(state, unix.MNT_DETACH) })
	d := Directories{BPFFS: bpffs.Dir(dir), State: state, Conf: filepath.Join(dir, "conf"), Bin: filepath.Join(dir, "bin")}
	if _, err := openRecord(d, nil); err != nil {
		t.Fatal(err)
	}
	err := os.WriteFile(filepath.Join(state, "others"), make([]byte, 1<<20), 0o600)
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	if _, err := openRecord(d, nil); err != nil {
		t.Errorf("an agent that starts again gives up: %v", err)
	}
}

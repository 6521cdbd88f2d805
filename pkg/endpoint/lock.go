package endpoint

import (
	"context"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// Lock excludes other work on one endpoint. The kernel releases it when the process ends.
type Lock struct {
	file *os.File
}

// Acquire locks one endpoint: a byte of a common file, chosen by a hash of the endpoint's ID, so that no lock files are
// left behind. Those that wait get it in the order in which they came. Waiting ends with ctx; the error then matches
// bpffs.ErrLocked and names the holders of the node's lock.
func Acquire(ctx context.Context, stateDir string, id ID) (*Lock, error) {
	var f *os.File
	err := os.MkdirAll(Dir(stateDir), 0o700)
	if err == nil {
		f, err = os.OpenFile(filepath.Join(Dir(stateDir), ".lock"), os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	}
	if err != nil {
		return nil, fmt.Errorf("lock endpoint %s: %w", id, err)
	}
	if err := lockByte(ctx, f, offset(id)); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock endpoint %s: %w", id, bpffs.NameHolders(stateDir, err))
	}
	return &Lock{file: f}, nil
}

// lockByte locks for the open file, not for the process, so it excludes other goroutines as well.
func lockByte(ctx context.Context, f *os.File, at int64) error {
	return bpffs.Queue(ctx, f, func(fd int, block bool) error {
		how := unix.F_OFD_SETLK
		if block {
			how = unix.F_OFD_SETLKW
		}
		return unix.FcntlFlock(uintptr(fd), how, &unix.Flock_t{Type: unix.F_WRLCK, Start: at, Len: 1})
	})
}

func offset(id ID) int64 {
	h := fnv.New64a()
	h.Write([]byte(id.String()))
	return int64(h.Sum64() >> 2) // an offset is signed, and so is the end of the range
}

// Release releases the lock. A second call does nothing.
func (l *Lock) Release() {
	if l == nil || l.file == nil {
		return
	}
	_ = l.file.Close()
	l.file = nil
}

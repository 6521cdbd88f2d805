package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// peekTimeout bounds the wait for a lock that somebody has taken for a moment, to
// see whether an agent holds it.
const peekTimeout = 200 * time.Millisecond

// locks keep a second agent away from the directories. The kernel releases them
// with the process, however that ends.
type locks struct {
	state *bpffs.Lock
	pins  *os.File
}

// take locks the directories, as far as they exist. The error matches ErrRunning
// when an agent works on them.
func (l *locks) take(d Directories) error {
	ctx, cancel := context.WithTimeout(context.Background(), peekTimeout)
	defer cancel()
	path := filepath.Join(d.State, bpffs.AgentLock)
	state, err := bpffs.File(ctx, path)
	if errors.Is(err, bpffs.ErrLocked) {
		return fmt.Errorf("%w on --state-dir %s: it has locked %s; stop it first", ErrRunning, d.State, path)
	}
	if err != nil {
		return err
	}
	l.state = state
	return l.takePins(d.BPFFS)
}

// takePins locks the pin directory itself: two agents with different state
// directories must not share the pins.
func (l *locks) takePins(dir bpffs.Dir) error {
	if l.pins != nil {
		return nil
	}
	f, err := os.Open(string(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open the pin directory: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		l.pins = f
		return nil
	}
	_ = f.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("%w on --bpffs %s: it has locked that directory; stop it first", ErrRunning, dir)
	}
	return fmt.Errorf("lock the pin directory %s: %w", dir, err)
}

func (l *locks) release() {
	l.state.Release()
	if l.pins != nil {
		_ = l.pins.Close()
		l.pins = nil
	}
}

package bpffs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// lockPoll is how often a busy lock is tried again: flock cannot be waited for
// with a deadline. Most are held for less than a millisecond, so the first
// tries follow closely.
const (
	lockPoll      = 5 * time.Millisecond
	firstLockPoll = 200 * time.Microsecond
)

// ErrLocked is returned (wrapped) when a lock is not to be had in time.
var ErrLocked = errors.New("held by another process")

// Lock is a held advisory lock (flock). The kernel releases it with the
// process, however that ends.
type Lock struct {
	file *os.File
}

// Shared takes the node's lock for work on one pod: many may hold it at once.
// Waiting ends with ctx; the error then matches ErrLocked.
func Shared(ctx context.Context, stateDir string) (*Lock, error) {
	return acquire(ctx, filepath.Join(stateDir, "lock"), unix.LOCK_SH)
}

// Exclusive takes the node's lock for a change to all pods at once, such as an
// upgrade. Waiting ends with ctx; the error then matches ErrLocked.
func Exclusive(ctx context.Context, stateDir string) (*Lock, error) {
	return acquire(ctx, filepath.Join(stateDir, "lock"), unix.LOCK_EX)
}

// File takes an exclusive lock on the file at path, which is made if it is
// missing. Waiting ends with ctx; the error then matches ErrLocked.
func File(ctx context.Context, path string) (*Lock, error) {
	return acquire(ctx, path, unix.LOCK_EX)
}

func acquire(ctx context.Context, path string, how int) (*Lock, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	for wait := firstLockPoll; ; wait = min(2*wait, lockPoll) {
		err = unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		if err == nil {
			return &Lock{file: f}, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			_ = f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			_ = f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, ErrLocked)
		case <-time.After(wait):
		}
	}
}

// Held reports whether a process holds the lock that File takes on path. It
// makes no file: one that is missing is not held.
func Held(path string) (bool, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open lock: %w", err)
	}
	defer f.Close()
	for {
		// Closing the file gives the lock back at once.
		err = unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
		switch {
		case err == nil:
			return false, nil
		case errors.Is(err, unix.EWOULDBLOCK):
			return true, nil
		case !errors.Is(err, unix.EINTR):
			return false, fmt.Errorf("try lock %s: %w", path, err)
		}
	}
}

// Release gives the lock back. A second call does nothing.
func (l *Lock) Release() {
	if l == nil || l.file == nil {
		return
	}
	_ = l.file.Close()
	l.file = nil
}

package bpffs

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Queue takes a lock on an open file with call, a system call that blocks until the
// lock is free or, if it may not block, fails with EAGAIN. The kernel wakes those that
// wait one after the other, in the order in which they came. To poll instead would keep
// a busy node from its work, and leave it to chance who is next.
//
// Waiting ends with ctx; the error then matches ErrLocked. A system call can't be told
// to end: it goes on waiting in a thread of its own, and what it gets after the caller
// has closed f is released at once.
func Queue(ctx context.Context, f *os.File, call func(fd int, block bool) error) error {
	err := control(f, call, false)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		err = ErrLocked
		if ctx.Err() == nil {
			taken := make(chan error, 1)
			go func() { taken <- control(f, call, true) }()
			select {
			case err = <-taken:
			case <-ctx.Done():
			}
		}
	}
	if err != nil {
		return fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return nil
}

// control makes a system call on a file whose number nothing else gets before the call has ended.
func control(f *os.File, call func(fd int, block bool) error, block bool) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	for {
		var failed error
		if err := raw.Control(func(fd uintptr) { failed = call(int(fd), block) }); err != nil {
			return err
		}
		if !errors.Is(failed, unix.EINTR) {
			return failed
		}
	}
}

// wait takes a lock in the kernel's queue.
func wait(ctx context.Context, f *os.File, how int) error {
	return Queue(ctx, f, func(fd int, block bool) error {
		if !block {
			return unix.Flock(fd, how|unix.LOCK_NB)
		}
		return unix.Flock(fd, how)
	})
}

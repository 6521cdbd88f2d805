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

// lockPoll is how long after a failed attempt the node's lock is tried again by a
// process that wants it alone, which gives way every few seconds. Most locks are held
// for less than a millisecond, so the first attempts follow more closely.
const (
	lockPoll      = 5 * time.Millisecond
	firstLockPoll = 200 * time.Microsecond
)

// ErrLocked is returned (wrapped) when a lock could not be taken in time.
var ErrLocked = errors.New("held by another process")

// Lock is an advisory lock (flock) that is held. The kernel releases it when the
// process ends, however that happens.
type Lock struct {
	files []*os.File
	note  string // the file that names this holder; empty: there is none
}

// File takes an exclusive lock on the file at path, which is created if it is
// missing. Those that wait get it in the order in which they came. Waiting ends with
// ctx; the error then matches ErrLocked.
func File(ctx context.Context, path string) (*Lock, error) {
	f, err := openLock(path)
	if err != nil {
		return nil, err
	}
	if err := wait(ctx, f, unix.LOCK_EX); err != nil {
		_ = f.Close()
		return nil, err
	}
	return &Lock{files: []*os.File{f}}, nil
}

// FileAmong takes the lock of File for work that can go on beside that of others: alone
// if nobody holds it, else shared, and then it waits only for a holder that is alone.
func FileAmong(ctx context.Context, path string) (l *Lock, beside bool, err error) {
	f, err := openLock(path)
	if err != nil {
		return nil, false, err
	}
	if err = try(f, unix.LOCK_EX); errors.Is(err, ErrLocked) {
		beside, err = true, wait(ctx, f, unix.LOCK_SH)
	}
	if err != nil {
		_ = f.Close()
		return nil, false, err
	}
	return &Lock{files: []*os.File{f}}, beside, nil
}

func openLock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	return f, nil
}

// poll calls try until it succeeds or ctx ends, at least once.
func poll(ctx context.Context, try func() error) error {
	for wait := firstLockPoll; ; wait = min(2*wait, lockPoll) {
		err := try()
		if !errors.Is(err, ErrLocked) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(wait):
		}
	}
}

// try takes a lock, or changes how it is held, if that is possible at once.
func try(f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EWOULDBLOCK):
			return fmt.Errorf("lock %s: %w", f.Name(), ErrLocked)
		case !errors.Is(err, unix.EINTR):
			return fmt.Errorf("lock %s: %w", f.Name(), err)
		}
	}
}

// Held reports whether a process holds the lock that File takes on path. If there is
// no such file, none does.
func Held(path string) (bool, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open lock: %w", err)
	}
	defer f.Close() // which releases the lock at once
	err = try(f, unix.LOCK_SH)
	if errors.Is(err, ErrLocked) {
		return true, nil
	}
	return false, err
}

// Release releases the lock. A second call does nothing.
func (l *Lock) Release() {
	if l == nil {
		return
	}
	if l.note != "" {
		_ = os.Remove(l.note)
	}
	for _, f := range l.files {
		_ = f.Close()
	}
	l.files, l.note = nil, ""
}

// The node's lock in the state directory is two files. The lock itself is lockName,
// held shared or exclusively. To take it, a process first locks gateName, the gate:
// for a shared lock only for a moment. For the exclusive lock it keeps the gate
// shut, so that no new holders come in, and takes the lock when those before it have
// released theirs. A build that does not know the gate is still excluded by lockName.
const (
	lockName = "lock"
	gateName = "gate"
)

// A process that hangs may hold the lock shared for very long. So that it does not
// keep out others for just as long, the gate is shut for at most gateShut, and then
// open for gateOpen.
const (
	gateShut = 5 * time.Second
	gateOpen = time.Second
)

// AgentLock is the file in the state directory that a running agent keeps locked.
const AgentLock = "agent.lock"

// LockFiles are the names of the files of the node's lock in the state directory.
func LockFiles() []string { return []string{lockName, gateName, holdersName} }

// Shared takes the node's lock for work on one pod: many processes may hold it so at
// once. work names it to those that wait, as in "ADD". Waiting ends with ctx; the
// error then matches ErrLocked and names the holders.
func Shared(ctx context.Context, stateDir, work string) (*Lock, error) {
	defer tellWait(ctx, work, time.Now())
	lock, gate, err := openNode(stateDir)
	if err != nil {
		return nil, err
	}
	l := &Lock{files: []*os.File{lock, gate}}
	if err = wait(ctx, gate, unix.LOCK_SH); err == nil {
		err = errors.Join(wait(ctx, lock, unix.LOCK_SH), try(gate, unix.LOCK_UN))
	}
	if err != nil {
		l.Release()
		return nil, NameHolders(stateDir, err)
	}
	l.sign(stateDir, work)
	return l, nil
}

type waitsKey struct{}

// WithWaits returns a context under which told is called when a wait for the node's lock has ended, also in vain.
func WithWaits(ctx context.Context, told func(work string, waited time.Duration)) context.Context {
	return context.WithValue(ctx, waitsKey{}, told)
}

func tellWait(ctx context.Context, work string, began time.Time) {
	if told, ok := ctx.Value(waitsKey{}).(func(string, time.Duration)); ok {
		told(work, time.Since(began))
	}
}

// Exclusive takes the node's lock for a change to all pods at once, such as an
// upgrade. work names it to those that wait. Waiting ends with ctx; the error then
// matches ErrLocked and names the holders.
func Exclusive(ctx context.Context, stateDir, work string) (*Lock, error) {
	return exclusive(ctx, stateDir, work, gateShut, gateOpen)
}

func exclusive(ctx context.Context, stateDir, work string, shut, open time.Duration) (*Lock, error) {
	defer tellWait(ctx, work, time.Now())
	lock, gate, err := openNode(stateDir)
	if err != nil {
		return nil, err
	}
	l := &Lock{files: []*os.File{lock, gate}}
	for {
		err := alone(ctx, lock, gate, shut, open)
		if err == nil {
			// All notes that are there are of killed processes.
			_ = os.RemoveAll(filepath.Join(stateDir, holdersName))
			l.sign(stateDir, work)
			return l, nil
		}
		if !errors.Is(err, ErrLocked) || ctx.Err() != nil {
			l.Release()
			return nil, NameHolders(stateDir, err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(open):
		}
	}
}

// alone shuts the gate and waits for the shared locks to be released. After an error
// the gate is open.
func alone(ctx context.Context, lock, gate *os.File, shut, open time.Duration) error {
	if err := poll(ctx, func() error { return shutGate(gate) }); err != nil {
		return err
	}
	since := time.Now()
	ctx, cancel := context.WithTimeout(ctx, shut)
	defer cancel()
	err := poll(ctx, func() error { return try(lock, unix.LOCK_EX) })
	if err != nil {
		// The time stamp keeps other processes from shutting the gate again at once. If it can't be set, they may.
		if time.Since(since) > open {
			_ = os.Chtimes(gate.Name(), time.Time{}, time.Now().Add(open))
		}
		err = errors.Join(err, try(gate, unix.LOCK_UN))
	}
	return err
}

// shutGate fails with ErrLocked while the gate has to stay open, by its time stamp.
func shutGate(gate *os.File) error {
	if err := staysOpen(gate); err != nil { // first, since trying would shut it for a moment
		return err
	}
	if err := try(gate, unix.LOCK_EX); err != nil {
		return err
	}
	if err := staysOpen(gate); err != nil {
		return errors.Join(err, try(gate, unix.LOCK_UN))
	}
	return nil
}

func staysOpen(gate *os.File) error {
	info, err := gate.Stat()
	if err != nil {
		return fmt.Errorf("look at %s: %w", gate.Name(), err)
	}
	if left := time.Until(info.ModTime()); left > 0 && left <= gateOpen {
		return fmt.Errorf("lock %s: %w", gate.Name(), ErrLocked)
	}
	return nil
}

func openNode(stateDir string) (lock, gate *os.File, err error) {
	if lock, err = openLock(filepath.Join(stateDir, lockName)); err != nil {
		return nil, nil, err
	}
	if gate, err = openLock(filepath.Join(stateDir, gateName)); err != nil {
		_ = lock.Close()
		return nil, nil, err
	}
	return lock, gate, nil
}

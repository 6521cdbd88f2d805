package bpffs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// waiting counts those that wait in the kernel for a lock on a file.
func waiting(t *testing.T, path string) (n int) {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	locks, err := os.ReadFile("/proc/locks")
	if err != nil {
		t.Fatal(err)
	}
	file := fmt.Sprintf(":%d ", info.Sys().(*syscall.Stat_t).Ino)
	for line := range strings.Lines(string(locks)) {
		if strings.Contains(line, "->") && strings.Contains(line, file) {
			n++
		}
	}
	return n
}

// awaitQueue waits until so many wait for a lock.
func awaitQueue(t *testing.T, path string, n int) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); waiting(t, path) != n; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d wait for the lock, want %d", waiting(t, path), n)
		}
	}
}

// However slow the holder is, those that wait are served in the order in which they came.
func TestFileIsTakenInTurn(t *testing.T) {
	const waiters = 30
	path := filepath.Join(t.TempDir(), "lock")
	slow, err := File(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	turns := make(chan int, waiters)
	for i := range waiters {
		go func() {
			l, err := File(t.Context(), path)
			if err != nil {
				t.Error(err)
			}
			turns <- i // before the next can have its turn
			l.Release()
		}()
		awaitQueue(t, path, i+1)
	}
	slow.Release()
	for want := range waiters {
		if got := <-turns; got != want {
			t.Errorf("waiter %d has had turn %d", got, want)
		}
	}
}

// Who has given up does not get the lock later, nor keep it from those behind.
func TestWaitThatWasGivenUp(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	hung, err := File(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	gaveUp := make(chan error, 1)
	go func() {
		_, err := File(ctx, path)
		gaveUp <- err
	}()
	awaitQueue(t, path, 1)
	behind := make(chan error, 1)
	go func() {
		l, err := File(t.Context(), path)
		l.Release()
		behind <- err
	}()
	awaitQueue(t, path, 2)
	cancel()
	if err := <-gaveUp; !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), path) {
		t.Errorf("a wait that has ended: %v, want ErrLocked with the file's name", err)
	}
	hung.Release()
	if err := <-behind; err != nil {
		t.Error(err)
	}
	awaitQueue(t, path, 0)
	if held(t, path) {
		t.Error("who has given up holds the lock")
	}
}

// Those that work beside each other wait only for one that is alone.
func TestFileAmong(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first, beside, err := FileAmong(t.Context(), path)
	if err != nil || beside {
		t.Fatalf("a free lock: beside others %v, %v", beside, err)
	}
	const many = 30
	joined := make(chan *Lock, many)
	for range many {
		go func() {
			l, beside, err := FileAmong(t.Context(), path)
			if err != nil || !beside {
				t.Errorf("after one that was alone: beside others %v, %v", beside, err)
			}
			joined <- l
		}()
	}
	awaitQueue(t, path, many)
	first.Release()
	for range many { // none of which releases it
		t.Cleanup((<-joined).Release)
	}
	if _, err := File(soon(t), path); !errors.Is(err, ErrLocked) {
		t.Errorf("alone beside others: %v", err)
	}
}

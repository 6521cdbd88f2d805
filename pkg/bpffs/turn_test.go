package bpffs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// churn takes and gives back shares, many at once and overlapping, until the test ends.
func churn(t *testing.T, dir string, loops int, hold time.Duration) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for i := range loops {
		running.Go(func() {
			time.Sleep(time.Duration(i) * hold / time.Duration(loops))
			for ctx.Err() == nil {
				l, err := Shared(ctx, dir, "test")
				if err != nil {
					return
				}
				time.Sleep(hold)
				l.Release()
			}
		})
	}
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	time.Sleep(3 * hold)
}

func TestExclusiveIsNext(t *testing.T) {
	dir := t.TempDir()
	const hold = 30 * time.Millisecond
	churn(t, dir, 16, hold)
	for range 10 {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		started := time.Now()
		l, err := Exclusive(ctx, dir, "test")
		cancel()
		if err != nil {
			t.Fatalf("beside 16 loops: %v", err)
		}
		t.Logf("waited %v", time.Since(started))
		time.Sleep(hold)
		l.Release()
		time.Sleep(hold) // the others' turn
	}
}

// Of two that want the lock alone, the second need not wait for shares that come after the first.
func TestManyWantItAlone(t *testing.T) {
	dir := t.TempDir()
	churn(t, dir, 16, 20*time.Millisecond)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 5 {
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
				l, err := Exclusive(ctx, dir, "test")
				cancel()
				if err != nil {
					t.Error(err)
					return
				}
				l.Release()
			}
		})
	}
	all.Wait()
}

// One share that is never given back must not keep others out for as long as somebody waits for it.
func TestGateOpensNowAndThen(t *testing.T) {
	dir := t.TempDir()
	hung, err := Shared(t.Context(), dir, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer hung.Release()
	ctx, cancel := context.WithCancel(t.Context())
	waiting := make(chan error, 1)
	go func() {
		_, err := exclusive(ctx, dir, "test", 500*time.Millisecond, 100*time.Millisecond)
		waiting <- err
	}()
	time.Sleep(20 * time.Millisecond)
	if l, err := Shared(soon(t), dir, "test"); !errors.Is(err, ErrLocked) {
		t.Errorf("a share although somebody waits: %v, %v", l, err)
	}
	for range 3 {
		enough, end := context.WithTimeout(t.Context(), 2*time.Second)
		l, err := Shared(enough, dir, "test")
		end()
		if err != nil {
			t.Fatalf("the gate has stayed shut: %v", err)
		}
		l.Release()
	}
	cancel()
	if err := <-waiting; !errors.Is(err, ErrLocked) {
		t.Errorf("beside a share that is never given back: %v", err)
	}
	if l, err := Shared(soon(t), dir, "test"); err != nil {
		t.Errorf("nobody waits any more: %v", err)
	} else {
		l.Release()
	}
}

// A killed waiter leaves the gate open.
func TestKilledWaiterLeavesTheGateOpen(t *testing.T) {
	dir := t.TempDir()
	share, err := Shared(t.Context(), dir, "test")
	if err != nil {
		t.Fatal(err)
	}
	other := startHelper(t, helperWait, dir)
	deadline := time.Now().Add(10 * time.Second)
	for shut := false; !shut; shut, err = Held(filepath.Join(dir, gateName)) {
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("the other process does not wait: %v", err)
		}
	}
	if err := other.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = other.Wait()
	second, err := Shared(soon(t), dir, "test")
	if err != nil {
		t.Fatalf("after the waiter was killed: %v", err)
	}
	share.Release()
	second.Release()
	alone, err := Exclusive(soon(t), dir, "test")
	if err != nil {
		t.Fatal(err)
	}
	alone.Release()
}

// A plugin of a build without the gate works beside an agent with one, and the other way round.
func TestBuildWithoutTheGate(t *testing.T) {
	dir := t.TempDir()
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	older := func(how int) error { return unix.Flock(int(f.Fd()), how|unix.LOCK_NB) }
	alone, err := Exclusive(t.Context(), dir, "test")
	if err != nil {
		t.Fatal(err)
	}
	if err := older(unix.LOCK_SH); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("its share beside ours alone: %v", err)
	}
	alone.Release()
	if err := older(unix.LOCK_SH); err != nil {
		t.Fatal(err)
	}
	if _, err := Exclusive(soon(t), dir, "test"); !errors.Is(err, ErrLocked) {
		t.Errorf("ours alone beside its share: %v", err)
	}
	if err := older(unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if _, err := Shared(soon(t), dir, "test"); !errors.Is(err, ErrLocked) {
		t.Errorf("our share beside its own alone: %v", err)
	}
}

// A long GC is no reason to end it: the note says that it is one.
func TestHoldersSayWhatTheyDo(t *testing.T) {
	dir := t.TempDir()
	l, err := Exclusive(t.Context(), dir, "GC")
	if err != nil {
		t.Fatal(err)
	}
	_, err = Shared(soon(t), dir, "ADD")
	if want := fmt.Sprintf(" GC (pid %d) for ", os.Getpid()); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v does not say %q", err, want)
	}
	l.Release()
	if l, err = Shared(t.Context(), dir, "ADD"); err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	_, err = Exclusive(soon(t), dir, "start")
	if want := fmt.Sprintf(" ADD (pid %d) for ", os.Getpid()); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v does not say %q", err, want)
	}
}

// Who waits in vain is told for whom, however it ended for those before.
func TestHoldersAreNamed(t *testing.T) {
	dir := t.TempDir()
	killed := startHelper(t, helperShare, dir)
	if err := killed.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = killed.Wait()
	assert := func(err error, words ...string) {
		t.Helper()
		if !errors.Is(err, ErrLocked) {
			t.Fatalf("error %v", err)
		}
		for _, word := range words {
			if !strings.Contains(err.Error(), word) {
				t.Errorf("error %q does not say %q", err, word)
			}
		}
	}
	other := startHelper(t, helperShare, dir)
	_, err := Exclusive(soon(t), dir, "test")
	assert(err, filepath.Join(dir, "lock"), describe("test", other.Process.Pid), "end it")
	if strings.Contains(err.Error(), "more") {
		t.Errorf("error %q names more than the one that holds it", err)
	}
	for range 20 {
		l, err := Shared(t.Context(), dir, "test")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(l.Release)
	}
	_, err = Exclusive(soon(t), dir, "test")
	assert(err, describe("test", other.Process.Pid), "and 18 more") // the oldest first
	if err := other.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = other.Wait()
	_, err = Exclusive(soon(t), dir, "test")
	assert(err, describe("test", os.Getpid()), "and 17 more")
	left, err := os.ReadDir(filepath.Join(dir, holdersName))
	if err != nil || len(left) != 20 {
		t.Errorf("%d notes, error %v, want one of each holder", len(left), err)
	}
}

func TestNotesOfTheKilledGo(t *testing.T) {
	dir := t.TempDir()
	for range 3 {
		other := startHelper(t, helperShare, dir)
		if err := other.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = other.Wait()
	}
	l, err := Exclusive(t.Context(), dir, "test")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []int{1, 0} {
		left, err := os.ReadDir(filepath.Join(dir, holdersName))
		if err != nil || len(left) != want {
			t.Errorf("%d notes, error %v, want %d", len(left), err, want)
		}
		l.Release()
	}
}

// A note that can't be written keeps nobody from its work.
func TestWithoutNotes(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, holdersName), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := Shared(t.Context(), dir, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	if _, err := Exclusive(soon(t), dir, "test"); !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), "lslocks") {
		t.Errorf("error %v", err)
	}
}

package bpffs

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// What the test binary, started again, is told to do: one of these, with the
// path of the lock's file or of the state directory.
const (
	helperFile  = "TEST_HOLD_LOCK"
	helperShare = "TEST_HOLD_SHARE"
	helperWait  = "TEST_WANT_ALONE"
)

func TestMain(m *testing.M) {
	for _, what := range []string{helperFile, helperShare, helperWait} {
		if path := os.Getenv(what); path != "" {
			hold(what, path)
			return
		}
	}
	os.Exit(m.Run())
}

// hold is the other process: it takes the lock, says so, and keeps it until it
// is killed or its input ends.
func hold(what, path string) {
	var err error
	switch what {
	case helperFile:
		_, err = File(context.Background(), path)
	case helperShare:
		_, err = Shared(context.Background(), path, "test")
	case helperWait:
		fmt.Println("held") // it has nothing to say later
		_, err = Exclusive(context.Background(), path, "test")
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("held")
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// startHelper starts a process that holds the lock, and returns when it does.
func startHelper(t *testing.T, what, path string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), what+"="+path)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if line, err := bufio.NewReader(stdout).ReadString('\n'); err != nil || line != "held\n" {
		t.Fatalf("the other process: %q, %v", line, err)
	}
	return cmd
}

func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

func held(t *testing.T, path string) bool {
	t.Helper()
	h, err := Held(path)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestLockAgainstAnotherProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.lock")
	other := startHelper(t, helperFile, path)
	if !held(t, path) {
		t.Error("Held does not see the other process's lock")
	}
	if _, err := File(soon(t), path); !errors.Is(err, ErrLocked) {
		t.Errorf("lock that another process holds: %v", err)
	}
	// kill -9 must release it.
	if err := other.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	l, err := File(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	if !held(t, path) {
		t.Error("Held does not see our own lock")
	}
}

func TestSharedAndExclusive(t *testing.T) {
	dir := t.TempDir()
	first, err := Shared(t.Context(), dir, "test")
	if err != nil {
		t.Fatal(err)
	}
	second, err := Shared(soon(t), dir, "test")
	if err != nil {
		t.Fatalf("many may share: %v", err)
	}
	if _, err := Exclusive(soon(t), dir, "test"); !errors.Is(err, ErrLocked) {
		t.Errorf("exclusive beside shared: %v", err)
	}
	first.Release()
	if _, err := Exclusive(soon(t), dir, "test"); !errors.Is(err, ErrLocked) {
		t.Errorf("exclusive beside the last shared: %v", err)
	}
	second.Release()
	alone, err := Exclusive(soon(t), dir, "test")
	if err != nil {
		t.Fatalf("exclusive when all have released: %v", err)
	}
	if _, err := Shared(soon(t), dir, "test"); !errors.Is(err, ErrLocked) {
		t.Errorf("shared beside exclusive: %v", err)
	}
	alone.Release()
	alone.Release() // does nothing
	if l, err := Shared(soon(t), dir, "test"); err != nil {
		t.Errorf("after the release: %v", err)
	} else {
		l.Release()
	}
}

func TestWaiterGetsTheLock(t *testing.T) {
	dir := t.TempDir()
	first, err := Exclusive(t.Context(), dir, "test")
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan error, 1)
	go func() {
		l, err := Shared(t.Context(), dir, "test")
		l.Release()
		got <- err
	}()
	select {
	case err := <-got:
		t.Fatalf("did not wait: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	first.Release()
	if err := <-got; err != nil {
		t.Error(err)
	}
}

func TestHeld(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.lock")
	if held(t, path) {
		t.Error("a missing file is held")
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Error("Held has made the file")
	}
	l, err := File(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if !held(t, path) {
		t.Error("a lock that is held is not seen")
	}
	l.Release()
	if held(t, path) {
		t.Error("a lock that was released is held")
	}
	// The look itself must not keep the lock.
	again, err := File(soon(t), path)
	if err != nil {
		t.Fatal(err)
	}
	again.Release()
}

func TestLockWithoutDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "missing")
	if _, err := Shared(t.Context(), dir, "test"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("state directory missing: %v", err)
	}
	var none *Lock
	none.Release()
}

// A tenth of the real times: shares wait for 1 s (10 s), the gate is shut for 500 ms (5 s) and open for 100 ms (1 s).
func refused(t *testing.T, waiters int) (failed, all int) {
	dir := t.TempDir()
	hung, err := Shared(t.Context(), dir, "ADD")
	if err != nil {
		t.Fatal(err)
	}
	defer hung.Release()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{}, waiters)
	for range waiters {
		go func() {
			_, _ = exclusive(ctx, dir, "wait", 500*time.Millisecond, 100*time.Millisecond)
			ended <- struct{}{}
		}()
		time.Sleep(150 * time.Millisecond)
	}
	for range 12 {
		all++
		c, end := context.WithTimeout(t.Context(), time.Second)
		l, err := Shared(c, dir, "ADD")
		end()
		if err != nil {
			failed++
		} else {
			l.Release()
			time.Sleep(70 * time.Millisecond)
		}
	}
	cancel()
	for range waiters {
		<-ended
	}
	return failed, all
}

func TestGateOpensAlsoForManyWaiters(t *testing.T) {
	for _, waiters := range []int{1, 2, 3} {
		t.Run(fmt.Sprint(waiters), func(t *testing.T) {
			t.Parallel() // each waits for most of its time
			if failed, all := refused(t, waiters); failed > 0 {
				t.Errorf("%d who want the lock alone beside one share that hangs: %d of %d others refused", waiters, failed, all)
			}
		})
	}
}

func TestWaitsAreTold(t *testing.T) {
	dir := t.TempDir()
	told := map[string]time.Duration{}
	ctx := WithWaits(t.Context(), func(work string, waited time.Duration) { told[work] += waited })
	holder, err := Shared(ctx, dir, "ADD")
	if err != nil {
		t.Fatal(err)
	}
	const wait = 200 * time.Millisecond
	short, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	if _, err := Exclusive(short, dir, "sweep"); !errors.Is(err, ErrLocked) {
		t.Errorf("taken: %v", err)
	}
	holder.Release()
	if _, there := told["ADD"]; !there || told["sweep"] < wait/2 || len(told) != 2 { // on an emulated machine time passes before the wait begins
		t.Errorf("told %v, want both works, and the one in vain with its whole wait", told)
	}
}

// Package priv is what a test needs that needs the kernel: the decision to skip
// or to fail, how long to wait, and namespaces in which it can do no harm and
// leaves nothing.
package priv

import (
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"
)

// Require skips the test for a normal user, and fails it when
// REQUIRE_PRIVILEGED=1 says that nothing may be skipped.
func Require(tb testing.TB) {
	tb.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("REQUIRE_PRIVILEGED") == "1" {
		tb.Fatal("needs root, and REQUIRE_PRIVILEGED=1 is set")
	}
	tb.Skip("needs root")
}

// Long says whether tests run in their long form, as make test-all has them: full tables, real lifetimes, minutes. In the
// short form the same is asserted of less.
func Long() bool { return os.Getenv("TEST_LONG") == "1" }

// Patience is how long to wait for what takes a limit on an ordinary machine: $EBPF_CNI_PATIENCE times as long. Emulated
// processors need it.
func Patience(limit time.Duration) time.Duration {
	if times, err := strconv.Atoi(os.Getenv("EBPF_CNI_PATIENCE")); err == nil && times > 0 {
		return limit * time.Duration(times)
	}
	return limit
}

// HasTCX says whether the running kernel is of a version that has tcx. It asks
// for the version, so that a kernel that should have it and refuses it fails.
func HasTCX(tb testing.TB) bool {
	tb.Helper()
	version, err := features.LinuxVersionCode()
	if err != nil {
		tb.Fatal(err)
	}
	return version >= 6<<16|6<<8
}

// NeedTCX skips the test on a kernel before 6.6.
func NeedTCX(tb testing.TB) {
	tb.Helper()
	if !HasTCX(tb) {
		tb.Skip("needs tcx, which Linux 6.6 brought")
	}
}

// InNetNS calls f in a network namespace of its own, which ends with f unless somebody keeps it.
func InNetNS(tb testing.TB, f func() error) {
	tb.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = f()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		tb.Fatalf("a network namespace: %v", err)
	}
}

// Isolate gives the test's goroutine a network namespace and a mount namespace
// of its own, and returns a directory that is a BPF file system there. Both
// namespaces have no name: they end with the goroutine's thread, also when the
// process is killed, and all interfaces, pins and links in them end too. Other
// goroutines, those of subtests included, stay outside.
func Isolate(tb testing.TB) string {
	tb.Helper()
	Require(tb)
	dir := filepath.Join(tb.TempDir(), "bpf")
	if err := os.Mkdir(dir, 0o700); err != nil {
		tb.Fatal(err)
	}
	// Never unlocked, so that the thread ends with the goroutine.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_NEWNET); err != nil {
		tb.Fatalf("unshare mounts and network: %v", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		tb.Fatalf("make mounts private: %v", err)
	}
	if err := unix.Mount("bpf", dir, "bpf", 0, "mode=0700"); err != nil {
		tb.Fatalf("mount a BPF file system: %v", err)
	}
	tb.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			tb.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

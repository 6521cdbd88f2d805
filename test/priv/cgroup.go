package priv

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// CgroupMount is where cgroup2 is mounted, with the machine's own first cgroup; empty: nowhere.
func CgroupMount() (string, error) {
	text, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("list mounts: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		before, after, _ := strings.Cut(line, " - ")
		if place := strings.Fields(before); len(place) >= 5 && strings.HasPrefix(after, "cgroup2 ") {
			return place[4], nil
		}
	}
	return "", nil
}

// RemoveCgroup removes a cgroup. Processes that have just ended may still be in it.
func RemoveCgroup(dir string) error {
	for end := time.Now().Add(Patience(2 * time.Second)); ; time.Sleep(time.Millisecond) {
		err := os.Remove(dir)
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			return err
		}
	}
}

// Cgroup makes a cgroup of the test's own, without a process in it, and removes it when the test ends.
func Cgroup(tb testing.TB) string {
	tb.Helper()
	Require(tb)
	mount, err := CgroupMount()
	if mount == "" || err != nil {
		tb.Fatalf("cgroup2 has to be mounted: %v", err)
	}
	dir, err := os.MkdirTemp(mount, "ebpf-cni-test-") //nolint:usetesting // it is no ordinary directory
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := RemoveCgroup(filepath.Clean(dir)); err != nil {
			tb.Error(err)
		}
	})
	return dir
}

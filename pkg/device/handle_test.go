package device

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

func TestDumpRepeatsWhatTheKernelInterrupted(t *testing.T) {
	calls := 0
	got, err := dump(func() ([]int, error) {
		if calls++; calls < 3 {
			return []int{0}, unix.EINTR
		}
		return []int{1, 2}, nil
	})
	if err != nil || calls != 3 || len(got) != 2 {
		t.Errorf("got %v, %v after %d calls", got, err, calls)
	}
	if _, err := dump(func() ([]int, error) { return []int{1}, unix.EINTR }); !errors.Is(err, unix.EINTR) {
		t.Errorf("a dump that never completes: %v, want EINTR and nothing listed", err)
	}
}

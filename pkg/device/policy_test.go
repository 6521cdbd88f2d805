package device

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A kernel without IPsec looks for the module each time that it is asked.
func TestMissingIPsecIsAskedForSeldom(t *testing.T) {
	var a ability
	asked, start := 0, time.Now()
	for _, step := range []struct {
		after  time.Duration
		answer error
		asked  int
		want   error
	}{
		{0, unix.EPROTONOSUPPORT, 1, unix.EPROTONOSUPPORT},
		{time.Second, nil, 1, unix.EPROTONOSUPPORT},
		{askAgain - 1, nil, 1, unix.EPROTONOSUPPORT},
		{askAgain, unix.EPROTONOSUPPORT, 2, unix.EPROTONOSUPPORT},
		{2*askAgain - 1, nil, 2, unix.EPROTONOSUPPORT},
		{2 * askAgain, unix.EMFILE, 3, unix.EMFILE}, // says nothing of IPsec
		{2 * askAgain, nil, 4, nil},
		{2 * askAgain, nil, 5, nil},
	} {
		err := a.ask(start.Add(step.after), func() error { asked++; return step.answer })
		if !errors.Is(err, step.want) || asked != step.asked {
			t.Errorf("after %v: %v, asked %d times; want %v, %d times", step.after, err, asked, step.want, step.asked)
		}
	}
}

func TestMissingIPsecIsWaitedFor(t *testing.T) {
	tries, broken := 0, errors.New("broken")
	err := whenThere(t.Context(), time.Millisecond, func() error {
		if tries++; tries < 3 {
			return fmt.Errorf("subscribe: %w", unix.EPROTONOSUPPORT)
		}
		return broken
	})
	if !errors.Is(err, broken) || tries != 3 {
		t.Errorf("%v after %d tries, want that of the third", err, tries)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := whenThere(ctx, time.Hour, func() error { return unix.EPROTONOSUPPORT }); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("when it is to end: %v", err)
	}
}

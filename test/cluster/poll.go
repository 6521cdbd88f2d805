package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// fatal is an error that waiting does not mend.
type fatal struct{ error }

func (f fatal) Unwrap() error { return f.error }

// Poll calls check until it has no error to tell, at most until the context ends; the error is then the last one.
func Poll(ctx context.Context, what string, check func(context.Context) error) error {
	return poll(ctx, 100*time.Millisecond, what, check)
}

func poll(ctx context.Context, every time.Duration, what string, check func(context.Context) error) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	var last error
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		if stop, ok := errors.AsType[fatal](err); ok {
			return fmt.Errorf("wait until %s: %w", what, stop.error)
		}
		// An answer that the context cut off says less than the one before it.
		if last == nil || ctx.Err() == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w; last: %w", what, ctx.Err(), last)
		case <-tick.C:
		}
	}
}

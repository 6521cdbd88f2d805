package agent

import (
	"context"
	"errors"
	"testing"
	"time"
)

func TestBounded(t *testing.T) {
	const d = 50 * time.Millisecond
	failure := errors.New("failure")
	if err := bounded(t.Context(), d, func() error { return failure }); !errors.Is(err, failure) {
		t.Errorf("the work's own end: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	polite := func() error { <-ctx.Done(); return ctx.Err() }
	time.AfterFunc(d, cancel)
	if err := bounded(ctx, time.Minute, polite); !errors.Is(err, context.Canceled) {
		t.Errorf("work that ends with the context: %v", err)
	}
	stuck := make(chan struct{})
	defer close(stuck)
	began := time.Now()
	err := bounded(ctx, d, func() error { <-stuck; return nil })
	if !errors.Is(err, errCutOff) {
		t.Errorf("work that does not end: %v", err)
	}
	if took := time.Since(began); took < d {
		t.Errorf("cut off after %v, although there were %v", took, d)
	}
}

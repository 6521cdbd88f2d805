package source

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"
)

// limits are how long an API server may be silent.
type limits struct {
	// answer is until an answer begins.
	answer time.Duration
	// silence is within one: on a watch it sends a bookmark each minute, so that no news can be told from no connection.
	// Where only packets are dropped, client-go's pings find out sooner, within 45 s.
	silence time.Duration
}

func usualLimits() limits {
	return limits{answer: time.Minute, silence: 2*time.Minute + 30*time.Second}
}

// attentive ends requests of which nothing is heard any more; the reflector then makes them anew, and finds out whether
// there is still somebody who answers.
type attentive struct {
	next   http.RoundTripper
	limits limits
	heard  func()
	// answered is told of each request whether it was.
	answered func(*http.Request, error)
}

// RoundTrip implements http.RoundTripper.
func (a attentive) RoundTrip(r *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(r.Context())
	b := &listenedTo{ctx: ctx, cancel: cancel, attentive: a}
	b.timer = time.AfterFunc(a.limits.answer, func() { cancel(silentFor(a.limits.answer)) })
	response, err := a.next.RoundTrip(r.WithContext(ctx))
	if err != nil {
		err = b.explain(err)
		b.stop()
		a.answered(r, err)
		return nil, err
	}
	a.answered(r, nil)
	b.timer.Stop()
	b.timer = time.AfterFunc(a.limits.silence, func() { cancel(silentFor(a.limits.silence)) })
	a.heard()
	b.ReadCloser, response.Body = response.Body, b
	return response, nil
}

// silentFor is a timeout, which client-go does not take for a broken answer.
func silentFor(d time.Duration) error {
	return fmt.Errorf("nothing heard for %v: %w", d, os.ErrDeadlineExceeded)
}

// listenedTo is the body of an answer.
type listenedTo struct {
	io.ReadCloser
	attentive
	ctx    context.Context //nolint:containedctx // the request's, which ends with the body
	cancel context.CancelCauseFunc
	timer  *time.Timer
}

// Read implements io.Reader.
func (b *listenedTo) Read(into []byte) (int, error) {
	n, err := b.ReadCloser.Read(into)
	if n > 0 {
		b.heard()
		b.timer.Reset(b.limits.silence)
	}
	if err != nil {
		err = b.explain(err)
	}
	return n, err
}

// Close implements io.Closer.
func (b *listenedTo) Close() error {
	b.stop()
	return b.ReadCloser.Close()
}

func (b *listenedTo) stop() {
	b.timer.Stop()
	b.cancel(nil)
}

// explain says silence where the request was cancelled for it.
func (b *listenedTo) explain(err error) error {
	if cause := context.Cause(b.ctx); cause != nil && cause != b.ctx.Err() { //nolint:errorlint // the two are one unless it was us
		return cause
	}
	return err
}

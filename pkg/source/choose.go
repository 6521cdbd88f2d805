package source

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

// times are how often API servers are asked whether they are ready.
type times struct {
	// interval is how often the one in use is, and at most twice as late, unless something was heard from it meanwhile, as from a
	// watch of many Nodes; trust is for how long, at most, that is enough.
	interval, trust time.Duration
	// delay is how long a check waits for which there is a reason, and at most twice as long: many agents may have the same one.
	delay time.Duration
	// away is for how long requests fail at once after no API server has answered, before all are tried again.
	away time.Duration
	// spread is after how long one is drawn anew among those that are ready, and at most twice as late: what failures have made
	// uneven among many agents is even again then.
	spread time.Duration
}

func usualTimes() times {
	return times{interval: 5 * time.Second, trust: 45 * time.Second, delay: time.Second, away: time.Second, spread: 2 * time.Hour}
}

// jittered is a duration, at most twice as long.
func jittered(d time.Duration) time.Duration { return d + rand.N(d) } //nolint:gosec // nobody is to guess it

// current is the API server in use; nil: none has been chosen, or none answers.
func (v *Servers) current() *instance {
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case len(v.all) == 1:
		return v.all[0]
	case v.away != nil:
		return nil
	}
	return v.inUse
}

// choice is the API server to ask. If there is none, all are tried, unless they just were.
func (v *Servers) choice(ctx context.Context) (*instance, error) {
	if i := v.current(); i != nil {
		return i, nil
	}
	v.choosing.Lock()
	defer v.choosing.Unlock()
	if i := v.current(); i != nil {
		return i, nil
	}
	if err := v.justFailed(); err != nil {
		return nil, err
	}
	v.try(ctx)
	if i := v.current(); i != nil {
		return i, nil
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return nil, cmp.Or(ctx.Err(), v.away) // however long ago that was by now
}

// justFailed is why no API server answered a moment ago.
func (v *Servers) justFailed() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if time.Since(v.tried) < v.options.times.away {
		return v.away
	}
	return nil
}

// doubt checks an API server at which a request has failed, and returns the one to use: the same if it is ready, or if it is the
// only one; nil: none.
func (v *Servers) doubt(ctx context.Context, i *instance) *instance {
	v.choosing.Lock()
	defer v.choosing.Unlock()
	now := v.current()
	switch {
	case now != i || v.alone():
		return now
	case ctx.Err() != nil: // whoever asks for something can't wait, so it is for Run
		i.suspect.Store(true)
		poke(v.news)
		return i
	case v.isWell(ctx, i):
		return i
	}
	v.try(ctx)
	return v.current()
}

func (v *Servers) alone() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.all) == 1
}

// look checks what is due: the API server in use, and those that have just become known. All are tried where none is in use, or
// another one would be better.
func (v *Servers) look(ctx context.Context) {
	v.choosing.Lock()
	defer v.choosing.Unlock()
	i, alone := v.current(), v.alone()
	switch unknown, better := v.dueBeside(); {
	case alone:
	case i == nil || better || !v.isTrusted(i) && !v.isWell(ctx, i):
		v.try(ctx)
	default:
		_ = v.checkAll(ctx, unknown) // which is theirs, and noted
	}
}

// dueBeside are those that have never been checked, and whether to try all although the one in use may be ready: it is time to draw
// one anew; or it is the last resort, and there are new ones, or it is time to look for others.
func (v *Servers) dueBeside() (unknown []*instance, better bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, i := range v.all {
		if i.checked.IsZero() && !i.lastResort {
			unknown = append(unknown, i)
		}
	}
	better = v.drawsAnew()
	if v.inUse != nil && v.inUse.lastResort {
		better = better || v.leaving || len(unknown) > 0 || time.Since(v.tried) >= v.options.times.trust
	}
	return unknown, better
}

// drawsAnew says that it is time to draw anew among the API servers, whichever is in use. The caller holds the lock.
func (v *Servers) drawsAnew() bool { return v.inUse != nil && !time.Now().Before(v.draw) }

// isTrusted says that an API server needs no check: something was just heard from it.
func (v *Servers) isTrusted(i *instance) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	heard := time.Since(time.Unix(0, i.heard.Load()))
	return !i.suspect.Load() && heard < v.options.times.interval && time.Since(i.checked) < v.options.times.trust
}

// isWell checks the API server in use. Connections on which nobody answers are ended, so that what waits there hears of it.
func (v *Servers) isWell(ctx context.Context, i *instance) bool {
	err := v.checkAll(ctx, []*instance{i})
	if ctx.Err() != nil {
		return true
	}
	if err != nil && !errors.Is(err, errUnready) {
		i.connections.CloseAll()
	}
	return err == nil
}

// checkAll checks some at once, and notes the outcomes, unless ctx ends meanwhile: that says nothing about them.
func (v *Servers) checkAll(ctx context.Context, some []*instance) error {
	var g errgroup.Group
	outcomes := make([]error, len(some))
	for n, i := range some {
		g.Go(func() error { outcomes[n] = i.check(ctx); return nil })
	}
	_ = g.Wait()
	if err := ctx.Err(); err != nil {
		return err
	}
	for n, i := range some {
		v.note(i, outcomes[n])
	}
	return errors.Join(outcomes...)
}

// note notes the outcome of a check.
func (v *Servers) note(i *instance, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	i.checked = time.Now()
	i.suspect.Store(false)
	i.worked = i.worked || err == nil
	i.err = err
}

// try checks all API servers, and chooses. The caller holds choosing.
func (v *Servers) try(ctx context.Context) {
	v.mu.Lock()
	all := slices.Clone(v.all)
	v.mu.Unlock()
	failures := v.checkAll(ctx, all)
	if ctx.Err() != nil {
		return
	}
	v.choose(all, failures)
	v.save()
}

// best is the API server to use of those that have just been checked: one that is ready, rather than one that only answers; one
// with an address of its own, rather than the last resort; the one to keep, rather than another, and of others any, so that agents
// which lose the same one do not all come to the same next one. nil: none answers.
func best(all []*instance, keep *instance) *instance {
	all = slices.DeleteFunc(slices.Clone(all), func(i *instance) bool { return i.err != nil && !errors.Is(i.err, errUnready) })
	rand.Shuffle(len(all), func(a, b int) { all[a], all[b] = all[b], all[a] })
	rank := func(i *instance) int {
		n := 0
		for weight, worse := range []bool{i != keep, i.lastResort, i.err != nil} {
			if worse {
				n |= 1 << weight
			}
		}
		return n
	}
	if len(all) == 0 {
		return nil
	}
	return slices.MinFunc(all, func(a, b *instance) int { return cmp.Compare(rank(a), rank(b)) })
}

// choose makes the best of those that have been tried the API server in use. If none answers, that is for these reasons.
func (v *Servers) choose(tried []*instance, failures error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.tried, v.leaving = time.Now(), false
	keep := v.inUse
	if keep == nil || v.drawsAnew() {
		keep, v.draw = nil, v.tried.Add(jittered(v.options.times.spread))
	}
	next := best(tried, keep)
	if next == nil {
		v.away = &serverError{"any API server", enumerated{failures}}
		return
	}
	before := v.inUse
	v.inUse, v.away = next, nil
	switch log := v.options.Log; {
	case before == next:
		return
	case before == nil:
		log.Info("API server chosen", "server", next.String(), "of", len(v.all))
	case before.err == nil: // it was the last resort, or another one was drawn
		log.Info("the API server is reached at another address from now on", "server", next.String(), "before", before.String())
		v.left = append(v.left, before)
	default:
		v.failovers++
		log.Warn("the API server in use has failed, and another one is used", "server", next.String(), "before", before.String(), "error", before.err)
		before.connections.CloseAll() // so that watches move
	}
	v.forgetLeaving()
}

// enumerated is a joined error on one line.
type enumerated struct{ error }

// Error implements error.
func (e enumerated) Error() string { return strings.ReplaceAll(e.error.Error(), "\n", "; ") }

// Unwrap returns the joined error.
func (e enumerated) Unwrap() error { return e.error }

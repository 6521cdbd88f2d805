package agent

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"
)

const (
	// mostLines is how many lines of one kind are logged at once, or within summaryInterval. More have one cause, such as an
	// address that comes and goes.
	mostLines = 5
	// summaryInterval is how often a line says what else of that kind there would have been. Lines are logged again once
	// there was none of their kind for as long.
	summaryInterval = time.Minute
)

// quiet is a log in which nothing that repeats itself drowns the rest. Lines are of one kind if they have the same message
// and are about the same. At level debug every line is logged.
type quiet struct {
	slog.Handler
	kinds *kinds
}

type kinds struct {
	mu    sync.Mutex
	lines map[string]*lines
}

// lines are those of one kind in the current interval.
type lines struct {
	since  time.Time
	logged int
	held   int         // not logged
	last   slog.Record // of those
	muted  bool        // there were too many in an earlier interval
	log    slog.Handler
}

func newQuiet(log slog.Handler) *quiet {
	return &quiet{log, &kinds{lines: map[string]*lines{}}}
}

// WithAttrs and WithGroup implement slog.Handler.
func (q *quiet) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &quiet{q.Handler.WithAttrs(attrs), q.kinds}
}
func (q *quiet) WithGroup(name string) slog.Handler {
	return &quiet{q.Handler.WithGroup(name), q.kinds}
}

// Handle implements slog.Handler.
func (q *quiet) Handle(ctx context.Context, r slog.Record) error {
	if q.Enabled(ctx, slog.LevelDebug) || q.kinds.admit(r, q.Handler) {
		return q.Handler.Handle(ctx, r)
	}
	return nil
}

// subjects are the attributes that say what a line is about.
var subjects = []string{"about", "node", "endpoint", "interface", "reason"}

// mostKinds is how many kinds are told apart.
const mostKinds = 1000

// kindOf is what lines have in common that say the same again.
func kindOf(r slog.Record) string {
	kind := r.Message
	r.Attrs(func(a slog.Attr) bool {
		if slices.Contains(subjects, a.Key) {
			kind += "\x00" + a.Value.String()
		}
		return true
	})
	return kind
}

// admit says whether a line is logged, and counts it.
func (k *kinds) admit(r slog.Record, log slog.Handler) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	kind := kindOf(r)
	if k.lines[kind] == nil && len(k.lines) >= mostKinds {
		kind = r.Message
	}
	l := k.lines[kind]
	if l == nil {
		l = &lines{since: r.Time}
		k.lines[kind] = l
	}
	if !l.muted && l.logged < mostLines {
		l.logged++
		return true
	}
	l.held, l.last, l.log = l.held+1, r.Clone(), log
	return false
}

// sumUp logs what was held back, of each kind once the interval is over; of all kinds if last.
func (k *kinds) sumUp(now time.Time, last bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	// The order of what was said last.
	for _, kind := range slices.SortedFunc(maps.Keys(k.lines), func(a, b string) int { return k.lines[a].last.Time.Compare(k.lines[b].last.Time) }) {
		l := k.lines[kind]
		if !last && now.Sub(l.since) < summaryInterval {
			continue
		}
		if l.held == 0 {
			delete(k.lines, kind)
			continue
		}
		r := slog.NewRecord(now, l.last.Level, l.last.Message, 0)
		r.AddAttrs(slog.Int("repeated", l.held), slog.Duration("within", now.Sub(l.since).Round(time.Second)))
		l.last.Attrs(func(a slog.Attr) bool { r.AddAttrs(a); return true })
		_ = l.log.Handle(context.Background(), r)
		l.since, l.logged, l.held, l.muted = now, 0, 0, true
	}
}

// run logs what is held back, until ctx ends.
func (q *quiet) run(ctx context.Context) error {
	err := repeat(ctx, func() time.Duration {
		q.kinds.sumUp(time.Now(), false)
		return summaryInterval / 6 // which is late enough to cost nothing
	})
	q.kinds.sumUp(time.Now(), true)
	return err
}

// clientGo is a log for klog, through which client-go speaks. What it says at its usual level is warnings, even where it
// calls them information; what it knows of a list or watch that fails, the source has told already.
type clientGo struct{ slog.Handler }

// Handle implements slog.Handler.
func (c clientGo) Handle(ctx context.Context, r slog.Record) error {
	switch {
	case r.Message == "Failed to watch":
		r.Level = slog.LevelDebug
	case r.Level == slog.LevelInfo:
		r.Level = slog.LevelWarn
	}
	if !c.Enabled(ctx, r.Level) {
		return nil
	}
	r.AddAttrs(slog.String("from", "client-go"))
	return c.Handler.Handle(ctx, r)
}

// WithAttrs and WithGroup implement slog.Handler.
func (c clientGo) WithAttrs(attrs []slog.Attr) slog.Handler {
	return clientGo{c.Handler.WithAttrs(attrs)}
}
func (c clientGo) WithGroup(name string) slog.Handler { return clientGo{c.Handler.WithGroup(name)} }

package agent

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// complaints are the current failures of work that is tried again and again. Each is logged when it comes up, when it
// changes and when it is over. While there are any, the controllers that have them are degraded: what a complaint is
// about begins with the controller, as in "cluster/route 10.244.2.0/24". Any goroutine may complain.
type complaints struct {
	log *slog.Logger
	now func() time.Time

	mu      sync.Mutex
	current map[string]complaint // by what each is about
	changed bool                 // since hasChanged was last asked
}

type complaint struct {
	text      string
	tolerable string // what of it keeps no pod from being carried; empty: nothing
	since     time.Time
	times     int // it was noted
}

func newComplaints(log *slog.Logger) *complaints {
	return &complaints{log: log, now: time.Now, current: map[string]complaint{}}
}

// note takes the outcome of something: an error is logged unless it is the same as before, nil ends the complaint.
func (c *complaints) note(about string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, was := c.current[about]; err == nil && was {
		c.end("", []string{about})
	}
	c.begin(slog.LevelError, "", map[string]error{about: err})
}

// warn is note for what somebody else does again and again, and is put right each time.
func (c *complaints) warn(about string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.begin(slog.LevelWarn, "", map[string]error{about: err})
}

// noteEach is note for all of a kind: what is not among errs is over.
func (c *complaints) noteEach(kind string, errs map[string]error) {
	c.forget(kind, func(name string) bool { return errs[name] == nil })
	c.mu.Lock()
	defer c.mu.Unlock()
	c.begin(slog.LevelError, kind, errs)
}

// forget ends the complaints of a kind about what is over.
func (c *complaints) forget(kind string, over func(name string) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var ended []string
	for about := range c.current {
		if name, of := strings.CutPrefix(about, kind); of && over(name) {
			ended = append(ended, about)
		}
	}
	c.end(kind, ended)
}

// begin remembers failures and logs the new ones: of many of one kind some, and how many more there are.
func (c *complaints) begin(level slog.Level, kind string, errs map[string]error) {
	var news []string
	for name, err := range errs {
		if err == nil {
			continue
		}
		is, was := c.current[kind+name]
		if !was {
			is.since = c.now()
		}
		text, rest := textOf(err), ""
		if t := tolerable(err); t != nil {
			rest = textOf(t)
		}
		if is.text != text {
			news = append(news, name)
		}
		if is.text != text || is.tolerable != rest {
			is.text, is.tolerable, c.changed = text, rest, true
		}
		is.times++
		c.current[kind+name] = is
	}
	slices.Sort(news)
	for i, name := range news {
		if i == mostLines {
			c.log.Log(context.Background(), level, "more problems of this kind, trying again", "about", strings.TrimSpace(kind), "more", len(news)-i)
			break
		}
		c.log.Log(context.Background(), level, "problem, trying again", "about", kind+name, "error", errs[name])
	}
}

// textOf is what an error says, but for what changes all the time: who holds a lock, and for how long.
func textOf(err error) string {
	if errors.Is(err, bpffs.ErrLocked) {
		return bpffs.ErrLocked.Error()
	}
	return err.Error()
}

func (c *complaints) end(kind string, ended []string) {
	slices.Sort(ended)
	for i, about := range ended {
		was := c.current[about]
		delete(c.current, about)
		c.changed = true
		switch {
		case i < mostLines:
			c.log.Info("no longer the case", "about", about, "lasted", c.now().Sub(was.since).Round(time.Millisecond), "times", was.times)
		case i == mostLines:
			c.log.Info("more of this kind are no longer the case", "about", strings.TrimSpace(kind), "more", len(ended)-i)
		}
	}
}

// lasted is for how long there has been a complaint about something; false: there is none.
func (c *complaints) lasted(about string) (time.Duration, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	is, failing := c.current[about]
	return c.now().Sub(is.since), failing
}

// hasChanged says whether there are other complaints than when it was last asked.
func (c *complaints) hasChanged() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	changed := c.changed
	c.changed = false
	return changed
}

// degraded is what keeps no pod from being carried but is not as it should be, by what it is about.
func (c *complaints) degraded() map[string]string {
	c.mu.Lock()
	defer c.mu.Unlock()
	is := map[string]string{}
	for about, complaint := range c.current {
		if complaint.tolerable != "" {
			is[about] = complaint.tolerable
		}
	}
	return is
}

// controllers are those that ARCHITECTURE.md has in its table.
var controllers = []string{
	"cluster", "uplinks", "bridges", "tunnel", "endpoints", "mode", "forward", "files", "sysctls", "pins", "network", "source", "flows", "services", "listeners", "metrics",
}

// controllersOf says of each controller whether there are complaints about it.
func controllersOf(abouts map[string]string) map[string]bool {
	are := map[string]bool{}
	for _, controller := range controllers {
		are[controller] = false
	}
	for about := range abouts {
		controller, _, _ := strings.Cut(about, "/")
		are[controller] = true
	}
	return are
}

package agent

import (
	"errors"
	"log/slog"
	"maps"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// complaints are the current failures of work that is tried again and again. Each
// is logged when it comes up, and not again while it lasts.
type complaints struct {
	log   *slog.Logger
	texts map[string]string // by what each is about
}

func newComplaints(log *slog.Logger) *complaints {
	return &complaints{log, map[string]string{}}
}

// note takes the outcome of something: an error is logged unless it is the same as
// before, nil ends the complaint.
func (c *complaints) note(about string, err error) {
	if err == nil {
		delete(c.texts, about)
		return
	}
	text := err.Error()
	if errors.Is(err, bpffs.ErrLocked) {
		text = bpffs.ErrLocked.Error() // its text changes all the time: who holds it, for how long
	}
	if c.texts[about] != text {
		c.texts[about] = text
		c.log.Error("problem, trying again", "about", about, "error", err)
	}
}

// forget ends the complaints of a kind about what is over.
func (c *complaints) forget(kind string, over func(name string) bool) {
	maps.DeleteFunc(c.texts, func(about, _ string) bool {
		name, of := strings.CutPrefix(about, kind)
		return of && over(name)
	})
}

// noteEach is note for all of a kind: what is not among errs is over.
func (c *complaints) noteEach(kind string, errs map[string]error) {
	c.forget(kind, func(name string) bool { return errs[name] == nil })
	for name, err := range errs {
		c.note(kind+name, err)
	}
}

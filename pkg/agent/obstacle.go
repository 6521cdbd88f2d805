package agent

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// obstacle is an error that keeps this node from carrying a pod: the node is not ready. With any other error it is
// degraded: what it carries goes on, and so do new pods.
type obstacle struct{ error }

// Unwrap is for errors.Is and errors.As.
func (o obstacle) Unwrap() error { return o.error }

// hinder makes an obstacle of an error.
func hinder(err error) error {
	if err == nil {
		return nil
	}
	return obstacle{err}
}

// obstacles are those parts of an error that are obstacles, tolerable is the rest; nil: there are none.
func obstacles(err error) error { return partsOf(err, true) }
func tolerable(err error) error { return partsOf(err, false) }

func partsOf(err error, hindering bool) error {
	_, hinders := errors.AsType[obstacle](err)
	joined, several := err.(interface{ Unwrap() []error }) // what wraps a joined error says something of all of it
	switch {
	case err == nil || !hinders && hindering:
		return nil
	case !hinders:
		return err
	case !several && hindering:
		return err
	case !several:
		return nil
	}
	var parts []error
	for _, one := range joined.Unwrap() {
		parts = append(parts, partsOf(one, hindering))
	}
	return errors.Join(parts...)
}

// explainFiles adds to an error that there are no file descriptors left what to do about it. Go has raised the soft limit to
// the hard one when the agent started.
func explainFiles(err error) error {
	var limit unix.Rlimit
	if !errors.Is(err, unix.EMFILE) || unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) != nil {
		return err
	}
	return errors.Join(err, fmt.Errorf("the agent has all %d files open that it may: give its container a higher limit (LimitNOFILE of the container runtime's service)", limit.Cur))
}

const (
	// maxReason is how long a reason for people may be, as in the condition of the Node, and maxCause one of its parts, in
	// bytes; maxTail is for how many more there are.
	maxReason = 1024
	maxCause  = 300
	maxTail   = 30
)

// enumerate makes one reason of several causes, each on one line and cut if it is long: of many the first ones, and how
// many more there are.
func enumerate(causes []string) string {
	var b strings.Builder
	for i, cause := range causes {
		cause = shorten(strings.ReplaceAll(strings.TrimSpace(cause), "\n", "; "), maxCause)
		if b.Len()+len(cause) > maxReason-maxTail {
			fmt.Fprintf(&b, "; and %d more", len(causes)-i)
			break
		}
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(cause)
	}
	return b.String()
}

// shorten cuts a text off after at most so many bytes.
func shorten(text string, most int) string {
	const cut = "..."
	if len(text) <= most {
		return text
	}
	end := most - len(cut)
	for !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + cut
}

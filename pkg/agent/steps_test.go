package agent

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// A controller that fails keeps no other from its work, and is named for as long as it fails.
func TestStepsAreTakenWhateverBecomesOfTheOthers(t *testing.T) {
	log := &bytes.Buffer{}
	var order []string
	fails := map[string]error{}
	l := &loop{
		node:  &node{complaints: newComplaints(slog.New(slog.NewTextHandler(log, nil)))},
		state: state{known: true, view: &view{}, plan: plan.Result{}},
	}
	for _, s := range []struct {
		name string
		when occasion
	}{{"first/a", onPass}, {"second/b", onPass | onNodes}, {"first/c", onPass}, {"third/d", onTick}} {
		controller, _, _ := strings.Cut(s.name, "/")
		l.steps = append(l.steps, step{controller, s.when, func(*state) error {
			order = append(order, s.name)
			return fails[s.name]
		}})
	}
	l.errs = make([]error, len(l.steps))
	take := func(when occasion, want string, well bool, obstacle string) {
		t.Helper()
		order, l.next = nil, resync
		if got := l.doSteps(t.Context(), when); got != well || fmt.Sprint(order) != want {
			t.Errorf("taken %v, all well: %v; want %s, %v", order, got, want, well)
		}
		if again := l.next; (again == resync) != well || !well && again != retry {
			t.Errorf("looked again after %v", again)
		}
		if got := l.obstacle(); got != obstacle {
			t.Errorf("not ready because of %q, want %q", got, obstacle)
		}
	}
	const all = "[first/a second/b first/c]"
	take(onPass, all, true, "")
	fails["first/a"], fails["first/c"], fails["second/b"] = hinder(errors.New("no a")), hinder(errors.New("no c")), hinder(errors.New("no b"))
	take(onPass, all, false, "first: no a; first: no c; second: no b")
	delete(fails, "second/b")
	take(onNodes, "[second/b]", true, "first: no a; first: no c") // what was not tried again still holds
	fails["third/d"] = errors.New("no d")
	take(onTick, "[third/d]", false, "first: no a; first: no c") // it degrades the node
	take(onPass, all, false, "first: no a; first: no c")
	for about, want := range map[string]int{"first/pass error": 1, "second/pass error": 1, "third/pass error": 1} {
		if got := strings.Count(log.String(), "about="+about); got != want {
			t.Errorf("%s is logged %d times, want %d:\n%s", about, got, want, log)
		}
	}
	clear(fails)
	take(onPass, all, true, "")
	l.next = resync
	if l.lookAgain(time.Hour); l.next != resync {
		t.Errorf("the next look is put off to %v", l.next)
	}
}

package agent

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

func quietLog(level slog.Level) (*slog.Logger, *quiet, *bytes.Buffer) {
	out := &bytes.Buffer{}
	q := newQuiet(slog.NewTextHandler(out, &slog.HandlerOptions{Level: level}))
	return slog.New(q), q, out
}

// What repeats itself for ever costs a line each minute, and what comes up beside it is told.
func TestRepetitionsAreSummedUp(t *testing.T) {
	log, q, out := quietLog(slog.LevelInfo)
	start := time.Now()
	lines := func() int { n := strings.Count(out.String(), "\n"); out.Reset(); return n }
	for minute := range 10 {
		for i := range 100 {
			log.Info("sysctl set", "name", "ip_forward", "try", i)
			log.Error("problem, trying again", "about", "files/pass", "try", i)
			log.Error("problem, trying again", "about", "cluster/pass", "try", i)
		}
		if minute == 0 {
			if got := lines(); got != 3*mostLines {
				t.Errorf("at first: %d lines", got)
			}
		}
		q.kinds.sumUp(start.Add(time.Duration(minute)*summaryInterval+summaryInterval/2), false)
		if minute == 0 && out.Len() != 0 {
			t.Errorf("summed up before the minute was over: %s", out)
		}
		q.kinds.sumUp(start.Add(time.Duration(minute+1)*summaryInterval+time.Second), false)
		said := out.String()
		if got := lines(); got != 3 || strings.Count(said, "repeated=") != 3 || strings.Count(said, "try=99") != 3 {
			t.Errorf("minute %d: %d lines, want one of each kind, with the last: %s", minute, got, said)
		}
	}
	log.Warn("not ready")
	if got := lines(); got != 1 {
		t.Errorf("another message: %d lines", got)
	}
	q.kinds.sumUp(time.Now().Add(20*summaryInterval), false) // what was held back
	lines()
	q.kinds.sumUp(time.Now().Add(40*summaryInterval), false)
	if got := lines(); got != 0 || len(q.kinds.lines) != 0 {
		t.Errorf("when all is calm: %d lines, %d kinds are kept", got, len(q.kinds.lines))
	}
	log.Info("sysctl set")
	if got := lines(); got != 1 {
		t.Errorf("again after a calm interval: %d lines", got)
	}
}

// What is held back is told when the agent ends, by the logger that would have.
func TestHeldLinesAreToldAtTheEnd(t *testing.T) {
	log, q, out := quietLog(slog.LevelInfo)
	for range mostLines + 3 {
		log.With("from", "here").WithGroup("g").Info("again", "a", 1)
	}
	out.Reset()
	q.kinds.sumUp(time.Now(), true)
	if got := out.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "msg=again from=here g.repeated=3") || !strings.Contains(got, "g.a=1") {
		t.Errorf("told %q", got)
	}
}

func TestDebugHasEveryLine(t *testing.T) {
	log, q, out := quietLog(slog.LevelDebug)
	for range 100 {
		log.Info("again")
	}
	if q.kinds.sumUp(time.Now(), true); strings.Count(out.String(), "\n") != 100 {
		t.Errorf("%d lines", strings.Count(out.String(), "\n"))
	}
}

// client-go speaks through klog, through handlers of errors and panics, and of warnings of the API server.
func TestClientGoIsHeard(t *testing.T) {
	log, _, out := quietLog(slog.LevelInfo)
	klog.SetSlogLogger(slog.New(clientGo{log.Handler()}))
	defer klog.SetLogger(klog.Logger{})
	expect := func(want ...string) {
		t.Helper()
		for _, text := range want {
			if !strings.Contains(out.String(), text) {
				t.Errorf("the log lacks %q: %s", text, out)
			}
		}
		if n := strings.Count(out.String(), "\n"); n != min(1, len(want)) {
			t.Errorf("%d lines: %s", n, out)
		}
		out.Reset()
	}
	klog.Background().Info("Warning: watch ended with error", "err", "too old")
	expect("level=WARN", "watch ended with error", "too old", "from=client-go")
	klog.Warning("throttled")
	expect("level=WARN", "throttled")
	klog.Background().V(2).Info("Caches populated")
	expect()
	utilruntime.HandleError(errors.New("can't decode"))
	expect("level=ERROR", "can't decode")
	utilruntime.HandleErrorWithContext(t.Context(), errors.New("refused"), "Failed to watch") // the source has told it
	expect()
	rest.WarningLogger{}.HandleWarningHeader(299, "", "v1 is deprecated")
	expect("level=WARN", "v1 is deprecated")
	func() {
		defer func() { _ = recover() }()
		defer utilruntime.HandleCrash()
		panic("a bug")
	}()
	expect("level=ERROR", "a bug", "TestClientGoIsHeard")
}

package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

func TestSoakOptions(t *testing.T) {
	for _, args := range []string{
		"--for 0s", "--nodes 1", "--nodes 5001", "--pods 251", "--pods 0", "--pod-changes -1", "--route-changes 2000", "--routes -1", "--api-losses 11", "x",
	} {
		if status, _, stderr := bench(t, true, append([]string{"soak"}, strings.Fields(args)...)...); status != misuse {
			t.Errorf("soak %s: status %d, %s", args, status, stderr)
		}
	}
}

// A machine that could not keep up has not shown what an agent bears.
func TestRateThatWasNotReached(t *testing.T) {
	for _, tt := range []struct {
		asked float64
		times int64
		want  string
	}{
		{2, 120, "2"}, {2, 109, "2"}, {2, 60, "1 (asked for: 2)"}, {100, 2_000, "33 (asked for: 100)"}, {2, 0, "0 (asked for: 2)"}, {0, 0, "0"},
		{0.001, 0, "0 (asked for: 0.001)"},
	} {
		if got := rate(tt.asked, tt.times, time.Minute); got != tt.want {
			t.Errorf("%d times a minute, %g a second asked for: %q, want %q", tt.times, tt.asked, got, tt.want)
		}
	}
}

// A soak, as small as can be: pods and routes change, the API server is lost once, and at its end, also before its time, the directory says what the agent took.
func TestSoak(t *testing.T) {
	priv.Require(t)
	for name, interrupted := range map[string]bool{"to its end": false, "interrupted": true} {
		t.Run(name, func(t *testing.T) {
			out := t.TempDir()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			length := "3s"
			if interrupted {
				length = "1h"
				go func() {
					defer cancel()
					for limit := time.After(time.Minute); ; time.Sleep(50 * time.Millisecond) {
						if log, _ := os.ReadFile(filepath.Join(out, "agent.log")); bytes.Contains(log, []byte("msg=ready")) {
							time.Sleep(afterStart + time.Second)
							return
						}
						select {
						case <-limit:
							return
						default:
						}
					}
				}()
			}
			var stdout, stderr bytes.Buffer
			status := execute(ctx, env{stdout: &stdout, stderr: &stderr, root: true, args: []string{
				"soak", "--for", length, "--nodes", "20", "--pods", "3", "--pod-changes", "5", "--route-changes", "50", "--routes", "5", "--addresses", "5", "--api-losses", "1", "--out", out,
			}})
			if (status == fine) == interrupted {
				t.Errorf("status %d: %s", status, &stderr)
			}
			summary, err := os.ReadFile(filepath.Join(out, "summary.txt"))
			if err != nil || string(summary) != stdout.String() || !strings.Contains(string(summary), ", failed 0\n") || !strings.Contains(string(summary), " a second (") || !interrupted && strings.Contains(string(summary), "pods changed 0,") {
				t.Errorf("the summary: %v\n%s%s", err, summary, &stderr)
			}
			events, err := os.ReadFile(filepath.Join(out, "events.log"))
			if lost := bytes.Count(events, []byte("is lost")); err != nil || lost != bytes.Count(events, []byte("is back")) || !interrupted && lost != 1 {
				t.Errorf("the events: %v\n%s", err, events)
			}
			if log, err := os.ReadFile(filepath.Join(out, "agent.log")); err != nil || len(log) == 0 {
				t.Errorf("the agent's log: %v, %d bytes", err, len(log))
			}
			for _, dir := range []string{"metrics", "status"} {
				if _, err := os.Stat(filepath.Join(out, dir)); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

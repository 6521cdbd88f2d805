package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/load"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

func bench(t *testing.T, root bool, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	status = execute(t.Context(), env{args: args, stdout: &out, stderr: &err, root: root})
	return status, out.String(), err.String()
}

func TestUsage(t *testing.T) {
	dir := t.TempDir()
	other := filepath.Join(dir, "other.json")
	if err := os.WriteFile(other, []byte(`{"schema": 99}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args   []string
		status int
		want   string
	}{
		"unknown mode":     {[]string{"--modes", "flannel"}, misuse, `unknown mode "flannel"; there are: direct, ebpf`},
		"unknown workload": {[]string{"--workloads", "x"}, misuse, `unknown workload "x"`},
		"unknown profile":  {[]string{"--profile", "x"}, misuse, `unknown profile "x"; there are: quick, full`},
		"unknown command":  {[]string{"x"}, misuse, `got 1 arguments ["x"]`},
		"unknown flag":     {[]string{"--x"}, misuse, "unknown flag: --x"},
		"not root":         {nil, failed, "needs root"},
		"report of none":   {[]string{"report"}, misuse, "want one file"},
		"missing file":     {[]string{"report", filepath.Join(dir, "x.json")}, failed, "x.json does not exist"},
		"cluster, no root": {[]string{"cluster"}, failed, "needs root"},
		"another schema":   {[]string{"compare", other, other}, failed, "schema version 99"},
	} {
		t.Run(name, func(t *testing.T) {
			status, stdout, stderr := bench(t, false, c.args...)
			if status != c.status || !strings.Contains(stderr, c.want) || stdout != "" {
				t.Errorf("status %d, want %d; stdout %q; stderr %q, want %q", status, c.status, stdout, stderr, c.want)
			}
		})
	}
}

// What keeps a run from being made, or from being published, is said before it.
func TestRefusedBeforeTheRun(t *testing.T) {
	status, _, stderr := bench(t, true, "--profile", "full", "--rounds", "1", "--modes", "direct", "--publish", t.TempDir())
	if status != failed || !strings.Contains(stderr, "it is a short one") {
		t.Errorf("status %d: %s", status, stderr)
	}
	t.Setenv("PATH", t.TempDir())
	if status, _, stderr = bench(t, true, "--modes", result.IPTables); status != failed || !strings.Contains(stderr, "mode iptables needs iptables") {
		t.Errorf("status %d, %s", status, stderr)
	}
}

func TestCompareStatus(t *testing.T) {
	write := func(rate float64) string {
		run := result.Run{Schema: result.Schema, Rounds: 5, Workloads: []string{"udp64"}, Modes: []string{"ebpf"}}
		for round := 1; round <= 5; round++ {
			run.Samples = append(run.Samples, result.Sample{Workload: "udp64", Path: result.SameNode, Mode: "ebpf", Round: round,
				Values: map[string]float64{result.Rate: rate + float64(round)}})
		}
		file := filepath.Join(t.TempDir(), "bench.json")
		if err := run.Write(file); err != nil {
			t.Fatal(err)
		}
		return file
	}
	fast, slow := write(1000), write(800)
	for name, c := range map[string]struct {
		before, after string
		status        int
		want          string
	}{"slower": {fast, slow, failed, "regression"}, "the same": {fast, fast, fine, "1 row of 1 without"}, "faster": {slow, fast, fine, "better"}} {
		if status, out, stderr := bench(t, false, "compare", c.before, c.after); status != c.status || !strings.Contains(out, c.want) {
			t.Errorf("%s: status %d\n%s%s", name, status, out, stderr)
		}
	}
}

// A whole run, as small as can be. How fast anything is, is not looked at: the machine does other things while tests run.
func TestRun(t *testing.T) {
	priv.Require(t)
	p := quick()
	p.rounds, p.duration, p.warmup, p.pods = 1, 100*time.Millisecond, 20*time.Millisecond, 2
	var stdout, stderr bytes.Buffer
	out := t.TempDir()
	// An error is one of samples, at which is looked below.
	_ = measure(t.Context(), env{stdout: &stdout, stderr: &stderr, root: true}, p,
		options{out: out, modes: []string{result.Direct, result.EBPF}, workloads: []string{"udp64", "cni"}})
	run, err := result.Read(filepath.Join(out, "bench.json"))
	if err != nil {
		t.Fatalf("%v\n%s", err, &stderr)
	}
	if len(run.Samples) != 2*3+1 || run.Rounds != 1 || run.Interrupted != "" || !run.Indicative {
		t.Errorf("%d samples, %d rounds, interrupted %q, indicative %v\n%s", len(run.Samples), run.Rounds, run.Interrupted, run.Indicative, &stderr)
	}
	for _, s := range run.Samples {
		// The one excuse that a sample has on a machine that is busy with other tests. Nothing disturbs pods.
		if s.Error != "" && (s.Workload == "cni" || !strings.Contains(s.Error, load.ErrNotMeasured.Error())) {
			t.Errorf("%s, %s, %s: %s", s.Workload, s.Path, s.Mode, s.Error)
		}
	}
	if e := run.Environment; e.Versions["ebpf-agent"] == "" || e.Versions["ebpf-cni"] == "" {
		t.Errorf("what was measured was built from: %v", e.Versions)
	}
	document := filepath.Join(out, "bench.md")
	if text, err := os.ReadFile(document); err != nil || !bytes.Contains(text, []byte("Indicative")) || !strings.Contains(stdout.String(), document) {
		t.Errorf("the report: %v; stdout %q", err, &stdout)
	}
	// A lab has a lock for as long as it is not closed, and closing it looks whether anything is left.
	fds, _ := filepath.Glob("/proc/self/fd/*")
	for _, fd := range fds {
		if file, err := os.Readlink(fd); err == nil && strings.HasPrefix(file, "/run/ebpf-cni-lab/") {
			t.Errorf("%s is still locked", file)
		}
	}
}

// What measures less than the full profile is not judged, whatever it is called.
func TestIndicative(t *testing.T) {
	more, fewer := full(), full()
	more.rounds, fewer.rounds = 9, full().rounds-1
	if full().indicative() || more.indicative() || !fewer.indicative() || !quick().indicative() {
		t.Error("a full run is judged, also one of more rounds; of fewer, and a quick one, none is")
	}
}

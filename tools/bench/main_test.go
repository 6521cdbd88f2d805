package main

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/load"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/report"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == load.WorkerCommand {
		os.Exit(load.Worker())
	}
	os.Exit(m.Run())
}

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
		"unknown workload": {[]string{"run", "--workloads", "x"}, misuse, `unknown workload "x"`},
		"unknown profile":  {[]string{"--profile", "x"}, misuse, `unknown profile "x"; there are: quick, full`},
		"unknown command":  {[]string{"x"}, misuse, `unexpected argument "x"`},
		"unknown flag":     {[]string{"--x"}, misuse, "unknown flag: --x"},
		"not root":         {nil, failed, "needs root"},
		"report of none":   {[]string{"report"}, misuse, "want one file"},
		"missing file":     {[]string{"report", filepath.Join(dir, "x.json")}, failed, "x.json does not exist"},
		"headline alone":   {[]string{"report", other, "--headline", "x"}, misuse, "--headline takes --into"},
		"odd rounds":       {[]string{"cluster", "--rounds", "5"}, misuse, "--rounds 5: want an even number"},
		"not a cluster's":  {[]string{"cluster", "--workloads", "udp64"}, misuse, `unknown workload "udp64"; there are: first-packet, burst`},
		"cluster, no root": {[]string{"cluster"}, failed, "needs root, for clusters' namespaces"},
		"cluster, no into": {[]string{"cluster", "--headline", "x"}, misuse, "--headline takes --into"},
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

func TestMissingProgram(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	status, _, stderr := bench(t, true, "--modes", modes.IPTables)
	if status != failed || !strings.Contains(stderr, "mode iptables needs iptables") {
		t.Errorf("status %d, %s", status, stderr)
	}
}

func TestCompareStatus(t *testing.T) {
	write := func(rate float64) string {
		run := result.Run{Schema: result.Schema, Rounds: 5, Workloads: []string{"udp64"}, Modes: []result.Mode{{Name: "ebpf"}}}
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
	if status, out, _ := bench(t, false, "compare", fast, slow); status != failed || !strings.Contains(out, "regression") {
		t.Errorf("slower: status %d\n%s", status, out)
	}
	if status, out, stderr := bench(t, false, "compare", fast, fast); status != fine {
		t.Errorf("the same: status %d\n%s%s", status, out, stderr)
	}
	if status, out, _ := bench(t, false, "compare", slow, fast); status != fine || !strings.Contains(out, "better") {
		t.Errorf("faster: status %d\n%s", status, out)
	}
}

// A whole run, as small as can be. How fast anything is, is not looked at: the machine does other things while tests run.
func TestRun(t *testing.T) {
	prepare(t)
	out := t.TempDir()
	started := time.Now()
	_, stdout, stderr := bench(t, true, "run", "--modes", "direct,ebpf,iptables", "--workloads", "udp64,rr,cni", "--rounds", "1",
		"--duration", "100ms", "--warmup", "20ms", "--out", out)
	if took := time.Since(started); took > lab.Patience(60*time.Second) {
		t.Errorf("took %s", took)
	}
	run, err := result.Read(filepath.Join(out, "bench.json"))
	if err != nil {
		t.Fatalf("%v\n%s", err, stderr)
	}
	// Three paths of udp64 and one of rr in three modes, and two modes with plugins.
	if len(run.Samples) != 3*3+3+2 || run.Rounds != 1 || run.Interrupted != "" || !run.Indicative {
		t.Errorf("%d samples, %d rounds, interrupted %q, indicative %v\n%s", len(run.Samples), run.Rounds, run.Interrupted, run.Indicative, stderr)
	}
	measured := map[string]bool{}
	for _, s := range run.Samples {
		measured[s.Workload] = measured[s.Workload] || s.Error == ""
		// The one excuse that a sample has on a machine that is busy with other tests.
		if s.Error != "" && !strings.Contains(s.Error, load.ErrNotMeasured.Error()) {
			t.Errorf("%s, %s, %s: %s", s.Workload, s.Path, s.Mode, s.Error)
		}
		w, _ := result.Find(s.Workload)
		if v := s.Values[w.Metrics[0].Name]; s.Error == "" && v <= 0 {
			t.Errorf("%s, %s, %s: %s is %g", s.Workload, s.Path, s.Mode, w.Metrics[0].Name, v)
		}
	}
	// Nothing disturbs this one.
	if !measured["cni"] {
		t.Errorf("measured is only %v\n%s", measured, stderr)
	}
	for name, forwards := range map[string]string{modes.Direct: "0", modes.EBPF: "1", modes.IPTables: "1"} {
		if m, _ := run.Mode(name); m.Sysctls["net.ipv4.ip_forward"] != forwards {
			t.Errorf("the nodes of %s are said to have %v", m.Name, m.Sysctls)
		}
	}
	if e := run.Environment; e.Versions["ebpf-agent"] == "" || !strings.Contains(e.Versions["bridge"], "containernetworking/plugins v1.") {
		t.Errorf("what was measured was built from: %v", e.Versions)
	}
	document := report.Beside(filepath.Join(out, "bench.json")).Document
	if text, err := os.ReadFile(document); err != nil || !bytes.Contains(text, []byte("Indicative")) || !strings.Contains(stdout, document) {
		t.Errorf("the report: %v; stdout %q", err, stdout)
	}
	if open := openLocks(t); len(open) > 0 {
		t.Errorf("labs were not closed: %v", open)
	}
}

// prepare builds the upstream plugins, which takes a new machine longer than the run that uses them.
func prepare(t *testing.T) {
	t.Helper()
	priv.Require(t)
	m, err := newMachine(t.Context(), plan{modes: []string{modes.IPTables}}, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err == nil {
		err = m.close()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// What measures less than the full profile is not judged, whatever it is called.
func TestIndicative(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*profile)
		want   bool
	}{
		"full":            {func(*profile) {}, false},
		"more than full":  {func(p *profile) { p.rounds, p.duration = 9, 2*p.duration }, false},
		"fewer rounds":    {func(p *profile) { p.rounds-- }, true},
		"shorter samples": {func(p *profile) { p.duration /= 2 }, true},
		"shorter warm-up": {func(p *profile) { p.warmup /= 2 }, true},
	} {
		t.Run(name, func(t *testing.T) {
			p := full()
			c.change(&p)
			if got := indicative(p); got != c.want {
				t.Errorf("indicative: %v", got)
			}
		})
	}
	if !indicative(quick()) {
		t.Error("the quick profile is judged")
	}
}

// A run that takes longer than promised says so; one that was told to take longer does not.
func TestLate(t *testing.T) {
	longer := quick()
	longer.rounds++
	for name, c := range map[string]struct {
		p    profile
		took time.Duration
		want bool
	}{
		"quick": {quick(), 9 * time.Minute, false}, "slow": {quick(), 11 * time.Minute, true}, "full": {full(), 25 * time.Minute, false},
		"slow full": {full(), 31 * time.Minute, true}, "longer": {longer, 15 * time.Minute, false},
	} {
		if got := late(c.p, c.took); (len(got) == 1) != c.want {
			t.Errorf("%s: %q", name, got)
		}
	}
}

// openLocks are the locks that this process holds: a lab has one for as long as it is not closed, and closing it looks whether
// anything is left.
func openLocks(t *testing.T) (locks []string) {
	t.Helper()
	fds, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if file, err := os.Readlink(fd); err == nil && strings.HasPrefix(file, "/run/ebpf-cni-lab/") {
			locks = append(locks, file)
		}
	}
	return locks
}

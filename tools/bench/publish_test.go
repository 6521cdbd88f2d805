package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// whole is a run that leaves nothing out, as far as its head tells.
func whole() *result.Run {
	run := &result.Run{Schema: result.Schema, Profile: "full", Rounds: 5, Workloads: workloadNames()}
	for _, name := range modes.Names() {
		run.Modes = append(run.Modes, result.Mode{Name: name, Missing: modes.Missing(name)})
	}
	for round := 1; round <= 5; round++ {
		run.Samples = append(run.Samples, result.Sample{Workload: "cni", Mode: modes.EBPF, Round: round,
			Values: map[string]float64{"pair-p50": 0.01}, Distributions: map[string]result.Distribution{"add": {{Seconds: 0.01, Count: 20}}}})
	}
	return run
}

// The project's documents show whole runs, and nothing of any other.
func TestPublish(t *testing.T) {
	const empty = "<!-- bench:begin -->\n<!-- bench:end -->\n"
	for name, c := range map[string]struct {
		change func(*result.Run)
		why    string
	}{
		"whole":       {func(*result.Run) {}, ""},
		"short":       {func(r *result.Run) { r.Indicative = true }, "it is a short one"},
		"interrupted": {func(r *result.Run) { r.Interrupted = "got interrupt" }, "it was interrupted: got interrupt"},
		"changed":     {func(r *result.Run) { r.Environment.Dirty = true }, "the checkout has changes that no commit has"},
		"partial":     {func(r *result.Run) { r.Modes, r.Workloads = r.Modes[1:], r.Workloads[:1] }, "it leaves out direct, udp1400, tcp1"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file, into, readme := filepath.Join(dir, "bench.json"), filepath.Join(dir, "BENCHMARKS.md"), filepath.Join(dir, "README.md")
			run := whole()
			run.Environment.Warnings = []string{"ebpf-cni was built from somewhere else"}
			c.change(run)
			if err := run.Write(file); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(readme, []byte(empty), 0o600); err != nil {
				t.Fatal(err)
			}
			status, stdout, stderr := bench(t, false, "report", file, "--into", into, "--headline", readme)
			if c.why != "" {
				_, err := os.Stat(into)
				if text, _ := os.ReadFile(readme); status != failed || !strings.Contains(stderr, c.why) || err == nil || string(text) != empty {
					t.Errorf("status %d, %q, want %q; the documents: %v, %s", status, stderr, c.why, err, text)
				}
				return
			}
			if status != fine || !strings.Contains(stderr, "published with a warning: ebpf-cni was built") {
				t.Errorf("status %d: %s", status, stderr)
			}
			for file, want := range map[string]string{into: "](tools/bench/plots/cni-add.svg)", readme: "| CNI, one pod at a time: ADD + DEL p50 | "} {
				if text, err := os.ReadFile(file); err != nil || !strings.Contains(string(text), want) || !strings.Contains(stdout, file) {
					t.Errorf("%s: %v, no %q\n%s", file, err, want, text)
				}
			}
		})
	}
}

// What can't be published is said before it is measured, not half an hour later.
func TestPublicationIsRefusedBeforeTheRun(t *testing.T) {
	into := filepath.Join(t.TempDir(), "BENCHMARKS.md")
	status, _, stderr := bench(t, false, "--profile", "full", "--rounds", "1", "--into", into)
	if status != failed || !strings.Contains(stderr, "it is a short one") {
		t.Errorf("status %d: %s", status, stderr)
	}
}

// Programs of another commit, or of none, are told of.
func TestStrangers(t *testing.T) {
	for built, warned := range map[string]bool{"": false, "abc": false, "abc, with changes": true, "def": true, "ebpf-cni (devel)": true} {
		got := strangers(result.Environment{Commit: "abc", Versions: map[string]string{"ebpf-agent": built, "bridge": "v1"}})
		if (len(got) == 1) != warned || warned && !strings.Contains(got[0], "ebpf-agent was built from "+built) {
			t.Errorf("built from %q: %q", built, got)
		}
	}
}

func TestReplacedPrograms(t *testing.T) {
	dir := t.TempDir()
	names := []string{filepath.Join(dir, "ebpf-agent"), filepath.Join(dir, "ebpf-cni"), filepath.Join(dir, "portmap")}
	for _, name := range names {
		if err := os.WriteFile(name, []byte("first"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	before := contents(names)
	if got := changed(before, contents(names)); len(got) > 0 {
		t.Errorf("nothing was replaced: %q", got)
	}
	if err := os.WriteFile(names[0], []byte("other"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(names[2]); err != nil {
		t.Fatal(err)
	}
	got := changed(before, contents(names))
	if len(got) != 2 || !slices.IsSorted(got) || !strings.HasPrefix(got[0], "ebpf-agent was replaced") || !strings.HasPrefix(got[1], "portmap was") {
		t.Errorf("%q", got)
	}
}

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// whole is a run that leaves nothing out, as far as its head tells.
func whole(profile string) *result.Run {
	run := &result.Run{Schema: result.Schema, Profile: profile, Rounds: 5, Modes: result.Modes(), Workloads: result.Names(profile == result.ClusterProfile)}
	run.Environment.Versions = map[string]string{"kubernetes": "v1.36.3"}
	for round := 1; round <= 5; round++ {
		run.Samples = append(run.Samples,
			result.Sample{Workload: "cni", Mode: result.EBPF, Round: round, Values: map[string]float64{"pair-p50": 0.01, "add-p50": 0.005, "del-p50": 0.005}},
			result.Sample{Workload: "udp64", Path: result.AcrossNodes, Mode: result.EBPF, Round: round, Values: map[string]float64{result.Rate: 450_000}},
			result.Sample{Workload: "udp64", Path: result.AcrossNodes, Mode: result.IPTables, Round: round, Values: map[string]float64{result.Rate: 300_000}},
			result.Sample{Workload: result.Image, Mode: result.KubeProxy, Round: round, Values: map[string]float64{"compressed": 18 << 20}})
	}
	return run
}

// The project's documents show whole runs, each in its own places, and nothing of any other.
func TestPublish(t *testing.T) {
	const places = "# Title\n<!-- bench:begin -->\n<!-- bench:end -->\nkept\n<!-- bench-cluster:begin -->\n<!-- bench-cluster:end -->\n"
	for name, c := range map[string]struct {
		profile string
		change  func(*result.Run)
		why     string
	}{
		"whole":          {"full", func(*result.Run) {}, ""},
		"whole, cluster": {result.ClusterProfile, func(*result.Run) {}, ""},
		"short":          {"full", func(r *result.Run) { r.Indicative = true }, "it is a short one"},
		"interrupted":    {"full", func(r *result.Run) { r.Interrupted = "got interrupt" }, "it was interrupted: got interrupt"},
		"changed":        {"full", func(r *result.Run) { r.Environment.Dirty = true }, "the checkout has changes that no commit has"},
		"partial":        {"full", func(r *result.Run) { r.Modes, r.Workloads = r.Modes[1:], r.Workloads[:1] }, "it leaves out direct, tcp1, rr"},
		"part, cluster":  {result.ClusterProfile, func(r *result.Run) { r.Workloads = r.Workloads[1:] }, "it leaves out first-packet"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "bench.json")
			run := whole(c.profile)
			run.Environment.Warnings = []string{"ebpf-cni was built from somewhere else"}
			c.change(run)
			if err := run.Write(file); err != nil {
				t.Fatal(err)
			}
			if err := os.MkdirAll(filepath.Join(dir, "tools/bench/results"), 0o755); err != nil {
				t.Fatal(err)
			}
			read := func(name string) string {
				text, _ := os.ReadFile(filepath.Join(dir, name))
				return string(text)
			}
			for _, name := range []string{"BENCHMARKS.md", "README.md"} {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(places), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			status, _, stderr := bench(t, false, "report", file, "--publish", dir)
			if c.why != "" {
				if status != failed || !strings.Contains(stderr, c.why) || read("BENCHMARKS.md") != places || read("README.md") != places {
					t.Errorf("status %d, %q, want %q; the documents:\n%s\n%s", status, stderr, c.why, read("BENCHMARKS.md"), read("README.md"))
				}
				return
			}
			if status != fine || !strings.Contains(stderr, "published with a warning: ebpf-cni was built") {
				t.Errorf("status %d: %s", status, stderr)
			}
			wants := map[string]string{
				"BENCHMARKS.md": "](tools/bench/plots/cni.svg)", "README.md": "| UDP, 64 bytes, across nodes | ", "tools/bench/results/networks.md": "## CNI, one pod at a time\n",
				"tools/bench/plots/cni.svg": "</svg>",
			}
			if c.profile == result.ClusterProfile {
				wants = map[string]string{"BENCHMARKS.md": "5000 Node objects", "README.md": "The image is 18.0 MiB.", "tools/bench/results/cluster.md": "## Image\n"}
			}
			for name, want := range wants {
				text := read(name)
				if !strings.Contains(text, want) || strings.HasSuffix(name, "S.md") && (!strings.Contains(text, "\nkept\n") || strings.Count(text, ":begin -->") != 2) {
					t.Errorf("%s has no %q:\n%s", name, want, text)
				}
			}
		})
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
	run := result.Run{Environment: result.Environment{Versions: map[string]string{}}}
	told := record(&run, names)
	run.Environment.Warnings = nil // of what these files were built from
	if told(); len(run.Environment.Warnings) > 0 {
		t.Errorf("nothing was replaced: %q", run.Environment.Warnings)
	}
	if err := os.WriteFile(names[0], []byte("other"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(names[2]); err != nil {
		t.Fatal(err)
	}
	told()
	if got := run.Environment.Warnings; len(got) != 2 || !strings.HasPrefix(got[0], "ebpf-agent was replaced") || !strings.HasPrefix(got[1], "portmap was") {
		t.Errorf("%q", got)
	}
}

package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// said is what test/cluster/measure prints.
const said = `{"versions":{"kubernetes":"v1.36.3","runc":"1.1"}}
{"workload":"first-packet","mode":"iptables","round":2,"started":"2026-11-21T11:07:10Z","durations":{"delay":[0.5,0.25,0.75]}}
{"workload":"rollout","path":"egress","mode":"ebpf+kube-proxy","round":1,"started":"2026-11-21T11:08:57Z","values":{"lost":0,"sent":11566}}
{"workload":"agent-cluster","mode":"ebpf+kube-proxy","point":5000,"round":3,"started":"2026-11-21T11:09:12Z","values":{"memory":59252736}}
`

func TestLines(t *testing.T) {
	at := func(clock string) time.Time {
		moment, err := time.Parse(time.DateTime, "2026-11-21 "+clock)
		if err != nil {
			t.Fatal(err)
		}
		return moment
	}
	run, saved := &result.Run{Environment: result.Environment{Versions: map[string]string{"go": "1"}}}, 0
	into := lines{run: run, save: func() error { saved++; return nil }}
	if err := into.read(strings.NewReader(said)); err != nil {
		t.Fatal(err)
	}
	want := []result.Sample{
		{Workload: result.FirstPacket, Mode: "iptables", Round: 2, Started: at("11:07:10"), Values: map[string]float64{result.P50: 0.5},
			Distributions: map[string]result.Distribution{"delay": {{Seconds: 0.25, Count: 1}, {Seconds: 0.5, Count: 1}, {Seconds: 0.75, Count: 1}}}},
		{Workload: result.Rollout, Path: result.Egress, Mode: "ebpf+kube-proxy", Round: 1, Started: at("11:08:57"), Values: map[string]float64{"lost": 0, "sent": 11566}},
		{Workload: result.AgentCluster, Mode: "ebpf+kube-proxy", Point: 5000, Round: 3, Started: at("11:09:12"), Values: map[string]float64{"memory": 59252736}},
	}
	if diff := cmp.Diff(want, run.Samples); diff != "" {
		t.Error(diff)
	}
	if saved != len(want) || !run.Finished.After(want[0].Started) {
		t.Errorf("saved %d times, finished %s", saved, run.Finished)
	}
	if diff := cmp.Diff(map[string]string{"go": "1", "kubernetes": "v1.36.3", "runc": "1.1"}, run.Environment.Versions); diff != "" {
		t.Error(diff)
	}
}

// What the two modules do not agree on is an error, and no figure of something else.
func TestLinesThatMeanNothing(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"no JSON":          {"building kubelet\n", "invalid character"},
		"another workload": {`{"workload":"x","mode":"m","round":1,"values":{"lost":0}}`, `no workload "x"`},
		"another value":    {`{"workload":"rollout","mode":"m","round":1,"values":{"found":1}}`, `a sample of rollout has "found" at 1`},
		"a negative value": {`{"workload":"rollout","mode":"m","round":1,"values":{"lost":-1}}`, `a sample of rollout has "lost" at -1`},
		"no mode":          {`{"workload":"rollout","round":1,"values":{"lost":1}}`, "without mode"},
		"no round":         {`{"workload":"rollout","mode":"m","values":{"lost":1}}`, "without mode, round"},
		"no values":        {`{"workload":"rollout","mode":"m","round":1}`, "without mode, round or values"},
		"other durations":  {`{"workload":"first-packet","mode":"m","round":1,"durations":{"x":[1]}}`, `1 durations "x"`},
		"no durations":     {`{"workload":"first-packet","mode":"m","round":1,"durations":{"delay":[]}}`, `0 durations "delay"`},
	} {
		t.Run(name, func(t *testing.T) {
			run := &result.Run{}
			err := lines{run: run, save: func() error { return nil }}.read(strings.NewReader(c.text))
			if err == nil || !strings.Contains(err.Error(), c.want) || len(run.Samples) > 0 {
				t.Errorf("%v, want %q; %d samples", err, c.want, len(run.Samples))
			}
		})
	}
}

func TestLinesThatCannotBeSaved(t *testing.T) {
	full := errors.New("no space left")
	into := lines{run: &result.Run{Environment: result.Environment{Versions: map[string]string{}}}, save: func() error { return full }}
	if err := into.read(strings.NewReader(said)); !errors.Is(err, full) {
		t.Error(err)
	}
}

// Every flag says less than the whole, or nothing does.
func TestShortClusterRuns(t *testing.T) {
	if wholeCluster().short() {
		t.Error("the whole is short")
	}
	for name, less := range map[string]func(*clusterOptions){
		"rounds": func(o *clusterOptions) { o.rounds-- }, "pods": func(o *clusterOptions) { o.pods-- }, "burst": func(o *clusterOptions) { o.burst++ },
		"rollouts": func(o *clusterOptions) { o.rollouts-- }, "starts": func(o *clusterOptions) { o.starts-- }, "rest": func(o *clusterOptions) { o.rest-- },
		"nodes": func(o *clusterOptions) { o.nodes = []int{2, 500} },
	} {
		o := wholeCluster()
		less(&o)
		if !o.short() {
			t.Errorf("fewer %s are not short", name)
		}
	}
	if whole := wholeCluster(); whole.rounds*whole.pods < 100 {
		t.Errorf("%d pods have no p99", whole.rounds*whole.pods)
	}
	// A budget takes five rounds to be judged.
	if empty := (wholeCluster().starts + 1) / 2; empty < 5 {
		t.Errorf("%d starts with an empty map are too few", empty)
	}
}

// The two modules name the same things: what this one asks for, the other one measures.
func TestClusterArguments(t *testing.T) {
	got := strings.Join(wholeCluster().args(), " ")
	for _, want := range []string{
		"measure -only first-packet,burst,rollout,agent-cluster,image ", "-nodes 2,500,5000 ", "-rest 1m0s", "-rounds=6", "-pods=20", "-burst=10", "-rollouts=6", "-starts=10",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in %s", want, got)
		}
	}
	source, err := os.ReadFile("../../test/cluster/measure/measure.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range clusterWorkloads() {
		if !strings.Contains(string(source), `"`+name+`"`) {
			t.Errorf("test/cluster/measure knows no workload %q", name)
		}
	}
}

// A document gets a whole run's section only, whichever of its other sections there are.
func TestPublishCluster(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*result.Run)
		why    string
	}{
		"whole":       {func(*result.Run) {}, ""},
		"short":       {func(r *result.Run) { r.Indicative = true }, "it is a short one"},
		"interrupted": {func(r *result.Run) { r.Interrupted = "got interrupt" }, "it was interrupted: got interrupt"},
		"changed":     {func(r *result.Run) { r.Environment.Dirty = true }, "the checkout has changes that no commit has"},
		"partial":     {func(r *result.Run) { r.Workloads = r.Workloads[1:] }, "it leaves out first-packet; make bench-cluster DOCUMENT=BENCHMARKS.md"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file, into, readme := filepath.Join(dir, "bench.json"), filepath.Join(dir, "BENCHMARKS.md"), filepath.Join(dir, "README.md")
			run := &result.Run{Schema: result.Schema, Profile: result.ClusterProfile, Workloads: clusterWorkloads(), Rounds: 6}
			run.Environment.Versions = map[string]string{"kubernetes": "v1.36.3"}
			run.Samples = []result.Sample{{Workload: result.Image, Mode: "ebpf+kube-proxy", Round: 1, Values: map[string]float64{"compressed": 18 << 20, "unpacked": 45 << 20}}}
			c.change(run)
			if err := run.Write(file); err != nil {
				t.Fatal(err)
			}
			const before = "# Benchmarks\n\nof networks\n"
			const marks = "<!-- bench-cluster:begin -->\n<!-- bench-cluster:end -->\n"
			for name, text := range map[string]string{into: before, readme: marks} {
				if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			status, _, stderr := bench(t, false, "report", file, "--into", into, "--headline", readme)
			document, _ := os.ReadFile(into)
			headline, _ := os.ReadFile(readme)
			if c.why != "" {
				if status != failed || !strings.Contains(stderr, c.why) || string(document) != before || string(headline) != marks {
					t.Errorf("status %d, %q, want %q; the documents:\n%s\n%s", status, stderr, c.why, document, headline)
				}
				return
			}
			if status != fine || !strings.HasPrefix(string(document), before) || !strings.Contains(string(document), "\n### Image\n") ||
				!strings.Contains(string(headline), "The image is 18.0 MiB.") {
				t.Errorf("status %d: %s\n%s\n%s", status, stderr, document, headline)
			}
		})
	}
}

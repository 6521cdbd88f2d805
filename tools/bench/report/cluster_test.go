package report

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// clusterRun is a run on clusters whose samples differ by round only.
func clusterRun() *result.Run {
	started := time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC)
	run := &result.Run{
		Schema: result.Schema, Profile: result.ClusterProfile, Command: "bench cluster", Rounds: 6, Started: started, Finished: started.Add(9 * time.Minute),
		Workloads: []string{result.FirstPacket, result.Burst, result.Rollout, result.AgentCluster, result.Image},
		Modes:     []result.Mode{{Name: besideKubeProxy}, {Name: "iptables"}},
		Environment: result.Environment{
			Kernel: "6.18.0 x86_64", CPU: "Synthetic | 3000", Cores: 2, MemoryMB: 4096, Commit: "0123456789abcdef0123",
			Versions: map[string]string{"kubernetes": "v1.36.3", "containerd": "1.6.20", "runc": "1.1.5"}, Warnings: []string{"something else was running"},
		},
	}
	for round := 1; round <= 6; round++ {
		vary := 1 + float64(round)/1000
		add := func(workload, path, mode string, point int, values map[string]float64, delays ...float64) {
			s := result.Sample{Workload: workload, Path: path, Mode: mode, Point: point, Round: round, Started: started, Values: map[string]float64{}}
			for name, v := range values {
				s.Values[name] = v * vary
			}
			if delays != nil {
				s.Distributions = map[string]result.Distribution{"delay": result.Each(delays)}
			}
			run.Samples = append(run.Samples, s)
		}
		for mode, seconds := range map[string]float64{besideKubeProxy: 0.44, "iptables": 0.40} {
			var delays []float64
			for i := range 20 {
				delays = append(delays, seconds*vary+float64(i)/1000)
			}
			add(result.FirstPacket, "", mode, 0, map[string]float64{result.P50: seconds}, delays...)
			add(result.Burst, "", mode, 0, map[string]float64{"last": 2 * seconds})
		}
		for _, path := range result.Paths() {
			add(result.Rollout, path, besideKubeProxy, 0, map[string]float64{"lost": 0, "sent": 10000, "gap": 0.02, "took": 4})
		}
		for _, point := range []int{2, 5000} {
			memory := float64(40+point/100) * (1 << 20)
			add(result.AgentCluster, "", besideKubeProxy, point, map[string]float64{"memory": memory, "peak": memory, "maps": 80 << 20, "complete": 0.5, "again": 0.3})
			if round <= 2 {
				add(result.AgentCluster, "", besideKubeProxy, point, map[string]float64{"cpu": 0.3, "resting": memory / 2})
			}
		}
		if round == 1 {
			add(result.Image, "", besideKubeProxy, 0, map[string]float64{"compressed": 18 << 20, "unpacked": 45 << 20})
		}
	}
	return run
}

func TestClusterDocument(t *testing.T) {
	dir := t.TempDir()
	document, err := Write(clusterRun(), Beside(filepath.Join(dir, "bench.json")))
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	golden := filepath.Join("testdata", "cluster.md")
	if *update {
		if err := os.WriteFile(golden, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("(-want +got; go test -update writes it)\n%s", diff)
	}
	for _, plot := range []string{"first-packet.svg", "agent-cluster.svg"} {
		svg, err := os.ReadFile(filepath.Join(dir, "plots", plot))
		if err != nil || !bytes.Contains(svg, []byte("</svg>")) || !bytes.Contains(got, []byte("](plots/"+plot+")")) {
			t.Errorf("%s: %v, or no whole SVG, or no link to it", plot, err)
		}
	}
}

// Two runs share BENCHMARKS.md: each replaces its own part, tables and plots, and leaves the other's as it is.
func TestTwoRunsShareADocument(t *testing.T) {
	dir := t.TempDir()
	to := Into(filepath.Join(dir, "BENCHMARKS.md"))
	write := func(run *result.Run) string {
		t.Helper()
		if _, err := Write(run, to); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(to.Document)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	networks, clusters := synthetic(5, 0, 1), clusterRun()
	if text := write(networks); !strings.Contains(text, "## On a real cluster\n\nNot measured yet") {
		t.Errorf("no place for the cluster:\n%s", text)
	}
	first := write(clusters)
	if strings.Contains(first, "Not measured yet") {
		t.Errorf("the section was not replaced:\n%s", first)
	}
	clusters.Environment.Commit = "fedcba9876543210"
	second := write(clusters)
	if first == second || !strings.Contains(second, "fedcba987654") || strings.Count(second, clusterMarks.begins) != 1 {
		t.Errorf("the section was not replaced by the second one:\n%s", second)
	}
	if third := write(networks); third != second {
		t.Errorf("the same run of networks changed something (-before +after):\n%s", cmp.Diff(second, third))
	}
	networks.Environment.Commit = "abcdefabcdef"
	last := write(networks)
	for _, want := range []string{"at commit abcdefabcdef", "at commit fedcba987654", "(tools/bench/plots/budgets.svg)", "(tools/bench/plots/cluster/first-packet.svg)"} {
		if !strings.Contains(last, want) {
			t.Errorf("no %q in\n%s", want, last)
		}
	}
	for _, plot := range []string{"budgets.svg", "cluster/first-packet.svg"} {
		if _, err := os.Stat(filepath.Join(to.Plots, plot)); err != nil {
			t.Error(err)
		}
	}
}

// A document from before there was such a section gets one at its end.
func TestSectionForAnOldDocument(t *testing.T) {
	to := Into(filepath.Join(t.TempDir(), "BENCHMARKS.md"))
	if err := os.WriteFile(to.Document, []byte("# Benchmarks\n\nold\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Write(clusterRun(), to); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(to.Document)
	if err != nil || !strings.HasPrefix(string(text), "# Benchmarks\n\nold\n\n"+clusterMarks.begins+"\n## On a real cluster\n") ||
		!strings.HasSuffix(string(text), "|\n"+clusterMarks.ends+"\n") {
		t.Errorf("%v\n%s", err, text)
	}
}

func TestClusterVerdicts(t *testing.T) {
	verdicts := func(run *result.Run) (all []string) {
		for _, b := range clusterBudgets() {
			all = append(all, judge(run, b).verdict)
		}
		return all
	}
	short := clusterRun()
	short.Indicative = true
	none := clusterRun()
	none.Samples = nil
	for name, c := range map[string]struct {
		run  *result.Run
		want []string
	}{
		"whole": {clusterRun(), []string{missed, met}}, "short": {short, []string{notJudged, notJudged}}, "nothing": {none, []string{notRun, notRun}},
	} {
		if diff := cmp.Diff(c.want, verdicts(c.run)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

func TestClusterHeadline(t *testing.T) {
	readme := filepath.Join(t.TempDir(), "README.md")
	text := "before\n" + headlineBegins + "\nnetworks\n" + headlineEnds + "\n" + clusterMarks.begins + "\nold\n" + clusterMarks.ends + "\nafter\n"
	for lost, said := range map[float64]string{
		0: "Rollouts of the DaemonSet lose no packet of 180630.", 1: "Rollouts of the DaemonSet lost 1 of 180630 packets.",
	} {
		if err := os.WriteFile(readme, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		run := clusterRun()
		for _, s := range run.Samples {
			if s.Workload == result.Rollout && s.Round == 3 && s.Path == result.Egress {
				s.Values["lost"] = lost
			}
		}
		if err := Headline(run, readme, filepath.Join(filepath.Dir(readme), "BENCHMARKS.md")); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(readme)
		if err != nil {
			t.Fatal(err)
		}
		want := "before\n" + headlineBegins + "\nnetworks\n" + headlineEnds + "\n" + clusterMarks.begins + "\n" +
			"On a real Kubernetes v1.36.3 (all of it on one machine, with kube-proxy): a pod's first packet arrives 442 ms after its creation is asked for, 401 ms with bridge " +
			"+ iptables (1.10 x [1.10, 1.10]). " + said + " With 5000 nodes an agent takes 90.3 MiB, and its maps 80.3 MiB, and 300 ms of CPU time a minute at rest. " +
			"The image is 18.0 MiB. Commit 0123456789ab; how it was measured, and more: [BENCHMARKS.md](BENCHMARKS.md#on-a-real-cluster).\n" +
			clusterMarks.ends + "\nafter\n"
		if diff := cmp.Diff(want, string(got)); diff != "" {
			t.Errorf("lost %g: %s", lost, diff)
		}
	}
}

// What is compared between two runs on clusters has no ratio of nothing to nothing.
func TestCompareClusters(t *testing.T) {
	slow := clusterRun()
	slower(slow, result.Row{Workload: result.FirstPacket, Metric: result.P50}, besideKubeProxy, 1.5)
	c, err := Compare(clusterRun(), slow)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for _, change := range c.Changes {
		found[change.Row.Workload] = change.Verdict
	}
	want := map[string]string{result.FirstPacket: Regression, result.Burst: Noise, result.AgentCluster: Noise, result.Image: Noise}
	if diff := cmp.Diff(want, found); diff != "" {
		t.Error(diff)
	}
}

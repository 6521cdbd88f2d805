package report

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// section is what a reader wants of a run: where it comes from, the budgets, the plots, and why budgets are missed.
func section(run *result.Run, files []figure, plots string) string {
	all := budgets()
	if run.Profile == result.ClusterProfile {
		all = clusterBudgets()
	}
	var verdicts []judgement
	for _, b := range asked(run, all) {
		verdicts = append(verdicts, judge(run, b))
	}
	text := origin(run)
	if run.Profile != result.ClusterProfile {
		text += "### An ordinary cluster with Services\n\n" + ordinary(run, verdicts) + "### Budgets\n\n"
	}
	text += verdictTable(verdicts)
	for _, f := range files {
		text += fmt.Sprintf("![%s](%s/%s.svg)\n\n", f.title, plots, f.name)
	}
	if missed := misses(verdicts); missed != "" {
		text += "### What is missed, and why\n\n" + missed + "\n"
	}
	if run.Profile == result.ClusterProfile {
		text += clusterHeadline(run)
	}
	return strings.TrimSuffix(text, "\n\n") + "\n"
}

// origin says where figures come from, and what they may be worth less for.
func origin(run *result.Run) string {
	e := run.Environment
	text := fmt.Sprintf("Measured by `%s` on %s at commit %s, in %s, on %s (%s), Linux %s", run.Command, run.Started.UTC().Format("2006-01-02"), commit(e),
		run.Finished.Sub(run.Started).Round(time.Second), e.CPU, plural(e.Cores, "core"), e.Kernel)
	if kubernetes := e.Versions["kubernetes"]; kubernetes != "" {
		text += fmt.Sprintf("; Kubernetes %s, containerd %s, runc %s", kubernetes, e.Versions["containerd"], e.Versions["runc"])
	}
	text += ".\n\n"
	if run.Indicative {
		text += "**Indicative**: a short run, which no budget is judged by.\n\n"
	}
	if run.Interrupted != "" {
		text += fmt.Sprintf("**Incomplete**: %s. What was finished until then is here.\n\n", run.Interrupted)
	}
	for _, warning := range e.Warnings {
		text += fmt.Sprintf("**Warning**: %s.\n\n", warning)
	}
	return text
}

func verdictTable(verdicts []judgement) string {
	var lines [][]string
	counts := map[string]int{}
	for _, j := range verdicts {
		counts[j.verdict]++
		lines = append(lines, []string{j.title(), dash(j.over()), j.text(), dash(j.measured), emphasised(j.verdict), j.beside})
	}
	return fmt.Sprintf("%d budgets met, %d missed, %d not judged or not measured.\n\n", counts[met], counts[missed], len(verdicts)-counts[met]-counts[missed]) +
		table([]string{"what", "against", "asked", "measured", "verdict", "beside kube-proxy"}, lines)
}

// emphasised is a verdict as tables have it.
func emphasised(verdict string) string {
	if verdict == met || verdict == missed {
		return "**" + verdict + "**"
	}
	return verdict
}

// misses are the reasons of what is missed, and what else is to be said of a verdict.
func misses(verdicts []judgement) (text string) {
	for _, j := range verdicts {
		if j.why != "" {
			text += fmt.Sprintf("- %s (%s): %s\n", join(j.title(), j.over()), j.verdict, j.why)
		}
	}
	return text
}

// clusterHeadline is one sentence for each thing that somebody asks who looks for a network.
func clusterHeadline(run *result.Run) string {
	of := func(workload, metric string, point int) string {
		return median(run, result.Row{Workload: workload, Metric: metric, Point: point}, result.KubeProxy)
	}
	text := fmt.Sprintf("On a real Kubernetes %s (all of it on one machine, with kube-proxy):", dash(run.Environment.Versions["kubernetes"]))
	first := result.Row{Workload: result.FirstPacket, Metric: result.P50}
	if over := ratio(run, first, result.KubeProxy, result.IPTables); over != "" {
		text += fmt.Sprintf(" a pod's first packet arrives %s after its creation is asked for, %s with bridge + iptables (%s).",
			median(run, first, result.KubeProxy), median(run, first, result.IPTables), over)
	}
	lost, sent := 0.0, 0.0
	for _, s := range run.Samples {
		if s.Workload == result.Rollout {
			lost, sent = lost+s.Values[result.Lost], sent+s.Values[result.Sent]
		}
	}
	if sent > 0 {
		text += fmt.Sprintf(" Rollouts of the DaemonSet lost %.0f of %.0f packets.", lost, sent)
	}
	if memory := of(result.AgentCluster, "memory", result.Nodes); memory != "" {
		text += fmt.Sprintf(" With %d nodes an agent takes %s, and its maps %s, and %s of CPU time a minute at rest.", result.Nodes, memory,
			of(result.AgentCluster, "maps", result.Nodes), of(result.AgentCluster, "cpu", result.Nodes))
	}
	if size := of(result.Image, "compressed", 0); size != "" {
		text += fmt.Sprintf(" The image is %s.", size)
	}
	return text + fmt.Sprintf(" Commit %s; all figures: [results](tools/bench/results/cluster.md).\n", commit(run.Environment))
}

// tables are all figures of a run: a section for each workload, then what was disturbed and what the machine is.
func tables(run *result.Run) []byte {
	text := "# All figures\n\n" + origin(run)
	for _, w := range result.Workloads() {
		if slices.ContainsFunc(run.Samples, func(s result.Sample) bool { return s.Workload == w.Name }) {
			text += fmt.Sprintf("## %s\n\n", strings.ToUpper(w.Title[:1])+w.Title[1:])
			if w.Note != "" {
				text += w.Note + "\n\n"
			}
			text += figures(run, w)
		}
	}
	return []byte(strings.TrimRight(text+disturbed(run)+environment(run.Environment), "\n") + "\n")
}

// figures has a line for each place, mode and point: every metric, and the main one's ratios, of a sweep to its own first point.
func figures(run *result.Run, w result.Workload) string {
	points := pointsOf(run, w.Name)
	head, bases := []string{"path", "mode", w.Axis}, []subject{{base: result.IPTables}, {base: result.IPTablesVXLAN}, {base: result.Direct}}
	if w.Axis != "" {
		bases = []subject{{itself: true, from: points[0]}}
	}
	for _, m := range w.Metrics {
		head = append(head, m.Title+", "+m.Unit)
	}
	for _, base := range bases {
		head = append(head, "/ "+base.over())
	}
	var lines [][]string
	for _, path := range slices.Concat(result.Paths(), result.ServicePaths(), []string{""}) {
		for _, mode := range run.Modes {
			for _, point := range points {
				line := []string{path, mode, ""}
				if w.Axis != "" {
					line[2] = fmt.Sprint(point)
				}
				row := result.Row{Workload: w.Name, Path: path, Point: point}
				if cells := cells(run, w, row, mode, bases); cells != nil {
					lines = append(lines, append(line, cells...))
				}
			}
		}
	}
	return table(head, lines)
}

// cells are what a run says of a workload's metrics, and of the first one over each base; nil where it says nothing.
func cells(run *result.Run, w result.Workload, row result.Row, mode string, bases []subject) (cells []string) {
	refused, _ := run.Refused(row, mode)
	said := refused > 0
	for _, m := range w.Metrics {
		row.Metric = m.Name
		r, ok := subject{row: row, mode: mode}.read(run)
		if !ok {
			r.text = ""
		}
		cells, said = append(cells, r.text), said || ok
	}
	if !said {
		return nil
	}
	if refused > 0 && cells[0] == "" {
		cells[0] = "refused"
	}
	row.Metric = w.Metrics[0].Name
	for _, base := range bases {
		base.row, base.mode = row, mode
		r, ok := base.read(run)
		if !ok || r.Low == 1 && r.High == 1 { // of itself
			r.text = ""
		}
		cells = append(cells, r.text)
	}
	return cells
}

// pointsOf are a sweep's points, in ascending order.
func pointsOf(run *result.Run, workload string) (points []int) {
	for _, s := range run.Samples {
		if s.Workload == workload {
			points = append(points, s.Point)
		}
	}
	slices.Sort(points)
	return slices.Compact(points)
}

// disturbed says how often samples were disturbed, by mode, since the modes must not differ in it; and which were refused, and why.
func disturbed(run *result.Run) string {
	var lines, refused [][]string
	for _, mode := range run.Modes {
		samples, again, kept, delay := 0, 0, 0, 0.0
		for _, s := range run.Samples {
			if s.Mode != mode {
				continue
			}
			samples++
			again += count(len(s.Attempts) > 0)
			kept += count(s.Disturbed != "")
			delay = max(delay, s.Values[result.Delayed])
			if s.Error != "" {
				refused = append(refused, []string{s.Workload, s.Path, fmt.Sprint(s.Point), s.Mode, fmt.Sprint(s.Round), brief(s.Error)})
			}
		}
		lines = append(lines, []string{mode, fmt.Sprint(samples), fmt.Sprint(again), fmt.Sprint(kept), fmt.Sprintf("%.1f %%", 100*delay)})
	}
	text := "## Disturbed and refused samples\n\nOnly what disturbs a generator is a reason to take a sample again; packets that went astray are none. Where every attempt " +
		"was disturbed, the least disturbed one is kept. \"Worst delay\" is the largest share of a sample for which an end waited for its CPU.\n\n" +
		table([]string{"mode", "samples", "taken again", "kept though disturbed", "worst delay"}, lines)
	if len(refused) == 0 {
		return text + "No sample was refused.\n\n"
	}
	return text + table([]string{"refused", "path", "point", "mode", "round", "why"}, refused)
}

func count(holds bool) int {
	if holds {
		return 1
	}
	return 0
}

func environment(e result.Environment) string {
	lines := [][]string{
		{"kernel", "Linux " + e.Kernel}, {"CPU", e.CPU}, {"cores", fmt.Sprint(e.Cores)}, {"memory", fmt.Sprintf("%d MiB", e.MemoryMB)},
		{"commit", e.Commit}, {"load average at the start", fmt.Sprintf("%.2f", e.Load)},
	}
	for _, name := range slices.Sorted(maps.Keys(e.Versions)) {
		lines = append(lines, []string{name, e.Versions[name]})
	}
	return "## Environment\n\n" + table([]string{"what", "value"}, lines)
}

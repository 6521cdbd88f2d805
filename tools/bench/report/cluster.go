package report

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// clusterMarks hold what a run on real clusters wrote into a document: its section, or its headline.
var clusterMarks = marks{"<!-- bench-cluster:begin -->", "<!-- bench-cluster:end -->"}

// clusterBudgets are those of the design that hold on a real cluster too.
func clusterBudgets() []budget {
	row := func(metric string) result.Row {
		return result.Row{Workload: result.AgentCluster, Metric: metric, Point: 5000}
	}
	return []budget{
		{row: row("memory"), mode: besideKubeProxy, bound: 80},
		{row: row("complete"), mode: besideKubeProxy, bound: 2},
	}
}

// writeCluster writes the section of a run on real clusters: into a shared document between its marks, else as a document of its own.
func writeCluster(run *result.Run, to Target) (string, error) {
	if to.shared { // the plots beside are another run's
		to.Plots = filepath.Join(to.Plots, "cluster")
	}
	figures, err := Figures(run, to.Plots, to.PNG)
	if err != nil {
		return "", err
	}
	below, err := filepath.Rel(filepath.Dir(to.Document), to.Plots)
	if err != nil {
		return "", fmt.Errorf("link from %s to its plots: %w", to.Document, err)
	}
	var text bytes.Buffer
	(&writer{Writer: &text, run: run, figures: figures, plots: filepath.ToSlash(below), below: "#"}).cluster()
	section := append(bytes.TrimRight(text.Bytes(), "\n"), '\n')
	if !to.shared {
		return to.Document, result.Replace(to.Document, append([]byte("# Benchmarks\n\n"), section...))
	}
	before, after, err := aroundCluster(to.Document)
	if err != nil {
		return "", err
	}
	return to.Document, result.Replace(to.Document, slices.Concat(before, section, after))
}

// aroundCluster is a document without the section. One that has no place for it gets it at its end; one that is not there is only that.
func aroundCluster(document string) (before, after []byte, err error) {
	text, err := os.ReadFile(document)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("read the document for the section: %w", err)
	}
	if before, after, err := clusterMarks.around(text, document); err == nil {
		return before, after, nil
	}
	if len(text) > 0 {
		text = append(bytes.TrimRight(text, "\n"), "\n\n"...)
	}
	return append(text, clusterMarks.begins+"\n"...), []byte(clusterMarks.ends + "\n"), nil
}

// keptCluster is the section that a document has, with its marks, or the place for one.
func keptCluster(document string) ([]byte, error) {
	text, err := os.ReadFile(document)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the document for its section of a real cluster: %w", err)
	}
	section := []byte("## On a real cluster\n\nNot measured yet: `make bench-cluster DOCUMENT=BENCHMARKS.md` does.\n")
	if before, after, err := clusterMarks.around(text, document); err == nil {
		section = text[len(before) : len(text)-len(after)]
	}
	return slices.Concat([]byte(clusterMarks.begins+"\n"), section, []byte(clusterMarks.ends+"\n")), nil
}

// cluster is the section, with everything below it.
func (w *writer) cluster() {
	r, versions := w.run, w.run.Environment.Versions
	w.printf("## On a real cluster\n\n")
	w.printf("What `%s` measured on %s at commit %s, in %s: Kubernetes %s with kube-proxy, containerd %s and runc %s, on %s, %s, Linux %s. "+
		"`make bench-cluster` measures your machine.\n\n",
		r.Command, r.Started.UTC().Format("2006-01-02"), commit(r.Environment), r.Finished.Sub(r.Started).Round(time.Second),
		dash(versions["kubernetes"]), dash(versions["containerd"]), dash(versions["runc"]), r.Environment.CPU, plural(r.Environment.Cores, "core"), r.Environment.Kernel)
	w.caveats()
	w.printf("All of it runs on one machine: each node is a set of namespaces with a containerd, a kubelet and a kube-proxy of its own, and the nodes share the " +
		"processors. `" + besideKubeProxy + "` is this project, installed by its manifest, with portmap chained; `iptables` is what flannel's host-gw makes of a node: " +
		"the plugins bridge, host-local and portmap, a route to each other node, its rules; no flanneld runs. A figure is the median of its rounds, with its spread in " +
		"brackets; a ratio is taken round by round; a p99 is of all rounds' pods together.\n\n")
	w.clusterBudgets()
	for _, workload := range result.ClusterCatalog() {
		if slices.Contains(r.Workloads, workload.Name) {
			w.workload(workload)
		}
	}
	w.environment()
}

func (w *writer) clusterBudgets() {
	var lines [][]string
	for _, b := range clusterBudgets() {
		j := judge(w.run, b)
		lines = append(lines, []string{b.title(), b.text(), dash(j.measured), strong(j.verdict), j.why})
	}
	w.printf("%s## Budgets that hold here too\n\n", w.below)
	w.lines([]string{"what", "asked", "measured", "verdict", "why"}, lines)
}

// clusterDrawings are the plots of a run on real clusters.
func clusterDrawings(run *result.Run) (all []drawing) {
	first, _ := result.Find(result.FirstPacket)
	agent, _ := result.Find(result.AgentCluster)
	return []drawing{
		{Figure{first.Name, first.Title, first.Name}, distribution(run, first.Name, "", "delay", first.Title)},
		{Figure{agent.Name, join(agent.Title, agent.Metrics[0].Title), agent.Name}, lines(run, agent)},
	}
}

// clusterHeadline is one sentence for each thing that somebody asks who looks for a network.
func clusterHeadline(out *bytes.Buffer, run *result.Run, link string) {
	w := &writer{Writer: out, run: run}
	w.printf("On a real Kubernetes %s (all of it on one machine, with kube-proxy):", dash(run.Environment.Versions["kubernetes"]))
	first := result.Row{Workload: result.FirstPacket, Metric: result.P50}
	if s, ok := run.Ratio(first, besideKubeProxy, "iptables"); ok {
		w.printf(" a pod's first packet arrives %s after its creation is asked for, %s with bridge + iptables (%s).",
			w.median(first, besideKubeProxy, metricOf(first)), w.median(first, "iptables", metricOf(first)), ratio(s))
	}
	switch lost, sent := w.sum(result.Rollout, "lost"), w.sum(result.Rollout, "sent"); {
	case sent > 0 && lost == 0:
		w.printf(" Rollouts of the DaemonSet lose no packet of %.0f.", sent)
	case sent > 0:
		w.printf(" Rollouts of the DaemonSet lost %.0f of %.0f packets.", lost, sent)
	}
	if agent := (result.Row{Workload: result.AgentCluster, Metric: "memory", Point: 5000}); w.median(agent, besideKubeProxy, metricOf(agent)) != "" {
		cpu, maps := agent, agent
		cpu.Metric, maps.Metric = "cpu", "maps"
		w.printf(" With 5000 nodes an agent takes %s, and its maps %s, and %s of CPU time a minute at rest.",
			w.median(agent, besideKubeProxy, metricOf(agent)), w.median(maps, besideKubeProxy, metricOf(maps)), w.median(cpu, besideKubeProxy, metricOf(cpu)))
	}
	image := result.Row{Workload: result.Image, Metric: "compressed"}
	if size := w.median(image, besideKubeProxy, metricOf(image)); size != "" {
		w.printf(" The image is %s.", size)
	}
	w.printf(" Commit %s; how it was measured, and more: [%s](%s#on-a-real-cluster).\n", commit(run.Environment), filepath.Base(link), link)
}

// sum adds up all values that a workload's samples have.
func (w *writer) sum(workload, name string) (total float64) {
	for _, s := range w.run.Samples {
		if s.Workload == workload {
			total += s.Values[name]
		}
	}
	return total
}

package report

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// budgets is what the design asks, row by row, and where the time goes in those that are missed.
func (w *writer) budgets() {
	var lines [][]string
	var late []budget
	counts, explained := map[string]int{}, 0
	for _, b := range budgets() {
		j := judge(w.run, b)
		counts[j.verdict]++
		explained += count(j.explained)
		lines = append(lines, []string{b.title(), b.against(), b.text(), dash(j.measured), strong(j.verdict), j.beside, j.why})
		if j.verdict == missed {
			late = append(late, b)
		}
	}
	w.printf("## Budgets\n\n")
	w.printf("What this network was designed to reach: %d met, %d missed, %d not judged or not measured. %s\n\n",
		counts[met], counts[missed], len(lines)-counts[met]-counts[missed], whose)
	if explained > 0 && explained == counts[missed] {
		w.printf("Why a row was missed was found out by hand, on the commit and the kernel that stand beside it.\n\n")
	}
	w.lines([]string{"what", "against", "asked", "measured", "verdict", "beside kube-proxy", "why"}, lines)
	w.printf("Through a tunnel goes only what crosses nodes: over VXLAN the other rows are the same as without.\n\n")
	for _, f := range w.figures {
		if f.Name == overview {
			w.link(f)
		}
	}
	w.spent(late)
}

// whose says which cluster a figure is of.
const whose = "`ebpf` is a cluster without kube-proxy, and judged; a cluster with it, such as kubeadm makes, runs `ebpf+kube-proxy`, which is shown " +
	"beside it; the classical networks have kube-proxy's rules always."

// spent says where the time of missed rows goes, in ours and in all that they are divided by.
func (w *writer) spent(late []budget) {
	var lines [][]string
	var seen []result.Row
	for _, b := range late {
		if slices.Contains(seen, b.row) || metricOf(b.row).Name != result.Rate {
			continue
		}
		seen = append(seen, b.row)
		lines = append(lines, w.times(b.row, b.mode))
		for _, other := range budgets() {
			if other.row == b.row && other.mode == b.mode {
				lines = append(lines, w.times(b.row, other.base))
			}
		}
	}
	if len(lines) == 0 {
		return
	}
	w.printf("### Where the time of the missed rows goes\n\n")
	w.printf("The two ends run at once, each on a CPU, and the busier one sets the pace. Their CPU time includes the softirqs that ran on their " +
		"CPUs, which carry the packets; BPF is the run time of this project's programs, from the samples of \"BPF run time\".\n\n")
	w.lines([]string{"what", "mode", "for one", "time that passes", "client's CPU time", "server's CPU time", "in softirqs", "BPF"}, lines)
}

func (w *writer) times(row result.Row, mode string) []string {
	workload, _ := result.Find(row.Workload)
	per, _ := workload.Metric(result.CPUPer)
	line := []string{rowTitle(row), mode, one(per.Title)}
	passes := ""
	if s, ok := w.run.Summary(row, mode); ok && s.Median > 0 {
		passes = number(1/s.Median/per.Scale) + " " + per.Unit
	}
	line = append(line, passes)
	for _, name := range []string{"cpu-client", "cpu-server", "cpu-softirq"} {
		line = append(line, w.median(result.Row{Workload: row.Workload, Path: row.Path, Metric: name}, mode, per))
	}
	bpf := ""
	if row.Workload == "udp64" {
		bpf = w.median(result.Row{Workload: "bpf", Path: row.Path, Metric: result.BPFPer}, mode, per)
	}
	return append(line, bpf)
}

// one is what a title such as "CPU time per packet" counts.
func one(title string) string {
	_, what, _ := strings.Cut(title, " per ")
	return what
}

func (w *writer) median(row result.Row, mode string, as result.Metric) string {
	s, ok := w.run.Summary(row, mode)
	if !ok {
		return ""
	}
	return number(s.Median/as.Scale) + " " + as.Unit
}

// The lines between which a document holds a run's headline.
const (
	headlineBegins = "<!-- bench:begin -->"
	headlineEnds   = "<!-- bench:end -->"
)

// Headline puts a run's main figures between the two marks of a document, and links to the document that has all.
func Headline(run *result.Run, file, all string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read the document for the headline: %w", err)
	}
	marks := headlineMarks(run.Profile)
	before, after, err := marks.around(text, file)
	if err != nil {
		return err
	}
	link, err := filepath.Rel(filepath.Dir(file), all)
	if err != nil {
		return fmt.Errorf("link from %s to %s: %w", file, all, err)
	}
	var middle bytes.Buffer
	if run.Profile == result.ClusterProfile {
		clusterHeadline(&middle, run, filepath.ToSlash(link))
	} else {
		headline(&middle, run, filepath.ToSlash(link))
	}
	return result.Replace(file, slices.Concat(before, middle.Bytes(), after))
}

// CheckHeadline is an error unless a document has a place for the headline of such a run: better known before it than after.
func CheckHeadline(file, profile string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read the document for the headline: %w", err)
	}
	_, _, err = headlineMarks(profile).around(text, file)
	return err
}

// marks are two lines of a document, between which stands what a run wrote.
type marks struct{ begins, ends string }

func headlineMarks(profile string) marks {
	if profile == result.ClusterProfile {
		return clusterMarks
	}
	return marks{headlineBegins, headlineEnds}
}

func (m marks) around(text []byte, file string) (before, after []byte, err error) {
	begins, ends := bytes.Index(text, []byte(m.begins+"\n")), bytes.Index(text, []byte(m.ends))
	if begins < 0 || ends < begins {
		return nil, nil, fmt.Errorf("%s has no lines %q and %q, between which the headline goes; add them", file, m.begins, m.ends)
	}
	return text[:begins+len(m.begins)+1], text[ends:], nil
}

func headline(out *bytes.Buffer, run *result.Run, link string) {
	w := &writer{Writer: out, run: run}
	var lines [][]string
	for _, row := range []result.Row{
		{Workload: "udp64", Path: result.SameNode, Metric: result.Rate}, {Workload: "udp64", Path: result.AcrossNodes, Metric: result.Rate},
		{Workload: "udp64", Path: result.Egress, Metric: result.Rate}, {Workload: "tcp1", Path: result.SameNode, Metric: result.Rate},
		{Workload: "tcp1", Path: result.AcrossNodes, Metric: result.Rate}, {Workload: "rr", Path: result.AcrossNodes, Metric: result.P99},
		{Workload: "crr", Path: result.AcrossNodes, Metric: result.Rate}, {Workload: "flows", Path: result.Egress, Metric: result.Rate},
		{Workload: "cni", Metric: "pair-p50"},
	} {
		if line := w.headlineRow(row); line != nil {
			lines = append(lines, line)
		}
	}
	w.lines([]string{"", "bridge + iptables", "ebpf-cni", "ebpf-cni beside kube-proxy", "ebpf-cni, of the machine's limit"}, lines)
	e := run.Environment
	w.printf("Beside ebpf-cni's figures stands their ratio to bridge + iptables, which has kube-proxy's rules always. The second column is a cluster without " +
		"kube-proxy, the third one with it, such as kubeadm makes: what leaves for the world walks the host's stack there. Traffic to Services is not measured.\n\n")
	w.printf("Medians of %s on %s (%s), Linux %s, commit %s; ratios with their spread. ", plural(run.Rounds, "round"), e.CPU,
		plural(e.Cores, "core"), e.Kernel, commit(e))
	if run.Indicative {
		w.printf("**Indicative**: from a short run. ")
	}
	w.printf("Every figure, budget and plot, and how they were measured: [%s](%s).\n", filepath.Base(link), link)
}

func (w *writer) headlineRow(row result.Row) []string {
	ours := w.over(row, "ebpf")
	if ours == "" {
		return nil
	}
	limit := ""
	if s, ok := w.run.Ratio(row, "ebpf", "direct"); ok {
		limit = ratio(s)
	}
	return []string{rowTitle(row), w.median(row, "iptables", metricOf(row)), ours, w.over(row, besideKubeProxy), limit}
}

// over is a mode's figure and its ratio to the classical network's.
func (w *writer) over(row result.Row, mode string) string {
	figure := w.median(row, mode, metricOf(row))
	if s, ok := w.run.Ratio(row, mode, "iptables"); ok {
		figure += ": " + ratio(s)
	}
	return figure
}

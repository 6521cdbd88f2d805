package report

import (
	"fmt"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// line is a row that somebody looks at first.
type line struct {
	result.Row

	// served says that packets go to a Service; its limit is then the same server addressed straight.
	served bool
}

// ordinaryLines are what a user has of an ordinary cluster, in the order of the page.
func ordinaryLines() (all []line) {
	add := func(workload, metric string, point int, paths ...string) {
		w, _ := result.Find(workload)
		for _, path := range paths {
			all = append(all, line{result.Row{Workload: workload, Path: path, Metric: metric, Point: point}, w.Served})
		}
	}
	add("udp64", result.Rate, 0, result.Paths()...)
	add("service-udp64", result.Rate, 1, result.SameNode, result.AcrossNodes)
	add("nodeport-local-udp64", result.Rate, 1, result.InboundLocal)
	add("tcp1", result.Rate, 0, result.SameNode, result.AcrossNodes)
	add("crr", result.Rate, 0, result.AcrossNodes)
	add("service-crr", result.Rate, 1, result.AcrossNodes)
	add("service-crr", result.Rate, result.ManyServices, result.AcrossNodes)
	add("flows", result.Rate, 0, result.Egress)
	add("cni", "pair-p50", 0, "")
	add("agent-api", "memory", 0, "")
	add("agent-api", "complete", 0, "")
	add("agent-rest", "cpu", 0, "")
	return all
}

// title is the row's; of a sweep by the number of Services, the workload's.
func (l line) title() string {
	if !l.served {
		return rowTitle(l.Row)
	}
	w, _ := result.Find(l.Workload)
	return join(join(w.Title, l.Path), plural(l.Point, "Service"))
}

// over is this network's row divided by another one's.
func (l line) over(base string) subject { return subject{row: l.Row, mode: result.EBPF, base: base} }

// limit is the row divided by what nothing in between would leave: the machine's limit, or the same server addressed straight.
func (l line) limit() subject {
	if l.served {
		return subject{row: l.Row, mode: result.EBPF, itself: true}
	}
	return l.over(result.Direct)
}

// divisor is the subject whose values this one's are divided by.
func (s subject) divisor() subject {
	if s.itself {
		row := s.row
		row.Point = s.from
		return subject{row: row, mode: s.mode}
	}
	return subject{row: s.row, mode: s.base}
}

// beside is a figure of another network, this network's ratio to it, and the verdict where a budget asks for one; empty where there is none.
func beside(run *result.Run, s subject, verdicts map[subject]judgement) string {
	there, ok1 := s.divisor().read(run)
	over, ok2 := s.read(run)
	if !ok1 || !ok2 {
		return ""
	}
	text := fmt.Sprintf("%s %s: %s", number(there.Median), there.unit, over.text)
	if j, asked := verdicts[s]; asked {
		text += fmt.Sprintf(", %s %s", j.text(), emphasised(j.verdict))
	}
	return text
}

// ordinary is a table of these lines: this network's figure, and beside it those of the others with the ratios.
func ordinary(run *result.Run, judged []judgement) string {
	verdicts := map[subject]judgement{}
	for _, j := range judged {
		verdicts[j.subject] = j
	}
	var lines [][]string
	for _, l := range ordinaryLines() {
		own := subject{row: l.Row, mode: result.EBPF}
		r, ok := own.read(run)
		if !ok {
			continue
		}
		figure := r.withUnit()
		if j, asked := verdicts[own]; asked {
			figure += fmt.Sprintf(", %s %s", j.text(), emphasised(j.verdict))
		}
		lines = append(lines, []string{
			l.title(), figure, beside(run, l.over(result.IPTables), verdicts), beside(run, l.over(result.NFTables), verdicts), beside(run, l.limit(), verdicts),
		})
	}
	return table([]string{"what", result.EBPF, result.IPTables, result.NFTables, "limit"}, lines) +
		fmt.Sprintf("`%s` is this project as a user gets it: default flags, no kube-proxy, and Services served by the programs, to pods that have asked a Service before. Each cluster has %d Services "+
			"where a row names no other number; in iptables and nftables they are kube-proxy's rules. Beside another network's figure stands the ratio of %s to it, what is asked of that, and the "+
			"verdict. The limit is direct, and for what goes to a Service the same server addressed straight.\n\n", result.EBPF, result.OrdinaryServices, result.EBPF)
}

// headline is some of these figures for the first page of the project: packets, connections and flows to the world, and what goes to Services.
func headline(run *result.Run) string {
	var rows [][]string
	for _, l := range ordinaryLines() {
		figure := func(mode string) string {
			return strings.TrimSuffix(median(run, l.Row, mode)+": "+ratio(run, l.Row, mode, result.IPTables), ": ")
		}
		across := l.Path == result.AcrossNodes && l.Workload != "tcp1" || l.Path == result.Egress && l.Workload == "flows" || l.Path == result.InboundLocal
		if limit, ok := l.limit().read(run); across && figure(result.EBPF) != "" {
			if !ok {
				limit.text = ""
			}
			rows = append(rows, []string{l.title(), median(run, l.Row, result.IPTables), figure(result.EBPF), figure(result.KubeProxy), limit.text})
		}
	}
	e := run.Environment
	return table([]string{"", "bridge + iptables", "ebpf-cni", "ebpf-cni beside kube-proxy", "ebpf-cni, of the limit"}, rows) +
		"Beside ebpf-cni's figures stands their ratio to bridge + iptables, which has kube-proxy's rules always. The second column is a cluster without kube-proxy, where the programs " +
		"serve Services, which is the default; the third one a cluster with it, such as kubeadm makes: what leaves for the world walks the host's stack there, and so does what goes to " +
		"Services. The limit is the machine's, without pods; of what goes to a Service it is the same server addressed straight. " +
		fmt.Sprintf("Where a row names no other number, each cluster has %d Services.\n\n", result.OrdinaryServices) +
		fmt.Sprintf("Medians of %s on %s (%s), Linux %s, commit %s; ratios with their spread. Budgets, plots and how all was measured: [BENCHMARKS.md](BENCHMARKS.md).\n",
			plural(run.Rounds, "round"), e.CPU, plural(e.Cores, "core"), e.Kernel, commit(e))
}

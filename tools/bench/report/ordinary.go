package report

import (
	"fmt"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// line is a row that somebody looks at first.
type line struct {
	result.Row

	// served says that packets go to a Service.
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

// without is the row divided by the same server addressed straight; false: the row goes to no Service.
func (l line) without() (subject, bool) {
	return subject{row: l.Row, mode: result.EBPF, itself: true}, l.served
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
		straight := ""
		if without, served := l.without(); served {
			straight = beside(run, without, verdicts)
		}
		lines = append(lines, []string{
			l.title(), figure, beside(run, l.over(result.IPTables), verdicts), beside(run, l.over(result.NFTables), verdicts), beside(run, l.over(result.Direct), verdicts), straight,
		})
	}
	return table([]string{"what", result.EBPF, result.IPTables, result.NFTables, result.Direct, "without the Service"}, lines) +
		fmt.Sprintf("`%s` is this project as a user gets it: default flags, no kube-proxy, and Services served by the programs, to pods that have asked a Service before. Each cluster has %d Services "+
			"where a row names no other number; in iptables and nftables they are kube-proxy's rules. Beside another network's figure stands the ratio of %s to it, what is asked of that, and the "+
			"verdict. The last column is what %[1]s does where the same server is addressed straight.\n\n", result.EBPF, result.OrdinaryServices, result.EBPF)
}

// headline is some of these figures for the first page of the project: packets, connections and flows to the world, and what goes to Services.
func headline(run *result.Run) string {
	var rows [][]string
	for _, l := range ordinaryLines() {
		shown := l.Path == result.AcrossNodes && l.Workload != "tcp1" || l.Path == result.Egress && l.Workload == "flows" || l.Path == result.InboundLocal
		over := func(base string) string { return ratio(run, l.Row, result.EBPF, base) }
		figure := median(run, l.Row, result.EBPF)
		if shown && figure != "" && over(result.IPTables) != "" {
			rows = append(rows, []string{l.title(), figure, over(result.IPTables), over(result.NFTables), over(result.Direct), ratio(run, l.Row, result.KubeProxy, result.IPTables)})
		}
	}
	e := run.Environment
	return table([]string{"", "ebpf-cni", "of bridge + iptables", "of bridge + nftables", "of the machine's limit", "beside kube-proxy, of bridge + iptables"}, rows) +
		"The first column is a cluster without kube-proxy, where the programs serve Services, which is the default; beside it stand its ratios to the classical networks, which have kube-proxy's rules, and to " +
		"the machine's limit, without pods and Services. The last column is a cluster with kube-proxy, such as kubeadm makes: what leaves for the world walks the host's stack there, and so does what goes to Services. " +
		fmt.Sprintf("Where a row names no other number, each cluster has %d Services.\n\n", result.OrdinaryServices) +
		fmt.Sprintf("Medians of %s on %s (%s), Linux %s, commit %s; ratios with their spread. Budgets, plots and how all was measured: [BENCHMARKS.md](BENCHMARKS.md).\n",
			plural(run.Rounds, "round"), e.CPU, plural(e.Cores, "core"), e.Kernel, commit(e))
}

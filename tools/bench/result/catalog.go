package result

import "slices"

// Metric is one number of a sample.
type Metric struct {
	Name, Title string
	// Unit is what it is counted in once divided by Scale.
	Unit  string
	Scale float64
	// Lower is true where less is better.
	Lower bool
	// Of names a distribution. The metric is then its quantile over the durations of all rounds together, since one round has too few
	// of them, and no sample has a value of it.
	Of       string
	Quantile float64
}

// Workload is something to measure. Its first metric is the one that it is about.
type Workload struct {
	Name, Title string
	Metrics     []Metric
	// Axis names what a sweep varies; empty for all that is no sweep.
	Axis string
	// Note is what a reader has to know of how it is measured.
	Note string
}

// Metric is the workload's metric of that name.
func (w Workload) Metric(name string) (Metric, bool) {
	i := slices.IndexFunc(w.Metrics, func(m Metric) bool { return m.Name == name })
	if i < 0 {
		return Metric{}, false
	}
	return w.Metrics[i], true
}

// The names of metrics that more than one workload has.
const (
	Rate = "rate"
	// CPUPer is the CPU time of the machine's kernel, for one of what Rate counts.
	CPUPer = "cpu"
	// Cost is the time that passes for one packet, or connection.
	Cost = "cost"
	// BPFPer is the run time of this project's programs for one packet, of all the programs that it passes.
	BPFPer = "bpf"
	// P50, P99 and P999 are durations that so many percent of all did not exceed.
	P50  = "p50"
	P99  = "p99"
	P999 = "p999"
	// Delayed is the share of a sample for which one of its ends was ready to run, and something else had the CPU.
	Delayed = "delayed"
	// Slowest is the longest duration of a round.
	Slowest = "max"
)

// CPUMeaning says what CPUPer is, for a report.
const CPUMeaning = "CPU time is that of the machine's kernel: system calls, interrupts and softirqs on all CPUs. What the generators' programs took for " +
	"themselves is not in it."

func packets() []Metric {
	return []Metric{
		{Name: Rate, Title: "packets/s", Unit: "kpps", Scale: 1e3},
		{Name: CPUPer, Title: "CPU time per packet", Unit: "ns", Scale: 1e-9, Lower: true},
	}
}

func stream() []Metric {
	return []Metric{
		{Name: Rate, Title: "throughput", Unit: "Gbit/s", Scale: 1e9 / 8},
		{Name: CPUPer, Title: "CPU time per GB", Unit: "s", Scale: 1e-9, Lower: true},
	}
}

func perSecond(what, title string) []Metric {
	return []Metric{
		{Name: Rate, Title: title, Unit: "1/s", Scale: 1},
		{Name: CPUPer, Title: "CPU time per " + what, Unit: "µs", Scale: 1e-6, Lower: true},
	}
}

func latency(name, title string) Metric {
	return Metric{Name: name, Title: title, Unit: "µs", Scale: 1e-6, Lower: true}
}

func plugin() []Metric {
	ms := func(name, title string) Metric {
		return Metric{Name: name, Title: title, Unit: "ms", Scale: 1e-3, Lower: true}
	}
	return []Metric{
		ms("pair-p50", "ADD + DEL p50"),
		ms("add-p50", "ADD p50"), ms("add-p99", "ADD p99").p99of("add"),
		ms("del-p50", "DEL p50"), ms("del-p99", "DEL p99").p99of("del"),
	}
}

// p99of makes a metric a quantile over all rounds.
func (m Metric) p99of(distribution string) Metric {
	m.Of, m.Quantile = distribution, 0.99
	return m
}

func sweep(what, unit string, scale float64) []Metric {
	return []Metric{
		{Name: Cost, Title: "time per " + what, Unit: unit, Scale: scale, Lower: true},
		{Name: CPUPer, Title: "CPU time per " + what, Unit: unit, Scale: scale, Lower: true},
	}
}

const noRules = "ebpf has no Service rules at all: its line is the same network at each point."

// Catalog is every workload, in the order of the report.
func Catalog() []Workload {
	return []Workload{
		{Name: "udp64", Title: "UDP, 64 bytes", Metrics: packets()},
		{Name: "udp1400", Title: "UDP, 1400 bytes", Metrics: packets()},
		{Name: "tcp1", Title: "TCP stream, 1 connection", Metrics: stream()},
		{Name: "tcp4", Title: "TCP stream, 4 connections", Metrics: stream()},
		{Name: "rr", Title: "TCP request-response", Metrics: append(perSecond("transaction", "transactions/s"),
			latency(P50, "p50"), latency(P99, "p99"), latency(P999, "p99.9"))},
		{Name: "crr", Title: "TCP connect-request-response-close", Metrics: perSecond("connection", "connections/s")},
		{Name: "flows", Title: "new SNAT flows", Metrics: perSecond("flow", "flows/s"),
			Note: "Each flow is one datagram from a port of its own, and its answer. Its CPU time is that of the two generators' processes, all included."},
		{Name: "bpf", Title: "BPF run time, UDP, 64 bytes", Note: "The kernel measures each program, which slows the packets down: samples of their own.",
			Metrics: []Metric{{Name: BPFPer, Title: "run time per packet", Unit: "ns", Scale: 1e-9, Lower: true}}},
		{Name: "cni", Title: "CNI, one pod at a time", Metrics: plugin(),
			Note: "From libcni's call until it returns: the plugins' processes and all that they do. Every mode's binaries are static and its addresses on a tmpfs. " +
				"The chain of ebpf is its plugin alone, as on a node that has no portmap; beside kube-proxy portmap comes after it, as on a kubeadm node; the classical " +
				"chains are bridge or ptp with host-local, and portmap. No pod asks for a port."},
		{Name: "cni10", Title: "CNI, ten pods at once", Metrics: plugin()},
		{Name: "nodes", Title: "nodes in the cluster, a busy flow", Axis: "nodes", Metrics: sweep("packet", "ns", 1e-9),
			Note: "One busy flow of 64-byte datagrams while the network knows so many nodes. The path of such a flow is kept for 10 ms, so that the table of prefixes is " +
				"hardly asked, however long it is. What a packet costs whose path is asked for, with 2 and with 5000 nodes, stands in ARCHITECTURE.md's table of run " +
				"times (`go test -run xxx -bench . ./test/prog`)."},
		{Name: "services", Title: "Service rules", Axis: "Services", Metrics: sweep("connection", "µs", 1e-6),
			Note: "Connect-request-response-close: each connection's first packet walks the rules. " + noRules},
		{Name: "services-udp", Title: "Service rules, an established flow", Axis: "Services", Metrics: sweep("packet", "ns", 1e-9),
			Note: "One flow of 64-byte datagrams: only its first packet walks the rules. " + noRules},
		{Name: "live", Title: "live SNAT flows", Axis: "live flows", Metrics: sweep("packet", "ns", 1e-9),
			Note: "One flow of 64-byte datagrams while so many others are held open."},
		{Name: "agent", Title: "agent, 5000 nodes", Metrics: agent(),
			Note: "The nodes come from a file. Memory is the process's resident set a second after the map was complete; complete is the map that programs " +
				"read, the routes for the nodes' own traffic may follow it."},
		{Name: "agent-api", Title: "agent, 5000 nodes from an API server", Metrics: agent(),
			Note: "The same with an API server of the benchmark's own on the node's loopback. It differs from a real one: no TLS, and one list of all Nodes as JSON, which " +
				"takes more memory to read than protobuf, where today's servers stream it."},
		{Name: "change", Title: "a Node's change, 10 nodes, until a packet takes the new way", Metrics: change(),
			Note: "From the list's rename until a pod's packet leaves for that node under the pod's own address. A file is read whole, while an API server " +
				"would send the one node that changed: for that the short list stands."},
		{Name: "change5000", Title: "a Node's change, 5000 nodes, until a packet takes the new way", Metrics: change(),
			Note: "The same with all 5000 nodes in the file that is read."},
		{Name: "change-api", Title: "a Node's change, 5000 nodes, from an API server", Metrics: change(),
			Note: "The same with an API server that lists 5000 Nodes, and whose watch tells of the one that changed, measured from the event's sending. It is the " +
				"benchmark's own, on the node's loopback and without TLS. Changes are 0.3 s apart, and the agent is at rest when one comes: after each it looks at its " +
				"routes again, and one that came meanwhile would wait for that. Bursts of changes are not measured."},
	}
}

func agent() []Metric {
	return []Metric{
		{Name: "memory", Title: "resident memory", Unit: "MiB", Scale: 1 << 20, Lower: true},
		{Name: "peak", Title: "peak of resident memory", Unit: "MiB", Scale: 1 << 20, Lower: true},
		{Name: "complete", Title: "time from start to a complete map", Unit: "s", Scale: 1, Lower: true},
	}
}

func change() []Metric {
	p50 := Metric{Name: P50, Title: "p50", Unit: "ms", Scale: 1e-3, Lower: true}
	p99 := Metric{Name: P99, Title: "p99", Unit: "ms", Scale: 1e-3, Lower: true}
	return []Metric{p50, p99.p99of("delay")}
}

// Find is the workload of that name, of the clusters' too.
func Find(name string) (Workload, bool) {
	all := slices.Concat(Catalog(), ClusterCatalog())
	i := slices.IndexFunc(all, func(w Workload) bool { return w.Name == name })
	if i < 0 {
		return Workload{}, false
	}
	return all[i], true
}

// The places between which packets are sent, as samples name them.
const (
	SameNode    = "same node"
	AcrossNodes = "across nodes"
	Egress      = "egress"
)

// Paths are all of them, in the order of the report.
func Paths() []string { return []string{SameNode, AcrossNodes, Egress} }

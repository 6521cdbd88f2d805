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
}

// Workload is something to measure. Its first metric is the one that it is about.
type Workload struct {
	Name, Title string
	Metrics     []Metric
	// Axis names what a sweep varies; empty for all that is no sweep.
	Axis string
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
	// CPUPer is the CPU time of the whole machine, interrupts and softirqs included, for one of what Rate counts.
	CPUPer = "cpu"
	// Cost is the time that passes for one packet.
	Cost = "cost"
	// BPFPer is the run time of this project's programs for one packet, of all the programs that it passes.
	BPFPer = "bpf"
	// P50, P99 and P999 are durations that so many percent of all did not exceed.
	P50  = "p50"
	P99  = "p99"
	P999 = "p999"
	// Slowest is the longest duration of a round, where a round has too few for a percentile.
	Slowest = "max"
)

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
	metrics := []Metric{{Name: "pair-p50", Title: "ADD + DEL p50", Unit: "ms", Scale: 1e-3, Lower: true}}
	for _, m := range [][2]string{{"add-p50", "ADD p50"}, {"add-max", "slowest ADD"}, {"del-p50", "DEL p50"}, {"del-max", "slowest DEL"}} {
		metrics = append(metrics, Metric{Name: m[0], Title: m[1], Unit: "ms", Scale: 1e-3, Lower: true})
	}
	return metrics
}

func sweep() []Metric {
	return []Metric{
		{Name: Cost, Title: "time per packet", Unit: "ns", Scale: 1e-9, Lower: true},
		{Name: CPUPer, Title: "CPU time per packet", Unit: "ns", Scale: 1e-9, Lower: true},
	}
}

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
		{Name: "flows", Title: "new SNAT flows", Metrics: perSecond("flow", "flows/s")},
		{Name: "bpf", Title: "BPF run time, UDP, 64 bytes", Metrics: []Metric{
			{Name: BPFPer, Title: "run time per packet", Unit: "ns", Scale: 1e-9, Lower: true}}},
		{Name: "cni", Title: "CNI, one pod at a time", Metrics: plugin()},
		{Name: "cni10", Title: "CNI, ten pods at once", Metrics: plugin()},
		{Name: "nodes", Title: "nodes in the cluster", Axis: "nodes", Metrics: sweep()},
		{Name: "services", Title: "Service rules", Axis: "Services", Metrics: sweep()},
		{Name: "live", Title: "live SNAT flows", Axis: "live flows", Metrics: sweep()},
		{Name: "agent", Title: "agent, 5000 nodes", Metrics: []Metric{
			{Name: "memory", Title: "resident memory", Unit: "MiB", Scale: 1 << 20, Lower: true},
			{Name: "peak", Title: "peak of resident memory", Unit: "MiB", Scale: 1 << 20, Lower: true},
			{Name: "complete", Title: "time from start to a complete map", Unit: "s", Scale: 1, Lower: true}}},
		{Name: "change", Title: "a Node's change, from the file to the map that programs read", Metrics: []Metric{
			{Name: Slowest, Title: "slowest of a round", Unit: "ms", Scale: 1e-3, Lower: true},
			{Name: P50, Title: "p50", Unit: "ms", Scale: 1e-3, Lower: true}}},
	}
}

// Find is the workload of that name.
func Find(name string) (Workload, bool) {
	all := Catalog()
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

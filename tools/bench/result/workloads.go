package result

import (
	"slices"
	"time"
)

// The networks that are compared, as samples name them.
const (
	Direct = "direct"
	// EBPF is this project with its default flags, and serves Services.
	EBPF      = "ebpf"
	KubeProxy = "ebpf+kube-proxy"
	IPTables  = "iptables"
	PTP       = "ptp"
	NFTables  = "nftables"
	// VXLAN is this project, and IPTablesVXLAN flannel, with a tunnel between the nodes.
	VXLAN         = "ebpf+vxlan"
	IPTablesVXLAN = "iptables+vxlan"
	// IPv6 and IPTablesIPv6 are EBPF and IPTables where nodes and pods have IPv6 alone.
	IPv6         = "ebpf+ipv6"
	IPTablesIPv6 = "iptables+ipv6"
)

// Modes are all of them, in the order of the tables and in that of measuring: those that are divided by each other stand side by side.
func Modes() []string {
	return []string{Direct, EBPF, IPTables, IPv6, IPTablesIPv6, KubeProxy, PTP, NFTables, VXLAN, IPTablesVXLAN}
}

// The places between which packets are sent, as samples name them.
const (
	SameNode    = "same node"
	AcrossNodes = "across nodes"
	Egress      = "egress"
	// Inbound begins at the host outside and goes to a Service by way of a node without an endpoint of it, FromNode at a process of such a node;
	// InboundLocal begins at that host too, and goes by way of the node that has the endpoint.
	Inbound      = "inbound"
	InboundLocal = "inbound, same node"
	FromNode     = "from a node"
)

// Paths are those that begin at pods, in the order of the tables.
func Paths() []string { return []string{SameNode, AcrossNodes, Egress} }

// ServicePaths are the others, of which what goes to Services is measured alone; they stand after those of pods.
func ServicePaths() []string { return []string{InboundLocal, Inbound, FromNode} }

// Measured says that a mode's packets are measured on a path: those of a tunnel only where it makes a difference.
func Measured(mode, path string) bool {
	return mode != VXLAN && mode != IPTablesVXLAN || path == AcrossNodes || path == ""
}

// Metric is one number of a sample.
type Metric struct {
	Name, Title string
	// Unit is what a value is printed in, after division by Scale.
	Unit  string
	Scale float64
	// Lower says that less is better.
	Lower bool
	// Of names durations, of which the metric is the 99th percentile: over those of all rounds together, since one round has
	// too few of them, so no sample has a value of it.
	Of string
}

// Kind is how a workload is measured.
type Kind string

// The kinds. In brackets stands what Workload.Size is.
const (
	Datagrams   Kind = "datagrams"   // in one direction [bytes of payload]
	Stream      Kind = "stream"      // on one TCP connection
	Requests    Kind = "requests"    // on one open TCP connection
	Connections Kind = "connections" // TCP, each opened, used once and closed
	Flows       Kind = "flows"       // datagrams of which each is a flow of its own
	Closing     Kind = "closing"     // connections or questions, many and short [none]
	Open        Kind = "open"        // connections that stay open [of the first pod]
	Programs    Kind = "programs"    // datagrams while the kernel measures the BPF programs [bytes]
	Plugins     Kind = "plugins"     // pods come and go [pods at once]
	Starts      Kind = "starts"      // of the agent [Nodes]
	Changes     Kind = "changes"     // of one Node [Nodes]
	Rests       Kind = "rests"       // of the agent of a node full of pods [Nodes]
	Status      Kind = "status"      // asked for there [Nodes]
	Crowd       Kind = "crowd"       // a pod comes and goes there, or on an empty node [Nodes]
	Cluster     Kind = "cluster"     // by test/cluster/measure, on a real Kubernetes
)

// Workload is something to measure. Its first metric is the one that it is about.
type Workload struct {
	Name, Title string
	Kind        Kind
	Size        int
	// Paths and Modes are what it is measured on and in; no path: where that makes no difference; no mode: all that can.
	Paths, Modes []string
	// Quick are the paths of a quick run; none: not part of it.
	Quick []string
	// Close says how the connections of a workload of kind Closing end.
	Close Close
	// Once says that one sample is enough for a run and for a judgement: it lasts for minutes, or counts what is no matter of time.
	Once bool
	// Named says that it is measured only where it is asked for by name.
	Named bool
	// Axis names what a sweep varies, and Points are its values.
	Axis   string
	Points []int
	// Itself says that each mode of a sweep is compared with itself: it goes through all points before the next mode does.
	Itself bool
	// Served says that packets go to a Service, of which the server is the only endpoint: to its ClusterIP, or inbound to its NodePort; at 0 Services, straight
	// to the server.
	Served bool
	// Pods are those of a node that is full, and Changes how often a second a foreign route comes or goes there.
	Pods    int
	Changes float64
	// Services are those that the agent has to serve, ten endpoints each.
	Services int
	// API says that the agent learns of Nodes from an API server, in place of a file.
	API bool
	// Takes is how long a sample is expected to take beside the time for which packets are sent.
	Takes   time.Duration
	Metrics []Metric
	// Note is what a reader has to know of how it is measured.
	Note string
}

// The names of metrics that more than one workload has, and of values that no table shows.
const (
	Rate = "rate"
	// CPUPer is the CPU time of the machine's kernel for one of what Rate counts. ClientCPU and ServerCPU are that of the two ends, SoftIRQ that of softirqs.
	CPUPer    = "cpu"
	ClientCPU = "cpu-client"
	ServerCPU = "cpu-server"
	SoftIRQ   = "cpu-softirq"
	// Cost is the time that passes for one packet, or connection.
	Cost = "cost"
	// BPFPer is the run time of this project's programs for one packet.
	BPFPer = "bpf"
	P50    = "p50"
	P99    = "p99"
	P999   = "p999"
	// Delayed is the share of a sample for which one of its ends was ready to run, and something else had the CPU.
	Delayed = "delayed"
	// Sent and Lost are what went out and what never arrived, in all.
	Sent = "sent"
	Lost = "lost"
	// Failed and Stalled are connections.
	Failed  = "failed"
	Stalled = "stalled"
)

// Nodes is how many Nodes a large cluster has, here.
const Nodes = 5000

// OrdinaryServices is how many Services every cluster has, unless it is about their number.
const OrdinaryServices = 100

// ManyServices is how many Services a large cluster has, here.
const ManyServices = 10_000

// Pods is how many pods a full node has, here.
const Pods = 250

// Workloads is the table of everything that is measured, in the order of measuring and of the report.
func Workloads() []Workload {
	return slices.Concat(traffic(), sweeps(), throughServices(), servicesForOthers(), ports(), agents(), crowds(), clusters())
}

func traffic() []Workload {
	all, across := Paths(), []string{AcrossNodes}
	plugged := []string{EBPF, IPTables, KubeProxy, PTP, NFTables}
	once := []string{""}
	return []Workload{
		{Name: "udp64", Title: "UDP, 64 bytes", Kind: Datagrams, Size: 64, Paths: all, Quick: all, Metrics: perSecond("packet", "packets/s", "kpps", 1e3, "ns", 1e-9)},
		{Name: "udp1400", Title: "UDP, 1400 bytes", Kind: Datagrams, Size: 1400, Paths: all, Named: true, Metrics: perSecond("packet", "packets/s", "kpps", 1e3, "ns", 1e-9)},
		{Name: "tcp1", Title: "TCP stream, 1 connection", Kind: Stream, Paths: all[:2], Quick: all[:2],
			Metrics: perSecond("GB", "throughput", "Gbit/s", 1e9/8, "s", 1e-9)},
		{Name: "rr", Title: "TCP request-response", Kind: Requests, Paths: across, Quick: across,
			Metrics: append(perSecond("transaction", "transactions/s", "1/s", 1, "µs", 1e-6),
				lower(P50, "p50", "µs"), lower(P99, "p99", "µs"), lower(P999, "p99.9", "µs"))},
		{Name: "crr", Title: "TCP connect-request-response-close", Kind: Connections, Paths: across, Quick: across,
			Metrics: perSecond("connection", "connections/s", "1/s", 1, "µs", 1e-6)},
		{Name: "flows", Title: "new UDP flows", Kind: Flows, Paths: all[1:], Quick: all[2:], Metrics: perSecond("flow", "flows/s", "1/s", 1, "µs", 1e-6),
			Note: "Each flow is one datagram from a port of its own, and its answer; those to the outside are masqueraded. Its CPU time is that of the two ends, all included."},
		{Name: "bpf", Title: "BPF run time, UDP, 64 bytes", Kind: Programs, Size: 64, Paths: all, Named: true, Modes: []string{EBPF, KubeProxy, VXLAN},
			Metrics: []Metric{lower(BPFPer, "all programs", "ns"), lower("ec_from_pod", "ec_from_pod", "ns"), lower("ec_to_uplink", "ec_to_uplink", "ns"),
				lower("ec_from_uplink", "ec_from_uplink", "ns"), lower("ec_to_tunnel", "ec_to_tunnel", "ns"), lower("ec_from_tunnel", "ec_from_tunnel", "ns")},
			Note: "Run time per packet, on both nodes. The kernel measures each program, which slows the packets down: samples of their own."},
		{Name: "cni", Title: "CNI, one pod at a time", Kind: Plugins, Size: 1, Paths: once, Quick: once, Modes: plugged, Takes: 3 * time.Second, Metrics: plugin(),
			Note: "From libcni's call until it returns: the plugins' processes and all that they do. Every mode's binaries are static and its addresses on a tmpfs. " +
				"The chain of ebpf is its plugin alone, as on a node that has no portmap; beside kube-proxy portmap comes after it, as on a kubeadm node; the classical " +
				"chains are bridge or ptp with host-local, and portmap. No pod asks for a port."},
		{Name: "cni10", Title: "CNI, ten pods at once", Kind: Plugins, Size: 10, Paths: once, Named: true, Modes: plugged, Takes: 2 * time.Second, Metrics: plugin()},
		{Name: "cni100", Title: "CNI, a hundred pods at once", Kind: Plugins, Size: 100, Paths: once, Named: true, Modes: []string{EBPF, IPTables}, Takes: 8 * time.Second,
			Metrics: append([]Metric{lower("last", "until the last one has its network", "s")}, plugin()...),
			Note:    "All hundred ADDs begin at once, on a node of few processors. Each has to succeed."},
	}
}

// crowds are what is asked of a node full of pods in a large cluster.
func crowds() []Workload {
	once, ours := []string{""}, []string{EBPF}
	rest := []Metric{
		{Name: "cpu", Title: "CPU time", Unit: "% of a core", Scale: 0.01, Lower: true}, lower("memory", "resident memory", "MiB"),
		lower("peak", "peak of resident memory", "MiB"), lower("lines", "lines of its log", "a minute"),
	}
	const ready = 9 * time.Second // from an agent's start until it is at rest
	return []Workload{
		{Name: "agent-rest", Title: "agent at rest, 250 pods, 5000 nodes", Kind: Rests, Size: Nodes, Pods: Pods, Paths: once, Quick: once, Modes: ours,
			Takes: ready + 12*time.Second, Metrics: rest,
			Note: "The pods are the real plugin's, on one node. The Nodes come from an API server of the benchmark's own, each some 13 KB of protobuf; and as by kubelets each one's " +
				"status is renewed every five minutes, which makes 17 events a second. Nothing else happens. CPU time is the process's own and the kernel's for it, over ten " +
				"seconds, from seven seconds after the agent was ready."},
		{Name: "agent-routes", Title: "agent under 100 route changes a second, 250 pods, 5000 nodes", Kind: Rests, Size: Nodes, Pods: Pods, Changes: 100, Paths: once, Modes: ours,
			Takes: ready + 12*time.Second, Metrics: rest,
			Note: "The same while routes of another daemon, by way of the node's gateway, come and go a hundred times a second in all."},
		{Name: "status", Title: "ebpfctl status, 250 pods, 5000 nodes", Kind: Status, Size: Nodes, Pods: Pods, Paths: once, Named: true, Modes: ours, Takes: ready + time.Second,
			Metrics: []Metric{lower("took", "time", "s")}},
		{Name: "pods", Title: "CNI, by the pods of the node", Kind: Crowd, Size: Nodes, Pods: Pods, Paths: once, Named: true, Modes: ours,
			Axis: "pods", Points: []int{1, Pods}, Itself: true, Takes: ready + 12*time.Second,
			Metrics: []Metric{lower("add-p50", "ADD p50", "ms"), p99("add", "ADD p99"), lower("del-p50", "DEL p50", "ms"), p99("del", "DEL p99")},
			Note: "A pod comes as a node's only one, and as the 250th of another one, and goes again; each node's agent knows 5000 nodes. One ADD or DEL follows the other after " +
				"0.2 s, so that an agent has done what it does about it."},
	}
}

func sweeps() []Workload {
	const grown = 700 * time.Millisecond
	across := []string{AcrossNodes}
	return []Workload{
		{Name: "nodes", Title: "nodes in the cluster, a busy flow", Kind: Datagrams, Size: 64, Paths: across, Modes: []string{EBPF, VXLAN},
			Axis: "nodes", Points: []int{2, Nodes}, Itself: true, Takes: grown, Metrics: cost("packet", "ns"),
			Note: "One busy flow of 64-byte datagrams while the network knows so many nodes. The path of such a flow is kept for 10 ms, so that the table of prefixes is " +
				"hardly asked, however long it is. What a packet costs whose path is asked for stands in ARCHITECTURE.md's table of run times."},
		{Name: "services", Title: "Service rules", Kind: Connections, Paths: across, Named: true, Modes: []string{EBPF, IPTables, KubeProxy, NFTables},
			Axis: "Services", Points: []int{0, 1000, 10000, 20000}, Takes: grown, Metrics: cost("connection", "µs"),
			Note: "From pod to pod, straight. In the classical networks each connection's first packet walks the rules all the same."},
	}
}

func agents() []Workload {
	once, ours, tunnel := []string{""}, []string{EBPF}, []string{EBPF, VXLAN}
	start := []Metric{
		lower("memory", "resident memory", "MiB"), lower("peak", "peak of resident memory", "MiB"), lower("complete", "time from start to a complete map", "s"),
	}
	change := []Metric{lower(P50, "p50", "ms"), p99("delay", "p99")}
	return []Workload{
		{Name: "agent", Title: "agent, 5000 nodes", Kind: Starts, Size: Nodes, Paths: once, Named: true, Modes: ours, Takes: 3 * time.Second, Metrics: start,
			Note: "The nodes come from a file. Memory is the process's resident set a second after the map was complete; complete is the map that programs " +
				"read, the routes for the nodes' own traffic may follow it."},
		{Name: "agent-api", Title: "agent, 5000 nodes from an API server", Kind: Starts, Size: Nodes, API: true, Paths: once, Quick: once, Modes: tunnel,
			Takes: 4 * time.Second, Metrics: start,
			Note: "The nodes come from an API server of the benchmark's own on the node's loopback, beside a hundred Services: Nodes of some 13 KB of protobuf, streamed as today's servers " +
				"do, and renewed as by kubelets. It has no TLS. Memory is the process's resident set a second after the map was complete; complete is the map that programs read, the " +
				"routes for the nodes' own traffic may follow it."},
		{Name: "change", Title: "a Node's change, 10 nodes, until a packet takes the new way", Kind: Changes, Size: 10, Paths: once, Named: true, Modes: ours,
			Takes: 2 * time.Second, Metrics: change,
			Note: "From the list's rename until a pod's packet leaves for that node under the pod's own address. A file is read whole, while an API server " +
				"sends the one Node that has changed: for that the short list stands."},
		{Name: "change5000", Title: "a Node's change, 5000 nodes, until a packet takes the new way", Kind: Changes, Size: Nodes, Paths: once, Named: true, Modes: ours,
			Takes: 13 * time.Second, Metrics: change, Note: "The same with all 5000 nodes in the file that is read."},
		{Name: "change-api", Title: "a Node's change, 5000 nodes, from an API server", Kind: Changes, Size: Nodes, API: true, Paths: once, Quick: once, Modes: tunnel,
			Takes: 10 * time.Second, Metrics: change,
			Note: "From the sending of the event, by such an API server, until a pod's packet leaves for that node under the pod's own address. Changes are 0.3 s apart, and the agent is at rest when one comes: " +
				"after each it looks at its routes again, and one that came meanwhile would wait for that. Bursts of changes are not measured. In ebpf+vxlan all Nodes are " +
				"reached through the tunnel, and the packet leaves in it."},
		{Name: "agent-services", Title: "agent, 10 000 Services with 100 000 endpoints", Kind: Starts, Size: 10, Services: ManyServices, API: true, Paths: once,
			Modes: ours, Takes: 5 * time.Second, Metrics: append([]Metric{lower("maps", "maps without flow tables", "MiB")}, append(start, lower("cpu", "CPU time until then", "s"))...),
			Note: "The agent of one of ten nodes learns of Services and EndpointSlices, some 1 and 2 KB each, from the benchmark's own API server, in protobuf. The maps are complete when they have all " +
				"of the Services and the agent has said so by the range of their addresses; that each leads to its ten endpoints is looked at then. Maps are what the kernel " +
				"keeps for those that agent and plugin write, and for clients' affinity; not for flows, their fragments and ports."},
		{Name: "change-services", Title: "an endpoint's change, 10 000 Services with 100 000 endpoints", Kind: Changes, Size: 10, Services: ManyServices, API: true, Paths: once,
			Modes: ours, Takes: 18 * time.Second, Metrics: append(change, lower("calls", "system calls", "a change")),
			Note: "From the sending of an EndpointSlice without the endpoint that a pod's flow of datagrams goes to, until the flow goes to another one; 0.3 s later the endpoint " +
				"comes back, and so on. System calls are those by which the agent writes maps in either 0.3 s, a batch being one: a median, since what it does at intervals " +
				"falls into some. That it looks at maps, programs and links at intervals is not counted."},
	}
}

// ClusterProfile is the profile of a run on real clusters.
const ClusterProfile = "cluster"

// The workloads of such a run.
const (
	FirstPacket  = "first-packet"
	Burst        = "burst"
	Rollout      = "rollout"
	AgentCluster = "agent-cluster"
	Image        = "image"
)

func clusters() []Workload {
	return []Workload{
		{Name: FirstPacket, Title: "from a pod's creation to its first packet", Kind: Cluster, Metrics: []Metric{lower(P50, "p50", "ms"), p99("delay", "p99")},
			Note: "From the request to the API server until the first datagram of the pod's program arrives at a host outside of the cluster: API server, kubelet, containerd, the " +
				"plugins and the dataplane have all done their parts. The scheduler has not: the pod names its node. One cluster has both networks, each on a node of its own, and " +
				"pods are created on one and the other in turn, each alone; halfway the two nodes' roles are exchanged, on another cluster."},
		{Name: Burst, Title: "ten pods at once, until the first packet of the last", Kind: Cluster, Metrics: []Metric{lower("last", "time", "s")},
			Note: "The same, with ten pods created at once on one node."},
		{Name: Rollout, Title: "packets lost per rollout", Kind: Cluster,
			Metrics: []Metric{
				lower(Lost, "datagrams lost", "of a rollout"), {Name: Sent, Title: "datagrams sent", Unit: "in a rollout", Scale: 1},
				lower("gap", "longest time without one", "ms"), lower("took", "time of the rollout", "s"),
			},
			Note: "`kubectl rollout restart` of the DaemonSet replaces the agent of each node, while 1000 numbered datagrams a second go from a pod to another on its node, to one on " +
				"another node, and to a host outside, and as many come back from each. The longest time without one, in either direction, is also that of the machine's two " +
				"processors being busy with something else."},
		{Name: AgentCluster, Title: "agent, by the number of Nodes", Kind: Cluster, Axis: "Node objects",
			Metrics: []Metric{
				lower("memory", "resident memory a second after its start", "MiB"), lower("resting", "at rest", "MiB"), lower("peak", "peak after a start", "MiB"), lower("maps", "BPF maps", "MiB"),
				lower("complete", "time from start until it is ready, its map empty before", "s"),
				lower("again", "the same, its map as the agent before has left it", "s"), lower("cpu", "CPU time a minute at rest", "ms"),
				lower("initial", "sent to it until it is ready", "MiB"), lower("hour", "and an hour at rest", "MiB"), lower("hour-json", "the same in JSON", "MiB"),
				lower("list", "a list of all Nodes in protobuf", "MiB"), lower("list-gzip", "the same, gzip", "MiB"), lower("list-json", "in JSON", "MiB"),
				lower("list-json-gzip", "the same, gzip", "MiB"),
			},
			Note: "A real API server has so many Nodes, all but two of them without a kubelet. The DaemonSet's pod is deleted, and the next one's agent is ready when it knows all " +
				"Nodes: its map is then looked at, and has every podCIDR. That map outlives agents; before every other start it is emptied, as it is on a new node; memory is of both " +
				"kinds. At rest, each Node's status is renewed every five minutes, as kubelets do, which an agent has to read. Maps are what the kernel keeps for all BPF maps of a node. " +
				"A Node is some 13 KB of protobuf, as those of clusters in use. What an agent is sent is counted by the kernel on its connections, TLS included; lists and the watch in JSON " +
				"by another client."},
		{Name: Image, Title: "image", Kind: Cluster, Metrics: []Metric{lower("compressed", "as it is pulled", "MiB"), lower("unpacked", "unpacked", "MiB")},
			Note: "The image of the DaemonSet, as `make image` makes it for amd64."},
	}
}

// perSecond are the metrics of what is counted: how many in a second, and the CPU time of one.
func perSecond(one, title, unit string, scale float64, cpuUnit string, cpuScale float64) []Metric {
	cpu := func(name, whose string) Metric {
		return Metric{Name: name, Title: whose, Unit: cpuUnit, Scale: cpuScale, Lower: true}
	}
	return []Metric{
		{Name: Rate, Title: title, Unit: unit, Scale: scale},
		cpu(CPUPer, "kernel's CPU time per "+one), cpu(ClientCPU, "of the client's CPU"), cpu(ServerCPU, "of the server's"), cpu(SoftIRQ, "in softirqs"),
	}
}

func cost(one, unit string) []Metric {
	return []Metric{lower(Cost, "time per "+one, unit), lower(CPUPer, "kernel's CPU time per "+one, unit)}
}

func plugin() []Metric {
	return []Metric{
		lower("pair-p50", "ADD + DEL p50", "ms"), lower("add-p50", "ADD p50", "ms"), p99("add", "ADD p99"), lower("del-p50", "DEL p50", "ms"), p99("del", "DEL p99"),
	}
}

func p99(durations, title string) Metric {
	m := lower(P99, title, "ms")
	if durations != "delay" {
		m.Name = durations + "-p99"
	}
	m.Of = durations
	return m
}

// lower is a metric of which less is better: a time, or memory.
func lower(name, title, unit string) Metric {
	scale := map[string]float64{"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "MiB": 1 << 20}[unit]
	if scale == 0 {
		scale = 1
	}
	return Metric{Name: name, Title: title, Unit: unit, Scale: scale, Lower: true}
}

// Find is the workload of that name.
func Find(name string) (Workload, bool) {
	all := Workloads()
	if i := slices.IndexFunc(all, func(w Workload) bool { return w.Name == name }); i >= 0 {
		return all[i], true
	}
	return Workload{}, false
}

// Names are the workloads of a run of networks, or of one on clusters.
func Names(cluster bool) (names []string) {
	for _, w := range Workloads() {
		if (w.Kind == Cluster) == cluster {
			names = append(names, w.Name)
		}
	}
	return names
}

// Whole are those that a whole run has: the others are measured only by name.
func Whole(cluster bool) []string {
	return slices.DeleteFunc(Names(cluster), func(name string) bool {
		w, _ := Find(name)
		return w.Named
	})
}

// Metric is the workload's metric of that name.
func (w Workload) Metric(name string) (Metric, bool) {
	if i := slices.IndexFunc(w.Metrics, func(m Metric) bool { return m.Name == name }); i >= 0 {
		return w.Metrics[i], true
	}
	return Metric{}, false
}

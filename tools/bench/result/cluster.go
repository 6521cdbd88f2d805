package result

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

// ClusterCatalog is every workload of a run on real clusters, in the order of the report.
func ClusterCatalog() []Workload {
	mebibytes := func(name, title string) Metric {
		return Metric{Name: name, Title: title, Unit: "MiB", Scale: 1 << 20, Lower: true}
	}
	seconds := func(name, title string) Metric {
		return Metric{Name: name, Title: title, Unit: "s", Scale: 1, Lower: true}
	}
	milliseconds := func(name, title string) Metric {
		return Metric{Name: name, Title: title, Unit: "ms", Scale: 1e-3, Lower: true}
	}
	return []Workload{
		{Name: FirstPacket, Title: "from a pod's creation to its first packet",
			Metrics: []Metric{milliseconds(P50, "p50"), milliseconds("p99", "p99").p99of("delay")},
			Note: "From the request to the API server until the first datagram of the pod's program arrives at a host outside of the cluster: API server, kubelet, containerd, the " +
				"plugins and the dataplane have all done their parts. The scheduler has not: the pod names its node. One cluster has both networks, each on a node of its own that " +
				"does not run the control plane, and pods are created on one and the other in turn, each alone; halfway the two nodes' roles are exchanged, on another cluster. The plugins' part of it is what " +
				"\"CNI, one pod at a time\" has as ADD; the rest is Kubernetes' and containerd's, the same work in both."},
		{Name: Burst, Title: "ten pods at once, until the first packet of the last", Metrics: []Metric{seconds("last", "time")},
			Note: "The same, with ten pods created at once on one node."},
		{Name: Rollout, Title: "packets lost per rollout",
			Metrics: []Metric{
				{Name: "lost", Title: "datagrams lost", Unit: "of a rollout", Scale: 1, Lower: true}, {Name: "sent", Title: "datagrams sent", Unit: "in a rollout", Scale: 1},
				milliseconds("gap", "longest time without one"), seconds("took", "time of the rollout"),
			},
			Note: "`kubectl rollout restart` of the DaemonSet replaces the agent of each node, while 1000 numbered datagrams a second go from a pod to another on its node, to one on " +
				"another node, and to a host outside, and as many come back from each. The longest time without one, in either direction, is also that of the machine's two " +
				"processors being busy with something else."},
		{Name: AgentCluster, Title: "agent, by the number of Nodes", Axis: "Node objects",
			Metrics: []Metric{
				mebibytes("memory", "resident memory a second after its start"), mebibytes("resting", "at rest"), mebibytes("peak", "peak after a start"), mebibytes("maps", "BPF maps"),
				seconds("complete", "time from start until it is ready, its map empty before"),
				seconds("again", "the same, its map as the agent before has left it"), milliseconds("cpu", "CPU time a minute at rest"),
			},
			Note: "A real API server has so many Nodes, all but two of them without a kubelet. The DaemonSet's pod is deleted, and the next one's agent is ready when it knows all " +
				"Nodes: its map is then looked at, and has every podCIDR. That map outlives agents: a start finds the entries there and compares them. Before every other start " +
				"it is emptied, as it is on a new node; memory is of both kinds. A start is when the kernel made the process of the container, which is the runtime's until it becomes the agent. " +
				"At rest, each Node's status is renewed every five minutes, as kubelets do, which an agent has to read. Maps are what the kernel keeps for all BPF maps of a node."},
		{Name: Image, Title: "image", Metrics: []Metric{mebibytes("compressed", "as it is pulled"), mebibytes("unpacked", "unpacked")},
			Note: "The image of the DaemonSet, as `make image` makes it for amd64."},
	}
}

package result

import "time"

// throughServices are the sweeps of what pods send to Services.
func throughServices() []Workload {
	const (
		grown = 700 * time.Millisecond
		note  = "The client sends to the ClusterIP of a Service, and the server is its only endpoint; with 0 Services it sends straight to the server. All other Services have one " +
			"endpoint each on a node that does not exist. netfilter has the Service in the middle of its list, as kube-proxy's order is any."
	)
	modes, pods := []string{EBPF, IPTables, KubeProxy, NFTables}, Paths()[:2]
	return []Workload{
		{Name: "service-udp64", Title: "UDP, 64 bytes, through a ClusterIP", Kind: Datagrams, Size: 64, Paths: pods, Modes: append([]string{IPv6}, modes...), Served: true,
			Axis: "Services", Points: []int{0, 1}, Itself: true, Takes: grown, Metrics: perSecond("packet", "packets/s", "kpps", 1e3, "ns", 1e-9), Note: "One flow. " + note},
		{Name: "service-many", Title: "UDP, 64 bytes, through one of many ClusterIPs", Kind: Datagrams, Size: 64, Paths: pods, Modes: modes[:1], Served: true,
			Axis: "Services", Points: []int{1, ManyServices}, Itself: true, Takes: 2 * grown, Metrics: cost("packet", "ns"), Note: "The same flow. " + note},
		{Name: "service-crr", Title: "TCP connect-request-response-close, through a ClusterIP", Kind: Connections, Paths: []string{AcrossNodes}, Modes: modes, Served: true,
			Axis: "Services", Points: []int{0, 1, ManyServices}, Itself: true, Takes: 2 * grown,
			Metrics: append(perSecond("connection", "connections/s", "1/s", 1, "µs", 1e-6), cost("connection", "µs")[0]),
			Note:    "The Service has four ports, which the connections take in turn: towards one the client has too few of its own. " + note},
	}
}

// servicesForOthers are those of what others than pods send to a Service.
func servicesForOthers() []Workload {
	const (
		inbound  = "The host outside sends to the NodePort of a node, which sends it on in its own name to the server, on another node; the answer comes back the same way. The Service is one of a hundred. "
		fromNode = "A process of the node's network, in the node's cgroup, sends to the ClusterIP; the server is on another node. The Service is one of a hundred. "
		takes    = 300 * time.Millisecond
	)
	from, by, modes := []string{Inbound}, []string{FromNode}, []string{EBPF, IPTables}
	packets, connections := perSecond("packet", "packets/s", "kpps", 1e3, "ns", 1e-9), perSecond("connection", "connections/s", "1/s", 1, "µs", 1e-6)
	return []Workload{
		{Name: "nodeport-local-udp64", Title: "UDP, 64 bytes, through a NodePort", Kind: Datagrams, Size: 64, Paths: []string{InboundLocal}, Modes: append(modes, NFTables),
			Served: true, Axis: "Services", Points: []int{0, 1}, Itself: true, Takes: 2 * takes, Metrics: packets,
			Note: "The host outside sends to the NodePort of the node that has the Service's only endpoint, which is the server; with 0 Services it sends straight to the server, " +
				"by way of the same node. One flow."},
		{Name: "nodeport-udp64", Title: "UDP, 64 bytes, through a NodePort", Kind: Datagrams, Size: 64, Paths: from, Modes: modes, Served: true, Takes: takes,
			Metrics: packets, Note: inbound + "One flow."},
		{Name: "nodeport-crr", Title: "TCP connect-request-response-close, through a NodePort", Kind: Connections, Paths: from, Modes: modes, Served: true, Takes: takes,
			Metrics: connections, Note: inbound + "Four ports take turns."},
		{Name: "host-udp64", Title: "UDP, 64 bytes, from a process of the node", Kind: Datagrams, Size: 64, Paths: by, Modes: modes, Served: true, Takes: takes,
			Metrics: packets, Note: fromNode + "One connected socket."},
		{Name: "host-crr", Title: "TCP connect-request-response-close, from a process of the node", Kind: Connections, Paths: by, Modes: modes, Served: true, Takes: takes,
			Metrics: connections, Note: fromNode + "Four ports take turns."},
	}
}

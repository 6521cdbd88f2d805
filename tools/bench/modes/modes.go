// Package modes builds the networks that the benchmark compares, each a cluster of two nodes and a host outside, out of
// network namespaces on one machine. It owns what the networks are made of and the proof that traffic took the way that
// it claims; what is sent, how long and how often is for others.
//
//	network, err := modes.Build(ctx, "iptables", log)
//	...
//	defer network.Close()
//	client, server, ok := network.Ends(modes.AcrossNodes)
//	before, err := network.Count()
//	... send ...
//	after, err := network.Count()
//	err = network.Carried(before, after, modes.AcrossNodes, modes.Traffic{Forth: sent, Exact: true, Flows: 1})
//
// All modes stand on the same hosts, links, MTU and offloads (test/lab); whatever differs is what the network in question
// brings along itself. They can all stand at once: each has namespaces of its own, and an idle one handles no packet.
package modes

import (
	"errors"
	"net/netip"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// The names of the modes.
const (
	Direct        = "direct"
	EBPF          = "ebpf"
	EBPFKubeProxy = "ebpf+kube-proxy"
	EBPFVXLAN     = "ebpf-vxlan"
	IPTables      = "iptables"
	IPTablesVXLAN = "iptables-vxlan"
	PTP           = "ptp"
	NFTables      = "nftables"
)

// Names lists the modes in the order of the tables.
func Names() []string {
	return []string{Direct, EBPF, EBPFKubeProxy, EBPFVXLAN, IPTables, IPTablesVXLAN, PTP, NFTables}
}

// Missing says why a mode cannot be built yet; "" for one that can.
func Missing(name string) string {
	if name == EBPFVXLAN {
		return "waits for --routing-mode vxlan, which the agent does not have yet"
	}
	return ""
}

// ErrNotApplicable is returned for what a mode does not have: a plugin in direct, Service rules in ebpf.
var ErrNotApplicable = errors.New("does not apply to this mode")

// Path is a way through the network.
type Path string

// The paths; their values are what tables call them.
const (
	SameNode    Path = "same node"
	AcrossNodes Path = "across nodes"
	SNAT        Path = "egress"
)

// Paths lists the paths in the order of the tables.
func Paths() []Path { return []Path{SameNode, AcrossNodes, SNAT} }

// End is one end of a path.
type End struct {
	Name string
	// Netns is the path of the end's network namespace.
	Netns   string
	Address netip.Addr

	ns *lab.Namespace
}

// Counters are running counters of a network by name, such as "n1 from_pod forwarded" or "n2 eth0 rx".
type Counters map[string]uint64

// Program is what the kernel has counted of one BPF program while kernel.bpf_stats_enabled was set.
type Program struct {
	// Node is "n1" or "n2".
	Node, Name string
	RunTime    time.Duration
	Runs       uint64
}

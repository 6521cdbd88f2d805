package modes

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// Counters are running counters of a network by name, such as "n1 from_pod forwarded" or "n2 eth0 rx". Those of packets have a sibling of bytes.
type Counters map[string]uint64

func (c Counters) add(name string, packets, bytes uint64) { c[name], c[bytesOf(name)] = packets, bytes }

// bytesOf is what a counter of packets calls its sibling.
func bytesOf(name string) string { return name + " bytes" }

// nodeName is what counters call a node.
func nodeName(node *lab.Node) string { return fmt.Sprintf("n%d", node.Number) }

// linkDrops begins the names of what links have dropped, droppedName of what a node's programs have, and trackingFaults of what went wrong in its
// connection tracking.
const linkDrops = "links dropped "

func droppedName(node string) string    { return node + " dropped " }
func trackingFaults(node string) string { return node + " conntrack " }

// carriedName is a counter of the programs; their own names for things serve.
func carriedName(node string, direction wire.Direction, event traffic.Event) string {
	return fmt.Sprintf("%s %v %v", node, direction, event)
}

// countLinks adds what the links of each host, each pod and the fabric have received, sent and dropped: at both ends of every path, and all between.
func (n *Network) countLinks(into Counters) error {
	names := map[*lab.Namespace]string{}
	for name, host := range n.hosts {
		names[host] = name
	}
	for _, node := range n.lab.Nodes {
		names[node.Namespace] = nodeName(node)
	}
	for _, ns := range n.lab.Namespaces() {
		links, err := ns.Netlink().LinkList()
		if err != nil {
			return fmt.Errorf("list the links of %s: %w", ns.Netns(), err)
		}
		host := names[ns]
		if host == "" {
			host = ns.Netns()
		}
		for _, link := range links {
			s, name := link.Attrs().Statistics, host+" "+link.Attrs().Name
			into.add(name+" rx", s.RxPackets, s.RxBytes)
			into.add(name+" tx", s.TxPackets, s.TxBytes)
			into[linkDrops+name] = s.RxDropped + s.TxDropped + s.RxErrors + s.TxErrors
		}
	}
	return nil
}

// countTraffic adds what a node's programs have carried.
func countTraffic(into Counters, node *lab.Node) error {
	counters, err := traffic.Open(bpffs.Dir(node.BPFFS()).Map(traffic.Name))
	if err != nil {
		return fmt.Errorf("traffic of %s: %w", node.Name, err)
	}
	defer counters.Close()
	for direction := range wire.Directions {
		for event := range traffic.Events {
			sum, err := counters.Sum(direction, event)
			if err != nil {
				return fmt.Errorf("traffic of %s: %w", node.Name, err)
			}
			into.add(carriedName(nodeName(node), direction, event), sum.Packets, sum.Bytes)
		}
	}
	return nil
}

// countDrops adds what a node's programs have dropped.
func countDrops(into Counters, node *lab.Node) error {
	dropped, err := node.Drops()
	for _, counter := range dropped {
		// A pod's kernel asks for IPv6 routers by itself.
		if counter.Slot != drops.LinkScope {
			into[droppedName(nodeName(node))+fmt.Sprintf("%v %v", counter.Direction, counter.Slot)] = counter.Packets
		}
	}
	return err
}

// heldFlows is how many flows the programs have in the table of those that are translated: masqueraded, and to Services.
const heldFlows = "flows"

func countFlows(into Counters, node *lab.Node) (err error) {
	into[nodeName(node)+" "+heldFlows], err = entries(node, usage.Snat)
	return err
}

// countTracking adds how many connections a node tracks, and what went wrong with any.
func countTracking(into Counters, node *lab.Node) error {
	name := nodeName(node)
	tracked, err := node.ReadSysctl("net/netfilter/nf_conntrack_count")
	if err != nil {
		return err
	}
	if into[name+" tracked"], err = strconv.ParseUint(tracked, 10, 64); err != nil {
		return fmt.Errorf("read nf_conntrack_count of %s: %w", node.Name, err)
	}
	var table []byte
	err = node.Do(func() (err error) {
		table, err = os.ReadFile("/proc/thread-self/net/stat/nf_conntrack")
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil // a kernel without CONFIG_NF_CONNTRACK_PROCFS; what is lost there is missed at the far end
	}
	for _, fault := range []string{"insert_failed", "drop", "early_drop"} {
		if err == nil {
			into[trackingFaults(name)+fault], err = column(string(table), fault)
		}
	}
	if err != nil {
		return fmt.Errorf("connection tracking of %s: %w", node.Name, err)
	}
	return nil
}

// flushTracking is what `conntrack -F` does.
func flushTracking(node *lab.Node) error {
	return node.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
}

// Backlog is how many packets of the whole machine found the queue of a CPU full.
const Backlog = "backlog"

func countBacklog(into Counters) error {
	table, err := os.ReadFile("/proc/net/softnet_stat")
	if err == nil {
		into[Backlog], err = sum(string(table), 1)
	}
	if err != nil {
		return fmt.Errorf("read what the CPUs' queues have dropped: %w", err)
	}
	return nil
}

// column sums a column of hexadecimal numbers below a line of names.
func column(table, name string) (uint64, error) {
	head, lines, _ := strings.Cut(table, "\n")
	at := slices.Index(strings.Fields(head), name)
	if at < 0 {
		return 0, fmt.Errorf("no column %s in %q", name, head)
	}
	return sum(lines, at)
}

// sum sums a column of hexadecimal numbers, one line for each CPU.
func sum(lines string, column int) (sum uint64, err error) {
	for line := range strings.Lines(lines) {
		fields := strings.Fields(line)
		if column >= len(fields) {
			return 0, fmt.Errorf("no column %d in %q", column, line)
		}
		n, err := strconv.ParseUint(fields[column], 16, 64)
		if err != nil {
			return 0, fmt.Errorf("column %d: %w", column, err)
		}
		sum += n
	}
	return sum, nil
}

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

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// Counters are running counters of a network by name, such as "n1 from_pod forwarded" or "n2 eth0 rx".
type Counters map[string]uint64

// countLink adds the packets and bytes that a link has received and sent, under the given name.
func countLink(into Counters, as string, ns *lab.Namespace, link string) error {
	l, err := ns.Netlink().LinkByName(link)
	if err != nil {
		return fmt.Errorf("find link %s in %s: %w", link, ns.Netns(), err)
	}
	statistics := l.Attrs().Statistics
	into[as+" rx"], into[as+" tx"] = statistics.RxPackets, statistics.TxPackets
	into[bytesOf(as+" rx")], into[bytesOf(as+" tx")] = statistics.RxBytes, statistics.TxBytes
	return nil
}

// nodeName is what counters call a node.
func nodeName(node *lab.Node) string { return fmt.Sprintf("n%d", node.Number) }

// hostLink is the node's end of a pod's veth pair; "" when the plugin's result does not name it.
func hostLink(pod *lab.Pod) string {
	for _, link := range pod.Result.Interfaces {
		if link.Sandbox == "" && link.Name != bridge {
			return link.Name
		}
	}
	return ""
}

// countUplinks adds every node's link to the fabric.
func countUplinks(into Counters, l *lab.Lab) (err error) {
	for _, node := range l.Nodes {
		err = errors.Join(err, countLink(into, nodeName(node)+" "+lab.Uplink, node.Namespace, lab.Uplink))
	}
	return err
}

// linkDrops begins the names of what links have dropped.
const linkDrops = "links dropped "

// countLinkDrops adds what all links of each host, pod and of the fabric have dropped: at both ends of every path, and all between.
func countLinkDrops(into Counters, l *lab.Lab) error {
	for _, ns := range l.Namespaces() {
		links, err := ns.Netlink().LinkList()
		if err != nil {
			return fmt.Errorf("list the links of %s: %w", ns.Netns(), err)
		}
		for _, link := range links {
			s := link.Attrs().Statistics
			into[linkDrops+ns.Netns()+" "+link.Attrs().Name] = s.RxDropped + s.TxDropped + s.RxErrors + s.TxErrors
		}
	}
	return nil
}

// trackingFaults begins the names of what went wrong in a node's connection tracking.
func trackingFaults(node string) string { return node + " conntrack " }

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

func flushTracking(node *lab.Node) error {
	return node.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
}

// column sums a column of hexadecimal numbers, one line for each CPU below the line of names.
func column(table, name string) (sum uint64, err error) {
	head, lines, _ := strings.Cut(table, "\n")
	at := slices.Index(strings.Fields(head), name)
	if at < 0 {
		return 0, fmt.Errorf("no column %s in %q", name, head)
	}
	for line := range strings.Lines(lines) {
		fields := strings.Fields(line)
		if at >= len(fields) {
			return 0, fmt.Errorf("no column %s in %q", name, line)
		}
		n, err := strconv.ParseUint(fields[at], 16, 64)
		if err != nil {
			return 0, fmt.Errorf("column %s: %w", name, err)
		}
		sum += n
	}
	return sum, nil
}

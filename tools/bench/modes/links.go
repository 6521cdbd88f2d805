package modes

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

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

// countUplinks adds every node's link to the fabric.
func countUplinks(into Counters, l *lab.Lab) error {
	for _, node := range l.Nodes {
		if err := countLink(into, nodeName(node)+" "+lab.Uplink, node.Namespace, lab.Uplink); err != nil {
			return err
		}
	}
	return nil
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
	if err != nil {
		return fmt.Errorf("connection tracking of %s: %w", node.Name, err)
	}
	for _, fault := range []string{"insert_failed", "drop", "early_drop"} {
		if into[trackingFaults(name)+fault], err = column(string(table), fault); err != nil {
			return fmt.Errorf("connection tracking of %s: %w", node.Name, err)
		}
	}
	return nil
}

// column sums a column of hexadecimal numbers, one line for each CPU below the line of names.
func column(table, name string) (sum uint64, err error) {
	at := -1
	for line := range strings.Lines(table) {
		fields := strings.Fields(line)
		if at < 0 {
			for i, field := range fields {
				if field == name {
					at = i
				}
			}
			if at < 0 {
				return 0, fmt.Errorf("no column %s in %q", name, line)
			}
			continue
		}
		if at >= len(fields) {
			return 0, fmt.Errorf("no column %s in %q", name, line)
		}
		n, err := strconv.ParseUint(fields[at], 16, 64)
		if err != nil {
			return 0, fmt.Errorf("column %s: %w", name, err)
		}
		sum += n
	}
	if at < 0 {
		return 0, fmt.Errorf("no column %s: the table is empty", name)
	}
	return sum, nil
}

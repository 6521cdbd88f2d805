package modes

import (
	"fmt"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// countLink adds the packets that a link has received and sent, under the given name.
func countLink(into Counters, as string, ns *lab.Namespace, link string) error {
	l, err := ns.Netlink().LinkByName(link)
	if err != nil {
		return fmt.Errorf("find link %s in %s: %w", link, ns.Netns(), err)
	}
	statistics := l.Attrs().Statistics
	into[as+" rx"], into[as+" tx"] = statistics.RxPackets, statistics.TxPackets
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

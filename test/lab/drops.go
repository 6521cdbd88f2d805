package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// noise is dropped in every lab: a pod's interface with IPv6 asks for routers and multicast groups all by itself, and nobody
// but its node is to hear it.
var noise = []drops.Reason{drops.LinkScope}

// Drops reads the node's drop counters that are not zero. A node on which no agent has been yet has none.
func (n *Node) Drops() ([]drops.Counter, error) {
	counters, err := drops.Open(bpffs.Dir(n.BPFFS()).Map(drops.Name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("drops of %s: %w", n.Name, err)
	}
	defer counters.Close()
	all, err := counters.All()
	if err != nil {
		return nil, fmt.Errorf("drops of %s: %w", n.Name, err)
	}
	return all, nil
}

// Dropped is how many packets the node has dropped for a reason, in both directions.
func (n *Node) Dropped(reason drops.Reason) (packets uint64, err error) {
	all, err := n.Drops()
	for _, counter := range all {
		if counter.Slot == reason {
			packets += counter.Packets
		}
	}
	return packets, err
}

// UnexpectedDrops is an error that lists what the nodes have dropped for reasons other than the expected ones and the
// noise of every lab; nil when there is none.
func (l *Lab) UnexpectedDrops(expected ...drops.Reason) error {
	expected = append(expected, noise...)
	var found []string
	for _, node := range l.Nodes {
		all, err := node.Drops()
		if err != nil {
			return err
		}
		for _, c := range all {
			if !slices.Contains(expected, c.Slot) {
				found = append(found, fmt.Sprintf("%s %v: %s %d packets (%s)", node.Name, c.Direction, c.Slot, c.Packets, c.Slot.Explain()))
			}
		}
	}
	if len(found) > 0 {
		return fmt.Errorf("unexpected drops:\n    %s", strings.Join(found, "\n    "))
	}
	return nil
}

package modes

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/journal"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// Forget empties the tables of flows on both nodes. Every sample begins like that in every mode: what earlier ones have left would
// lengthen the way of the next, and since namespaces share the kernel's table of connections, of other modes too.
func (n *Network) Forget() error {
	for _, node := range n.lab.Nodes {
		if err := n.plane.forget(node); err != nil {
			return fmt.Errorf("mode %s: empty the flow tables of %s: %w", n.Mode, node.Name, err)
		}
	}
	return nil
}

// Flows is how many flows the first node's table holds by which packets to the outside are masqueraded.
func (n *Network) Flows() (uint64, error) {
	flows, err := n.plane.flows()
	if err != nil {
		return 0, fmt.Errorf("mode %s: count flows: %w", n.Mode, err)
	}
	return flows, nil
}

func (*directPlane) forget(*lab.Node) error { return nil }

func (*directPlane) flows() (uint64, error) { return 0, ErrNotApplicable }

func (*classical) forget(node *lab.Node) error { return flushTracking(node) }

// flushTracking is what `conntrack -F` does.
func flushTracking(node *lab.Node) error {
	return node.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
}

func (c *classical) flows() (uint64, error) {
	counters := Counters{}
	err := countTracking(counters, c.lab.Nodes[0])
	return counters["n1 tracked"], err
}

// longer than any flow lives.
const longer = 48 * time.Hour

// forget has the agent's own sweep believe that it is two days later, when every flow has ended.
func (*ebpfPlane) forget(node *lab.Node) (err error) {
	dir := bpffs.Dir(node.BPFFS())
	c := datapath.Collector{Maps: map[string]*ebpf.Map{}}
	defer func() {
		for _, m := range c.Maps {
			m.Close()
		}
	}()
	if c.Program, err = ebpf.LoadPinnedProgram(dir.Program("ec_collect"), nil); err != nil {
		return fmt.Errorf("open the program that sweeps: %w", err)
	}
	defer c.Program.Close()
	for _, name := range []string{snat.Name, snat.ReverseName, conntrack.Name, journal.CandidatesName} {
		if c.Maps[name], err = ebpf.LoadPinnedMap(dir.Map(name), nil); err != nil {
			return fmt.Errorf("open map %s: %w", name, err)
		}
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return fmt.Errorf("read the clock: %w", err)
	}
	for table := range usage.Tables {
		if _, err := c.SweepAt(table, uint64(now.Nano()+int64(longer)), false); err != nil {
			return fmt.Errorf("sweep table %s: %w", table, err)
		}
	}
	left, err := entries(node, usage.Snat)
	if err == nil && left > 0 {
		err = fmt.Errorf("%d flows are left in table %s", left, usage.Snat)
	}
	return err
}

func (e *ebpfPlane) flows() (uint64, error) { return entries(e.lab.Nodes[0], usage.Snat) }

// entries is how many flows the programs say that a table has.
func entries(node *lab.Node, table usage.Table) (n uint64, err error) {
	m, err := usage.Open(bpffs.Dir(node.BPFFS()).Map(usage.Name))
	if err != nil {
		return 0, fmt.Errorf("usage of %s: %w", node.Name, err)
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	v, err := m.Get(usage.Key{Table: table})
	return v.Entries, err
}

package modes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/journal"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// waitForPeers waits until all other nodes are in a node's map and, for the node's own traffic to their pods, routes.
func waitForPeers(ctx context.Context, node *lab.Node, want int) error {
	var h *device.Handle
	err := node.Do(func() (err error) {
		h, err = device.Open()
		return err
	})
	if err != nil {
		return err
	}
	defer h.Close()
	for {
		routes, err := h.OwnRoutes()
		if err != nil {
			return err
		}
		remote := 0
		for _, r := range routes {
			if r.Gateway.IsValid() && !r.Unreachable {
				remote++
			}
		}
		known := Known(node)
		if known == want && remote == want {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the agent of %s knows %d other nodes and has %d routes to them, want %d: %w\n%s",
				node.Name, known, remote, want, ctx.Err(), node.LogTail(10))
		case <-time.After(20 * time.Millisecond): // neither a map nor the agent tells when it is complete
		}
	}
}

// Known counts other nodes' podCIDRs in a node's map; none as long as there is no map.
func Known(node *lab.Node) (n int) {
	table, err := destinations.Open(bpffs.Dir(node.BPFFS()).Map(destinations.Name))
	if err != nil {
		return 0
	}
	defer table.Close()
	for entry, err := range table.All() {
		if err == nil && entry.Value.Kind == destinations.PodCIDR {
			n++
		}
	}
	return n
}

// longer than any flow lives.
const longer = 48 * time.Hour

// sweepAll has the agent's own sweep believe that it is two days later, when every flow has ended.
func sweepAll(node *lab.Node) (err error) {
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

// Program is what the kernel has counted of one BPF program, on both nodes, while kernel.bpf_stats_enabled was set.
type Program struct {
	RunTime time.Duration
	Runs    uint64
}

// Programs are the network's BPF programs by name; none in the classical modes.
func (n *Network) Programs() (map[string]Program, error) {
	all := map[string]Program{}
	for _, node := range n.lab.Nodes {
		pins, err := filepath.Glob(filepath.Join(node.BPFFS(), "progs", "*"))
		if err != nil {
			return nil, fmt.Errorf("list the programs of %s: %w", node.Name, err)
		}
		for _, pin := range pins {
			program, err := ebpf.LoadPinnedProgram(pin, &ebpf.LoadPinOptions{ReadOnly: true})
			if errors.Is(err, os.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, fmt.Errorf("open program %s: %w", pin, err)
			}
			stats, err := program.Stats()
			if err := errors.Join(err, program.Close()); err != nil {
				return nil, fmt.Errorf("statistics of program %s: %w", pin, err)
			}
			sum := all[filepath.Base(pin)]
			all[filepath.Base(pin)] = Program{sum.RunTime + stats.Runtime, sum.Runs + stats.RunCount}
		}
	}
	return all, nil
}

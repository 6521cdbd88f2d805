package modes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/journal"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// ownTunnel is the device of this project's agents.
const ownTunnel = "ec-vxlan"

// waitForPeers waits until all other nodes are in a node's map and, for the node's own traffic to their pods, routes.
func waitForPeers(ctx context.Context, node *lab.Node, want int) error {
	family := [wire.Families]int{unix.AF_INET, unix.AF_INET6}[wire.FamilyOf(node.Addr())]
	for {
		routes, err := node.Netlink().RouteList(nil, family)
		if err != nil {
			return fmt.Errorf("list the routes of %s: %w", node.Name, err)
		}
		tunnel, err := node.Netlink().LinkByName(ownTunnel)
		if err != nil {
			return fmt.Errorf("find %s on %s: %w", ownTunnel, node.Name, err)
		}
		remote := 0
		for _, r := range routes {
			if (r.Gw != nil || r.LinkIndex == tunnel.Attrs().Index) && r.Dst != nil && !r.Dst.IP.IsUnspecified() && r.Protocol != unix.RTPROT_KERNEL {
				remote++
			}
		}
		known := Known(node)
		if known == want && remote == want {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("the agent of %s knows %d other nodes and has %d routes to them, want %d: %w\n%s",
				node.Name, known, remote, want, ctx.Err(), node.LogTail(10))
		}
		time.Sleep(20 * time.Millisecond) // neither a map nor the agent tells when it is complete
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

// sweeps is how often the tables are swept until they are empty: a sweep of the agent's at the same time writes its candidates over ours.
const sweeps = 10

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
	for range sweeps {
		if empty, err := sweepOnce(node, c); err != nil || empty {
			return err
		}
	}
	return fmt.Errorf("flows are left in table %s after %d sweeps", usage.Snat, sweeps)
}

// sweepOnce says whether the tables of flows that are translated are empty afterwards.
func sweepOnce(node *lab.Node, c datapath.Collector) (empty bool, err error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return false, fmt.Errorf("read the clock: %w", err)
	}
	for table := range usage.Tables {
		if _, err := c.SweepAt(table, uint64(now.Nano()+int64(longer)), false); err != nil {
			return false, fmt.Errorf("sweep table %s: %w", table, err)
		}
	}
	counted, err := entries(node, usage.Snat)
	empty = counted == 0
	for _, name := range []string{snat.Name, snat.ReverseName} {
		var key []byte
		empty = empty && errors.Is(c.Maps[name].NextKey(nil, &key), ebpf.ErrKeyNotExist)
	}
	return empty, err
}

// makeClients has the programs take every pod, but not the world, for one that has sent to a Service, as each has that ever asked for a name: from then on
// they look for its packets among flows to Services.
func makeClients(node *lab.Node) error {
	m, err := devices.Open(bpffs.Dir(node.BPFFS()).Map(devices.Name))
	if err != nil {
		return fmt.Errorf("devices of %s: %w", node.Name, err)
	}
	defer m.Close()
	all, err := m.Content()
	for k, v := range all {
		v.Flags = devices.Client
		if k.Ifindex == devices.World {
			v.Flags = 0
		}
		err = errors.Join(err, m.Put(k, v))
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

// runTime and runs begin the names of what the kernel counts of BPF programs while kernel.bpf_stats_enabled is set: nanoseconds, and how often each ran.
const (
	runTime = "run time of "
	runs    = "runs of "
)

// countPrograms adds those of a node's programs.
func countPrograms(into Counters, node *lab.Node) error {
	pins, err := filepath.Glob(filepath.Join(node.BPFFS(), "progs", "*"))
	if err != nil {
		return fmt.Errorf("list the programs of %s: %w", node.Name, err)
	}
	for _, pin := range pins {
		program, err := ebpf.LoadPinnedProgram(pin, &ebpf.LoadPinOptions{ReadOnly: true})
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("open program %s: %w", pin, err)
		}
		stats, err := program.Stats()
		if err := errors.Join(err, program.Close()); err != nil {
			return fmt.Errorf("statistics of program %s: %w", pin, err)
		}
		into[runTime+filepath.Base(pin)] += uint64(stats.Runtime)
		into[runs+filepath.Base(pin)] += stats.RunCount
	}
	return nil
}

// RunTimes are the seconds that each BPF program ran for one of so many packets that arrived: the programs also ran for the few that were lost.
func RunTimes(before, after Counters, packets float64) (map[string]float64, error) {
	took, times := map[string]float64{}, uint64(0)
	for name, now := range after {
		if program, ok := strings.CutPrefix(name, runTime); ok {
			took[program] = time.Duration(now-before[name]).Seconds() / packets
			times += after[runs+program] - before[runs+program]
		}
	}
	if float64(times) < packets {
		return nil, fmt.Errorf("the programs ran %d times for %.0f packets", times, packets)
	}
	return took, nil
}

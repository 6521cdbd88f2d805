package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/load"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// patience is how long a sample may take beyond what is expected, several times over. Something hangs then.
const patience = 60 * time.Second

// machine takes samples on networks that stand side by side.
type machine struct {
	profile  profile
	networks map[string]*modes.Network
	agents   *agents
	// grown is what a sweep has left each network at; none: at a size that is not known.
	grown map[string]size
	pods  int // the number of the next pod
	log   *slog.Logger
}

// afterGrowth is for what goes on after a table is complete: memory is collected, old rules are freed.
const afterGrowth = 300 * time.Millisecond

// size is what sweeps vary of a network.
type size struct{ nodes, services int }

func smallest() size { return size{nodes: 2} }

// newMachine builds all networks. Whatever is built when an error comes is removed.
func newMachine(ctx context.Context, p plan, log *slog.Logger) (m *machine, err error) {
	m = &machine{profile: p.profile, networks: map[string]*modes.Network{}, grown: map[string]size{}, log: log}
	m.agents = &agents{nodes: p.profile.nodes, changes: p.profile.changes}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close())
		}
	}()
	for _, name := range p.modes {
		if err := context.Cause(ctx); err != nil {
			return m, err
		}
		log.Info("building", "mode", name)
		network, err := modes.Build(ctx, name, log)
		if err != nil {
			return m, err
		}
		m.networks[name], m.grown[name] = network, smallest()
	}
	return m, nil
}

func (m *machine) close() error {
	err := m.agents.close()
	for name, network := range m.networks {
		if closed := network.Close(); closed != nil {
			err = errors.Join(err, fmt.Errorf("remove mode %s: %w", name, closed))
		}
	}
	return err
}

// take implements sampler.
func (m *machine) take(ctx context.Context, i item, mode string) (result.Sample, error) {
	ctx, cancel := context.WithTimeout(ctx, 4*i.takes+patience)
	defer cancel()
	network := m.networks[mode]
	if err := m.grow(ctx, mode, network, i); err != nil {
		return result.Sample{}, err
	}
	if i.path != "" {
		if err := network.Forget(); err != nil {
			return result.Sample{}, err
		}
	}
	switch i.workload {
	case "cni":
		return m.oneByOne(ctx, network)
	case "cni10":
		return m.tenAtOnce(ctx, network)
	case "agent":
		return m.agents.complete(ctx)
	case "agent-api":
		return m.agents.completeOverAPI(ctx)
	case "change":
		return m.agents.changeInFile(ctx, fewNodes)
	case "change5000":
		return m.agents.changeInFile(ctx, m.agents.nodes)
	case "change-api":
		return m.agents.changeOverAPI(ctx, m.agents.nodes)
	case "live":
		return m.among(ctx, network, i)
	case "bpf":
		return m.runTime(ctx, network, i)
	}
	return m.traffic(ctx, network, i)
}

// resizable is what sweeps need of a network.
type resizable interface {
	SetNodes(ctx context.Context, k int) error
	SetServices(ctx context.Context, k int) error
}

// grow brings a network to the size that an item wants.
func (m *machine) grow(ctx context.Context, mode string, network resizable, i item) error {
	want := smallest()
	switch i.workload {
	case "nodes":
		want.nodes = i.point
	case "services", "services-udp":
		want.services = i.point
	}
	have, known := m.grown[mode]
	if known && want == have {
		return nil
	}
	delete(m.grown, mode) // until it is done: what fails on the way leaves neither size
	if !known || want.nodes != have.nodes {
		if err := network.SetNodes(ctx, want.nodes); err != nil && !errors.Is(err, modes.ErrNotApplicable) {
			return fmt.Errorf("make mode %s know %d nodes: %w", mode, want.nodes, err)
		}
	}
	if !known || want.services != have.services {
		// A mode that has no rules to walk is measured as it is.
		if err := network.SetServices(ctx, want.services); err != nil && !errors.Is(err, modes.ErrNotApplicable) {
			return fmt.Errorf("give mode %s %d Services: %w", mode, want.services, err)
		}
	}
	m.grown[mode] = want
	return pause(ctx, afterGrowth)
}

// target is a path through a network, as the generators take it.
func (m *machine) target(network *modes.Network, path string) (load.Target, error) {
	client, server, ok := network.Ends(modes.Path(path))
	if !ok {
		return load.Target{}, fmt.Errorf("mode %s has no path %q", network.Mode, path)
	}
	return load.Target{
		Client: client.Netns, Server: server.Netns, Address: server.Address,
		ClientCPU: 0, ServerCPU: min(1, runtime.NumCPU()-1),
		Duration: m.profile.duration, Warmup: m.profile.warmup,
	}, nil
}

// traffic runs a generator, and has the network prove that all of its packets went where they should, and nothing else did. An error that matches
// load.ErrStarved has a sample beside it, which is proven too.
func (m *machine) traffic(ctx context.Context, network *modes.Network, i item) (result.Sample, error) {
	target, err := m.target(network, i.path)
	if err != nil {
		return result.Sample{}, err
	}
	before, err := count(network)
	if err != nil {
		return result.Sample{}, fmt.Errorf("count before the sample: %w", err)
	}
	sample, carried, disturbed := generate(ctx, i.workload, target)
	if disturbed != nil && !errors.Is(disturbed, load.ErrNotMeasured) {
		return result.Sample{}, disturbed
	}
	after, err := count(network)
	if err != nil {
		return result.Sample{}, fmt.Errorf("count after the sample: %w", err)
	}
	path := modes.Path(i.path)
	err = proven(disturbed, after.backlog-before.backlog,
		func() error { return network.Carried(before.network, after.network, path, carried) },
		func() error { return network.Intact(before.network, after.network, path) })
	if err != nil && !errors.Is(err, load.ErrStarved) {
		sample = result.Sample{}
	}
	return sample, err
}

// proven is what becomes of a sample. What the network did wrong is final, also where the generator was disturbed: taking a sample again must not
// hide that the network has dropped what is missing. What went wrong on the machine is worth another try.
func proven(disturbed error, backlog uint64, carried, intact func() error) error {
	check := carried
	if disturbed != nil && !errors.Is(disturbed, load.ErrStarved) {
		check = intact // nobody knows what was sent
	}
	full := fmt.Sprintf("%d packets of this machine found the queue of a CPU full", backlog)
	if err := check(); err != nil {
		if backlog > 0 { // which every pair of a network's own links has, too
			err = fmt.Errorf("%w; %s", err, full)
		}
		return fmt.Errorf("the packets did not go the way that the sample claims: %w", err)
	}
	if backlog > 0 {
		return fmt.Errorf("%w: %s", load.ErrNotMeasured, full)
	}
	return disturbed
}

// counts are what a network and the machine have counted.
type counts struct {
	network modes.Counters
	backlog uint64
}

func count(network *modes.Network) (c counts, err error) {
	if c.network, err = network.Count(); err != nil {
		return c, err
	}
	table, err := os.ReadFile("/proc/net/softnet_stat")
	if err != nil {
		return c, fmt.Errorf("read what the CPUs' queues have dropped: %w", err)
	}
	c.backlog, err = backlogDrops(string(table))
	return c, err
}

// backlogDrops sums the second number of each CPU's line: packets that its queue had no room for.
func backlogDrops(table string) (sum uint64, err error) {
	for line := range strings.Lines(table) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			return 0, fmt.Errorf("parse /proc/net/softnet_stat: %q has no second number", line)
		}
		n, err := strconv.ParseUint(fields[1], 16, 64)
		if err != nil {
			return 0, fmt.Errorf("parse /proc/net/softnet_stat: %w", err)
		}
		sum += n
	}
	return sum, nil
}

// among measures one flow while many others live: by the network's own count, before it and after.
func (m *machine) among(ctx context.Context, network *modes.Network, i item) (sample result.Sample, err error) {
	target, err := m.target(network, i.path)
	if err != nil {
		return result.Sample{}, err
	}
	held, err := load.HoldFlows(ctx, target, i.point)
	if err != nil {
		return result.Sample{}, err
	}
	defer func() { err = errors.Join(err, held.Close()) }()
	if err := holds(network, i.point); err != nil {
		return result.Sample{}, err
	}
	sample, disturbed := m.traffic(ctx, network, i)
	if sample.Values == nil {
		return result.Sample{}, disturbed
	}
	if err := errors.Join(holds(network, i.point), held.Refresh(ctx)); err != nil {
		return result.Sample{}, err
	}
	return sample, disturbed
}

// others is how many flows beside those that are held a table may have: the generators' own.
const others = 50

// holds is an error unless the network's table has so many flows.
func holds(network *modes.Network, want int) error {
	have, err := network.Flows()
	if err == nil && (have < uint64(want) || have > uint64(want)+others) {
		err = fmt.Errorf("the table of mode %s has %d flows, want %d to %d", network.Mode, have, want, want+others)
	}
	return err
}

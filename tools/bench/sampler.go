package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/load"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// hangTimeout is how long a sample may take beyond four times what is expected: then something hangs.
const hangTimeout = 60 * time.Second

// afterGrowth is for what goes on after a table is complete: memory is collected, old rules are freed.
const afterGrowth = 300 * time.Millisecond

// machine takes samples on networks that stand side by side.
type machine struct {
	profile  profile
	networks map[string]*modes.Network
	agents   agents
	scale    *scale // nil before the first sample that wants it
	pods     int    // the number of the next pod
}

// newMachine builds all networks. Whatever is built when an error comes is removed.
func newMachine(ctx context.Context, p plan, log *slog.Logger) (m *machine, err error) {
	m = &machine{profile: p.profile, networks: map[string]*modes.Network{}, agents: agents{changes: p.profile.changes}}
	for _, name := range p.modes {
		log.Info("building", "mode", name)
		network, err := modes.Build(ctx, name, log)
		if err != nil {
			return nil, errors.Join(err, m.close())
		}
		m.networks[name] = network
	}
	return m, nil
}

func (m *machine) close() error {
	err := m.agents.close()
	if m.scale != nil {
		err = errors.Join(err, m.scale.close())
	}
	for _, network := range m.networks {
		err = errors.Join(err, network.Close())
	}
	return err
}

// binaries are the files that the networks' programs are started from.
func (m *machine) binaries(run *result.Run) (files []string) {
	for mode, network := range m.networks {
		some, err := network.Binaries()
		if err != nil {
			run.Environment.Warnings = append(run.Environment.Warnings, fmt.Sprintf("what mode %s runs is not known: %v", mode, err))
		}
		files = append(files, some...)
	}
	return files
}

// take takes a sample.
func (m *machine) take(ctx context.Context, t task) (result.Sample, error) {
	ctx, cancel := context.WithTimeout(ctx, 4*t.takes+hangTimeout)
	defer cancel()
	network := m.networks[t.mode]
	if err := grow(ctx, network, t); err != nil {
		return result.Sample{}, err
	}
	switch t.Kind {
	case result.Plugins:
		return m.plugins(ctx, network, t.Size)
	case result.Starts, result.Changes:
		return m.agents.measure(ctx, t.Workload, t.mode)
	case result.Rests, result.Status, result.Crowd:
		return m.crowd(ctx, t)
	}
	if err := errors.Join(network.Forget(), network.Resolve(ctx)); err != nil {
		return result.Sample{}, err
	}
	switch t.Kind {
	case result.Closing:
		return m.closing(ctx, network, t)
	case result.Open:
		return m.holding(ctx, network, t)
	}
	if t.Kind == result.Programs { // which costs them some of their speed
		stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
		if err != nil {
			return result.Sample{}, fmt.Errorf("have the kernel measure BPF programs: %w", err)
		}
		defer stats.Close()
	}
	return m.traffic(ctx, network, t)
}

// grow brings a network to the size that a task wants.
func grow(ctx context.Context, network *modes.Network, t task) error {
	nodes, services := 2, modes.Services{Number: result.OrdinaryServices}
	switch t.Axis {
	case "nodes":
		nodes = t.point
	case "Services":
		services.Number = t.point
	}
	if t.served() {
		services = modes.Services{Number: max(services.Number, 1), Served: t.path}
	}
	changed, err := network.Resize(ctx, nodes, services)
	if err != nil || !changed {
		return err
	}
	return pause(ctx, afterGrowth)
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// traffic runs a generator, and has the network prove that all of its packets went where they should, and nothing else did. An error that matches
// load.ErrStarved has a sample beside it, which is proven too.
func (m *machine) traffic(ctx context.Context, network *modes.Network, t task) (sample result.Sample, err error) {
	leave, err := network.Enter(t.path)
	if err != nil {
		return result.Sample{}, err
	}
	defer func() { err = errors.Join(err, leave()) }()
	before, err := network.Count()
	if err != nil {
		return result.Sample{}, fmt.Errorf("before the sample: %w", err)
	}
	sample, carried, disturbed := generate(ctx, t.Workload, m.target(network, t))
	carried.Served = t.served()
	if disturbed != nil && !errors.Is(disturbed, load.ErrNotMeasured) {
		return result.Sample{}, disturbed
	}
	after, err := network.Count()
	if err != nil {
		return result.Sample{}, fmt.Errorf("after the sample: %w", err)
	}
	err = proven(disturbed, after[modes.Backlog]-before[modes.Backlog],
		func() error { return network.Carried(before, after, t.path, carried) },
		func() error { return network.Intact(before, after, t.path) })
	if err != nil && !errors.Is(err, load.ErrStarved) {
		return result.Sample{}, err
	}
	if t.Kind == result.Programs {
		took, err := modes.RunTimes(before, after, sample.Values[result.Sent]-sample.Values[result.Lost])
		if err != nil {
			return result.Sample{}, err
		}
		took[result.BPFPer], took[result.Delayed] = sum(took), sample.Values[result.Delayed]
		sample.Values = took
	}
	return sample, err
}

// target is between which ends a sample is taken. Where there is a Service, the server has its ports, also when the client does not send to it.
func (m *machine) target(network *modes.Network, t task) load.Target {
	client, server := network.Ends(t.path)
	target := load.Target{
		Client: client, Server: server, ClientCPU: 0, ServerCPU: min(1, runtime.NumCPU()-1), Duration: m.profile.duration, Warmup: m.profile.warmup,
	}
	if t.Served {
		target.FirstPort, target.Ports = modes.TargetPort, modes.ServicePorts
	}
	if t.served() {
		target.Via = network.Frontend(t.path)
	}
	return target
}

func sum(values map[string]float64) (sum float64) {
	for _, v := range values {
		sum += v
	}
	return sum
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

// superpacket is the most that one packet carries before it is cut into segments.
const superpacket = 1 << 16

// generate runs the generator of a workload, and tells what went between client and server. An error that matches load.ErrStarved has a sample beside it.
func generate(ctx context.Context, w result.Workload, t load.Target) (sample result.Sample, carried modes.Traffic, err error) {
	var r load.Result
	switch w.Kind {
	case result.Datagrams, result.Programs:
		r, err = load.UDP(ctx, t, w.Size)
		carried = modes.Traffic{Forth: r.Sent, Exact: true, Flows: 1}
	case result.Stream:
		r, err = load.Stream(ctx, t)
		carried = modes.Traffic{Forth: r.Sent / superpacket, Bytes: r.Sent, Flows: 1}
	case result.Requests:
		r, err = load.RequestResponse(ctx, t)
		carried = modes.Traffic{Forth: r.Sent, Back: r.Sent, Flows: 1}
	case result.Connections:
		r, err = load.Connect(ctx, t)
		// SYN, request and reset one way, SYN and answer the other, at the least.
		carried = modes.Traffic{Forth: 3 * r.Sent, Back: 2 * r.Sent, Flows: r.Sent}
	case result.Flows:
		r, err = load.NewFlows(ctx, t)
		carried = modes.Traffic{Forth: r.Sent, Back: r.Sent - r.Lost, Exact: true, Flows: r.Sent}
	default:
		err = fmt.Errorf("workload %s has no generator", w.Name)
	}
	if err == nil || errors.Is(err, load.ErrStarved) {
		sample = filed(w, r)
	}
	return sample, carried, err
}

// filed is a result as the report reads it: rates in what is counted a second, times in seconds for one of that.
func filed(w result.Workload, r load.Result) result.Sample {
	u := r.Usage
	each := func(d time.Duration) float64 { return d.Seconds() / float64(max(r.Counted, 1)) }
	s := result.Sample{Values: map[string]float64{
		result.Rate: r.Rate, result.Cost: 1 / r.Rate, result.Sent: float64(r.Sent), result.Lost: float64(r.Lost), result.Delayed: u.Delayed(),
		result.CPUPer: each(u.Kernel), result.SoftIRQ: each(u.SoftIRQ), result.ClientCPU: each(u.Client.Busy), result.ServerCPU: each(u.Server.Busy),
	}}
	if w.Kind == result.Flows { // whose window is too short for the ticks of the machine's CPU time
		s.Values[result.CPUPer] = each(u.Client.Busy + u.Server.Busy)
	}
	if w.Kind == result.Requests {
		seconds := make([]float64, len(r.Latencies))
		for i, d := range r.Latencies {
			seconds[i] = d.Seconds()
		}
		for name, q := range map[string]float64{result.P50: 0.5, result.P99: 0.99, result.P999: 0.999} {
			s.Values[name] = result.Quantile(seconds, q)
		}
	}
	return s
}

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/load"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// superpacket is the most that one packet carries before it is cut into segments.
const superpacket = 1 << 16

// generate runs the generator of a workload. packets is how many went from client to server at the least.
func generate(ctx context.Context, workload string, t load.Target) (sample result.Sample, packets uint64, err error) {
	switch workload {
	case "udp64", "nodes", "services", "live", "bpf":
		return datagrams(ctx, t, 64)
	case "udp1400":
		return datagrams(ctx, t, 1400)
	case "tcp1":
		return stream(ctx, t, 1)
	case "tcp4":
		return stream(ctx, t, 4)
	case "rr":
		return requests(ctx, t)
	case "crr":
		r, err := load.Connect(ctx, t)
		// SYN, request and FIN at the least.
		return rate(r.Rate, r.Connections, r.Usage), 3 * r.Total, err
	case "flows":
		r, err := load.NewFlows(ctx, t)
		sample := rate(r.Rate, r.Flows, r.Usage)
		// The window is too short for the ticks of the machine's CPU time.
		sample.Values[result.CPUPer] = sample.Values["cpu-client"] + sample.Values["cpu-server"]
		return sample, r.Total - r.Lost, err
	}
	return result.Sample{}, 0, fmt.Errorf("workload %s has no generator", workload)
}

func datagrams(ctx context.Context, t load.Target, size int) (result.Sample, uint64, error) {
	r, err := load.UDP(ctx, t, size)
	sample := rate(r.Rate, r.Packets, r.Usage)
	if r.Rate > 0 {
		sample.Values[result.Cost] = 1 / r.Rate
	}
	sample.Values["lost"] = float64(r.Lost)
	return sample, r.Received, err
}

func stream(ctx context.Context, t load.Target, connections int) (result.Sample, uint64, error) {
	r, err := load.Stream(ctx, t, connections)
	sample := rate(r.Rate, r.Bytes, r.Usage)
	sample.Values["retransmitted"] = float64(r.Retransmitted)
	return sample, r.Bytes / superpacket, err
}

func requests(ctx context.Context, t load.Target) (result.Sample, uint64, error) {
	r, err := load.RequestResponse(ctx, t)
	sample := rate(r.Rate, r.Transactions, r.Usage)
	sample.Values[result.P50], sample.Values[result.P99] = r.P50.Seconds(), r.P99.Seconds()
	sample.Values[result.P999] = r.P999.Seconds()
	var d result.Distribution
	if r.Histogram != nil {
		for _, b := range r.Histogram.Buckets() {
			d = append(d, result.Step{Seconds: b.Upper.Seconds(), Count: b.Count})
		}
	}
	sample.Distributions = map[string]result.Distribution{"rtt": d}
	return sample, r.Total, err
}

// rate files how much was done in a second, and the CPU time of the whole machine that one of it took, in seconds. The generators' own
// time is in it, in all modes alike.
func rate(perSecond float64, count uint64, usage load.Usage) result.Sample {
	values := map[string]float64{result.Rate: perSecond}
	if count > 0 {
		cpus := usage.Machine()
		each := func(d time.Duration) float64 { return d.Seconds() / float64(count) }
		values[result.CPUPer] = each(cpus.Busy())
		values["cpu-user"], values["cpu-system"] = each(cpus.User+cpus.Nice), each(cpus.System)
		values["cpu-softirq"], values["cpu-steal"] = each(cpus.SoftIRQ+cpus.IRQ), each(cpus.Steal)
		values["cpu-client"] = each(usage.Client.User + usage.Client.System)
		values["cpu-server"] = each(usage.Server.User + usage.Server.System)
	}
	return result.Sample{Values: values}
}

// runTime has the kernel measure our programs, which costs them some of their speed: a sample of its own.
func (m *machine) runTime(ctx context.Context, network *modes.Network, i item) (result.Sample, error) {
	stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		return result.Sample{}, fmt.Errorf("have the kernel measure BPF programs: %w", err)
	}
	defer stats.Close()
	before, err := network.Programs()
	if err != nil {
		return result.Sample{}, fmt.Errorf("read the programs' run time: %w", err)
	}
	target, err := m.target(network, i.path)
	if err != nil {
		return result.Sample{}, err
	}
	got, err := load.UDP(ctx, target, 64)
	if err != nil {
		return result.Sample{}, err
	}
	after, err := network.Programs()
	if err != nil {
		return result.Sample{}, fmt.Errorf("read the programs' run time: %w", err)
	}
	return perProgram(before, after, got.Received)
}

// perProgram is the run time per packet, of each program and in all. It is of packets that arrived: the programs also ran for the few that were lost.
func perProgram(before, after []modes.Program, packets uint64) (result.Sample, error) {
	past := map[string]modes.Program{}
	for _, p := range before {
		past[p.Node+" "+p.Name] = p
	}
	values := map[string]float64{}
	var runs uint64
	for _, p := range after {
		name := p.Node + " " + p.Name
		took := (p.RunTime - past[name].RunTime).Seconds() / float64(max(packets, 1))
		values[name] = took
		values[result.BPFPer] += took
		runs += p.Runs - past[name].Runs
	}
	if runs < packets {
		return result.Sample{}, fmt.Errorf("the programs ran %d times for %d packets", runs, packets)
	}
	return result.Sample{Values: values}, nil
}

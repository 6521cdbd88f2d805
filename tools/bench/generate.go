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

// generate runs the generator of a workload, and tells what went between client and server. An error that matches load.ErrStarved has a sample beside it.
func generate(ctx context.Context, workload string, t load.Target) (result.Sample, modes.Traffic, error) {
	switch workload {
	case "udp64", "nodes", "services-udp", "live", "bpf":
		return datagrams(ctx, t, 64)
	case "udp1400":
		return datagrams(ctx, t, 1400)
	case "tcp1":
		return stream(ctx, t, 1)
	case "tcp4":
		return stream(ctx, t, 4)
	case "rr":
		return requests(ctx, t)
	case "crr", "services":
		return connections(ctx, t)
	case "flows":
		return flows(ctx, t)
	}
	return result.Sample{}, modes.Traffic{}, fmt.Errorf("workload %s has no generator", workload)
}

func datagrams(ctx context.Context, t load.Target, size int) (result.Sample, modes.Traffic, error) {
	r, err := load.UDP(ctx, t, size)
	sample := rate(r.Rate, r.Packets, r.Usage)
	sample.Values["sent"], sample.Values["lost"] = float64(r.Sent), float64(r.Lost)
	return sample, modes.Traffic{Forth: r.Sent, Exact: true, Flows: 1}, err
}

func stream(ctx context.Context, t load.Target, count int) (result.Sample, modes.Traffic, error) {
	r, err := load.Stream(ctx, t, count)
	sample := rate(r.Rate, r.Bytes, r.Usage)
	sample.Values["retransmitted"] = float64(r.Retransmitted)
	return sample, modes.Traffic{Forth: r.Sent / superpacket, Bytes: r.Sent, Flows: uint64(count)}, err
}

func requests(ctx context.Context, t load.Target) (result.Sample, modes.Traffic, error) {
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
	return sample, modes.Traffic{Forth: r.Total, Back: r.Total, Flows: 1}, err
}

func connections(ctx context.Context, t load.Target) (result.Sample, modes.Traffic, error) {
	r, err := load.Connect(ctx, t)
	sample := rate(r.Rate, r.Connections, r.Usage)
	sample.Values["retransmitted"] = float64(r.Resent)
	// SYN, request and reset one way, SYN and answer the other, at the least.
	return sample, modes.Traffic{Forth: 3 * r.Total, Back: 2 * r.Total, Flows: r.Total}, err
}

func flows(ctx context.Context, t load.Target) (result.Sample, modes.Traffic, error) {
	r, err := load.NewFlows(ctx, t)
	sample := rate(r.Rate, r.Flows, r.Usage)
	sample.Values["sent"], sample.Values["lost"] = float64(r.Total), float64(r.Lost)
	// The window is too short for the ticks of the machine's CPU time. That of the ends cannot be told apart by kernel and program in it either.
	sample.Values[result.CPUPer] = sample.Values["cpu-client"] + sample.Values["cpu-server"]
	return sample, modes.Traffic{Forth: r.Total, Back: r.Total - r.Lost, Exact: true, Flows: r.Total}, err
}

// rate files how much was done in a second, and the CPU time of the machine's kernel that one of it took, in seconds: system calls, interrupts
// and softirqs. What the generators' own programs took is filed apart.
func rate(perSecond float64, count uint64, usage load.Usage) result.Sample {
	values := map[string]float64{result.Rate: perSecond, result.Delayed: usage.Delayed()}
	if count > 0 {
		cpus := usage.Machine()
		each := func(d time.Duration) float64 { return d.Seconds() / float64(count) }
		values[result.CPUPer] = each(cpus.System + cpus.SoftIRQ + cpus.IRQ)
		values["cpu-user"], values["cpu-system"] = each(cpus.User+cpus.Nice), each(cpus.System)
		values["cpu-softirq"], values["cpu-steal"] = each(cpus.SoftIRQ+cpus.IRQ), each(cpus.Steal)
		values["cpu-client"] = each(usage.Client.User + usage.Client.System)
		values["cpu-server"] = each(usage.Server.User + usage.Server.System)
	}
	if perSecond > 0 {
		values[result.Cost] = 1 / perSecond
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
	sample, err := m.traffic(ctx, network, i)
	if sample.Values == nil {
		return result.Sample{}, err
	}
	after, failed := network.Programs()
	if failed != nil {
		return result.Sample{}, fmt.Errorf("read the programs' run time: %w", failed)
	}
	took, failed := perProgram(before, after, uint64(sample.Values["sent"]-sample.Values["lost"]))
	if failed != nil {
		return result.Sample{}, failed
	}
	took.Values[result.Delayed] = sample.Values[result.Delayed]
	return took, err
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

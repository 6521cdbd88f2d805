package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/lab/shortconn"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/load"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// ways are what the generator calls the ways of closing.
var ways = map[result.Close]shortconn.Way{
	result.ResetByClient: shortconn.ResetByClient, result.ResetByServer: shortconn.ResetByServer,
	result.FinByClient: shortconn.FinByClient, result.FinByServer: shortconn.FinByServer, result.Question: shortconn.Question,
}

// place is a port outside that no earlier sample has used: connections of that one may be remembered there.
func place(server *lab.Namespace) netip.AddrPort {
	return netip.AddrPortFrom(server.Addr(), uint16(10_000+rand.IntN(20_000)))
}

// closing measures short connections. Those that fail are part of the result.
func (m *machine) closing(ctx context.Context, network *modes.Network, t task) (result.Sample, error) {
	first, server := network.Ends(t.path)
	o := shortconn.Options{Clients: []*lab.Namespace{first}, Server: server, At: place(server), Way: ways[t.Close], For: m.profile.sustained}
	switch {
	case t.served(): // each way of closing has a port of the Service, datagrams that of another protocol
		i := uint16(slices.Index(result.Closes(), t.Close) % modes.ServicePorts)
		to := network.Frontend(t.path)
		o.At, o.To = netip.AddrPortFrom(server.Addr(), modes.TargetPort+i), netip.AddrPortFrom(to.Addr(), to.Port()+i)
	case t.point > 1:
		var err error
		if o.Clients, err = network.Pods(ctx, t.point); err != nil {
			return result.Sample{}, err
		}
	}
	before, err := network.Count()
	if err != nil {
		return result.Sample{}, fmt.Errorf("before the sample: %w", err)
	}
	r, err := shortconn.Run(ctx, o)
	if err != nil {
		return result.Sample{}, err
	}
	if r.Within == 0 {
		return result.Sample{}, fmt.Errorf("%w: no connection completed: %s", load.ErrNotMeasured, r)
	}
	after, err := network.Count()
	if err != nil {
		return result.Sample{}, fmt.Errorf("after the sample: %w", err)
	}
	// The first client's packets are a part of all, and each connection has two at least.
	err = network.Took(before, after, t.path, modes.Traffic{Forth: r.Completed / uint64(len(o.Clients)), Served: t.served()})
	return result.Sample{Values: map[string]float64{
		result.Rate: r.Rate(), result.Failed: float64(r.Failed), result.Stalled: float64(r.Stalled), result.Sent: float64(r.Opened),
	}}, err
}

// The connections that pods try to hold open, of a workload whose first pod tries tried.
const (
	tried     = 32_000
	trySecond = 8192
	tryPlace  = 50_000
	tryPlaces = 62_000
)

// holding measures how many connections stay open beside each other.
func (m *machine) holding(ctx context.Context, network *modes.Network, t task) (sample result.Sample, err error) {
	pods, err := network.Pods(ctx, result.ManyPods)
	if err != nil {
		return result.Sample{}, err
	}
	_, server := network.Ends(t.path)
	var places [2]*shortconn.Holder
	var at [2]netip.AddrPort
	defer func() {
		for _, p := range places {
			if p != nil {
				p.Close()
			}
		}
	}()
	for i := range places {
		at[i] = place(server)
		if places[i], err = shortconn.Hold(server, at[i]); err != nil {
			return result.Sample{}, err
		}
	}
	all, values := 0, map[string]float64{}
	for _, step := range []struct {
		metric        string
		pods          []*lab.Namespace
		place, within int
	}{{result.FirstPod, pods[:1], 0, tried}, {result.SecondPod, pods[1:2], 0, tried + trySecond}, {result.OnePlace, pods[2:], 0, tryPlace}, {result.TwoPlaces, pods[2:], 1, tryPlaces}} {
		want, before := step.within*t.Size/tried, all
		if step.metric == result.SecondPod {
			want = all + trySecond*t.Size/tried
		}
		for _, pod := range step.pods {
			opened, err := places[step.place].Open(pod, at[step.place], max(want-all, 0))
			if err != nil {
				return result.Sample{}, err
			}
			all += opened
		}
		values[step.metric] = float64(all)
		if len(step.pods) == 1 {
			values[step.metric] = float64(all - before)
		}
	}
	return result.Sample{Values: values}, errors.Join(places[0].Check(), places[1].Check())
}

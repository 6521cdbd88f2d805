package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

const (
	// settled is how long the agent is left alone before its memory is read.
	settled = time.Second
	// glance is how often a map is looked at.
	glance = 100 * time.Microsecond
)

// agents measures the agent, on a node of its own.
type agents struct {
	nodes, changes int

	lab  *lab.Lab
	list []byte // all nodes, rendered once
}

func (a *agents) close() error {
	if a.lab == nil {
		return nil
	}
	return a.lab.Close()
}

// node builds the lab on first use.
func (a *agents) node(ctx context.Context) (*lab.Node, error) {
	if a.lab != nil {
		return a.lab.Nodes[0], nil
	}
	l, err := lab.New(ctx, lab.Options{Nodes: 1})
	if err != nil {
		return nil, fmt.Errorf("build a node for the agent: %w", err)
	}
	a.lab = l
	// All other nodes are on the link, as far as this one can tell.
	if err := l.Nodes[0].AddRoute(netip.MustParsePrefix("172.20.0.0/16"), netip.Addr{}, lab.Uplink); err != nil {
		return nil, err
	}
	if a.list, err = a.render(a.nodes, 0); err != nil {
		return nil, err
	}
	return l.Nodes[0], nil
}

// specs are so many nodes, this one included. The last one has another podCIDR with another variant.
func (a *agents) specs(count, variant int) []lab.NodeSpec {
	specs := a.lab.NodeSpecs()
	for i := len(specs); i < count; i++ {
		specs = append(specs, lab.NodeSpec{
			Name: fmt.Sprintf("other-%d", i), InternalIPs: []netip.Addr{otherNode(i)}, PodCIDRs: []netip.Prefix{podCIDR(i)},
		})
	}
	specs[count-1].PodCIDRs = []netip.Prefix{podCIDR(count - 1 + variant)}
	return specs
}

func (a *agents) render(count, variant int) ([]byte, error) {
	return lab.NodeListJSON(a.specs(count, variant)...)
}

// otherNode is the address of a node that is in the list only.
func otherNode(i int) netip.Addr { return netip.AddrFrom4([4]byte{172, 20, byte(i >> 8), byte(i)}) }

func podCIDR(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24)
}

// complete measures how long it takes an agent to know all nodes of a file.
func (a *agents) complete(ctx context.Context) (result.Sample, error) {
	node, err := a.node(ctx)
	if err != nil {
		return result.Sample{}, err
	}
	if err := a.lab.WriteNodesFile(a.list); err != nil {
		return result.Sample{}, err
	}
	return a.fromNothing(ctx, node)
}

// completeOverAPI measures how long it takes an agent to know all Nodes of an API server.
func (a *agents) completeOverAPI(ctx context.Context) (result.Sample, error) {
	return a.overAPI(ctx, a.nodes, func(node *lab.Node, _ *apiServer) (result.Sample, error) { return a.fromNothing(ctx, node) })
}

// fromNothing starts the agent with nothing there, and measures how long it takes until the map has every node, and what it then weighs.
func (a *agents) fromNothing(ctx context.Context, node *lab.Node) (sample result.Sample, err error) {
	started := time.Now()
	if err := node.StartAgent(); err != nil {
		return result.Sample{}, err
	}
	defer func() { err = errors.Join(err, restart(node)) }()
	if err := until(ctx, func() bool { return podCIDRs(node) >= a.nodes-1 }); err != nil {
		return result.Sample{}, fmt.Errorf("the map has %d of %d podCIDRs: %w; the agent says:\n%s", podCIDRs(node), a.nodes-1, err, node.LogTail(5))
	}
	took := time.Since(started)
	if err := pause(ctx, settled); err != nil {
		return result.Sample{}, err
	}
	now, peak, err := memory(node.AgentPID())
	if err != nil {
		return result.Sample{}, err
	}
	return result.Sample{Values: map[string]float64{"memory": now, "peak": peak, "complete": took.Seconds()}}, nil
}

// restart ends the agent and takes away all that it has left.
func restart(node *lab.Node) error {
	_, err := node.StopAgent()
	return errors.Join(err, node.Reboot())
}

// podCIDRs counts other nodes' podCIDRs in the map; none as long as there is no map.
func podCIDRs(node *lab.Node) (n int) {
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

func until(ctx context.Context, holds func() bool) error {
	for !holds() {
		if err := pause(ctx, glance); err != nil {
			return err
		}
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// memory is what a process has resident, and had at most, in bytes.
func memory(pid int) (now, peak float64, err error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, 0, fmt.Errorf("read the agent's memory: %w", err)
	}
	for line := range strings.Lines(string(status)) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		kilobytes, _ := strconv.ParseFloat(fields[1], 64)
		switch fields[0] {
		case "VmRSS:":
			now = kilobytes * 1024
		case "VmHWM:":
			peak = kilobytes * 1024
		}
	}
	if now == 0 {
		return 0, 0, fmt.Errorf("/proc/%d/status has no VmRSS", pid)
	}
	return now, peak, nil
}

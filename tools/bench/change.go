package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

const (
	// fewNodes is a list that is read in no time: of a file, all is read whenever one node changes.
	fewNodes = 10
	// between is how long nothing changes after a change: those that come thick and fast would be taken together. Where there are thousands of
	// nodes the agent looks at all of its routes again after each, longer than that; Nodes of a cluster change seconds apart.
	between     = 20 * time.Millisecond
	amongOthers = 300 * time.Millisecond
	// probing is how long a probe may be on its way, and rest the time to the next one.
	probing = 5 * time.Millisecond
	rest    = 200 * time.Microsecond

	probePort = 9000
)

// stage prepares that the last node has the podCIDR of a variant. The function returned has the agent learn of it.
type stage func(variant int) (publish func() error, err error)

// changeInFile measures changes of a list of so many nodes in a file.
func (a *agents) changeInFile(ctx context.Context, nodes int) (result.Sample, error) {
	if _, err := a.node(ctx); err != nil {
		return result.Sample{}, err
	}
	var lists [2][]byte
	for variant := range lists {
		var err error
		if lists[variant], err = a.render(nodes, variant); err != nil {
			return result.Sample{}, err
		}
	}
	if err := a.lab.WriteNodesFile(lists[0]); err != nil {
		return result.Sample{}, err
	}
	return a.change(ctx, nodes, between, func(variant int) (func() error, error) { return a.lab.StageNodesFile(lists[variant]) })
}

// changeOverAPI measures changes of one Node of so many, of which an API server tells the agent.
func (a *agents) changeOverAPI(ctx context.Context, nodes int) (result.Sample, error) {
	return a.overAPI(ctx, nodes, func(_ *lab.Node, server *apiServer) (result.Sample, error) {
		return a.change(ctx, nodes, amongOthers, func(variant int) (func() error, error) { return server.stage(a.specs(nodes, variant)[nodes-1]) })
	})
}

// change gives the last of so many nodes another podCIDR, again and again, and measures from the moment that this is published until a pod's packet
// takes the new way: it leaves for that node, under the pod's own address. Until then it is one for the outside, and masqueraded.
func (a *agents) change(ctx context.Context, nodes int, between time.Duration, stage stage) (sample result.Sample, err error) {
	node, err := a.node(ctx)
	if err != nil {
		return result.Sample{}, err
	}
	if err := node.StartAgent(); err != nil {
		return result.Sample{}, err
	}
	defer func() { err = errors.Join(err, restart(node)) }()
	if err := node.WaitReady(ctx); err != nil {
		return result.Sample{}, err
	}
	p, err := a.newProbe(ctx, node, nodes)
	if err != nil {
		return result.Sample{}, err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	var delays []float64
	// The first is not counted: neighbours are resolved.
	for i := 1; i <= a.changes+1; i++ {
		publish, err := stage(i % 2)
		if err != nil {
			return result.Sample{}, err
		}
		if err := pause(ctx, between); err != nil {
			return result.Sample{}, err
		}
		delay, err := p.flip(ctx, publish, podCIDR(nodes-1+i%2).Addr().Next().Next())
		if err != nil {
			return result.Sample{}, fmt.Errorf("%w; the agent says:\n%s", err, node.LogTail(5))
		}
		delays = append(delays, delay.Seconds())
	}
	d := result.Each(delays[1:])
	return result.Sample{
		Values:        map[string]float64{result.P50: d.Quantile(0.5), result.Slowest: slices.Max(delays[1:])},
		Distributions: map[string]result.Distribution{"delay": d},
	}, nil
}

// flip publishes a change, and measures until packets to an address that no node had before go to its node.
func (p *probe) flip(ctx context.Context, publish func() error, to netip.Addr) (time.Duration, error) {
	if _, err := p.until(ctx, to, p.node); err != nil {
		return 0, fmt.Errorf("wait until packets to %s are masqueraded: %w", to, err)
	}
	started := time.Now()
	if err := publish(); err != nil {
		return 0, err
	}
	arrived, err := p.until(ctx, to, p.pod)
	if err != nil {
		return 0, fmt.Errorf("wait until packets to %s go to its node: %w", to, err)
	}
	return arrived.Sub(started), nil
}

// probe sends packets from a pod, and has the host outside tell under which address they come. That host is the changing node too, as far as links
// can tell: what goes to it either way arrives.
type probe struct {
	out, in   *net.UDPConn
	pod, node netip.Addr
	sent      uint64
}

func (a *agents) newProbe(ctx context.Context, node *lab.Node, nodes int) (p *probe, err error) {
	pod, err := node.AddPod(ctx, "probe", lab.PodOptions{}) // removed with the node's memory
	if err != nil {
		return nil, fmt.Errorf("add a pod that sends probes: %w", err)
	}
	outside := a.lab.Outside
	others := []netip.Prefix{netip.PrefixFrom(otherNode(nodes-1), 32), podCIDR(nodes - 1), podCIDR(nodes)}
	for _, prefix := range others {
		if err := answerFor(outside, prefix); err != nil {
			return nil, err
		}
	}
	// What has no way back could be taken for forged.
	back := &netlink.Route{Dst: ipNet(netip.PrefixFrom(pod.Addr(), 32)), Gw: node.Addr().AsSlice()}
	if err := outside.Netlink().RouteReplace(back); err != nil {
		return nil, fmt.Errorf("tell the host outside the way to pod %s: %w", pod.Addr(), err)
	}
	p = &probe{pod: pod.Addr(), node: node.Addr()}
	if p.in, err = listen(outside, probePort); err != nil {
		return nil, err
	}
	if p.out, err = listen(pod.Namespace, 0); err != nil {
		return nil, errors.Join(err, p.in.Close())
	}
	return p, nil
}

func (p *probe) close() error { return errors.Join(p.in.Close(), p.out.Close()) }

// answerFor makes all addresses of a network a host's own.
func answerFor(host *lab.Namespace, prefix netip.Prefix) error {
	lo, err := host.Netlink().LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find the loopback of %s: %w", host.Netns(), err)
	}
	route := &netlink.Route{
		Dst: ipNet(prefix), Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST, LinkIndex: lo.Attrs().Index,
	}
	if err := host.Netlink().RouteReplace(route); err != nil {
		return fmt.Errorf("make %s addresses of %s: %w", prefix, host.Netns(), err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func listen(in *lab.Namespace, port int) (conn *net.UDPConn, err error) {
	err = in.Do(func() (err error) {
		conn, err = net.ListenUDP("udp4", &net.UDPAddr{Port: port})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open a socket in %s: %w", in.Netns(), err)
	}
	return conn, nil
}

// until sends one probe after the other until one arrives that came from that address, and says when that was.
func (p *probe) until(ctx context.Context, to, from netip.Addr) (time.Time, error) {
	for {
		source, at, err := p.once(netip.AddrPortFrom(to, probePort))
		if err != nil || source == from {
			return at, err
		}
		if err := pause(ctx, rest); err != nil {
			return at, fmt.Errorf("%w; the last probe came from %v", err, source)
		}
	}
}

// once sends a probe. source is invalid when it did not arrive in time.
func (p *probe) once(to netip.AddrPort) (source netip.Addr, at time.Time, err error) {
	p.sent++
	packet := binary.BigEndian.AppendUint64(nil, p.sent)
	if _, err := p.out.WriteToUDPAddrPort(packet, to); err != nil {
		return source, at, fmt.Errorf("send a probe: %w", err)
	}
	if err := p.in.SetReadDeadline(time.Now().Add(probing)); err != nil {
		return source, at, err
	}
	for {
		n, from, err := p.in.ReadFromUDPAddrPort(packet)
		if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
			return source, at, nil
		}
		if err != nil {
			return source, at, fmt.Errorf("receive a probe: %w", err)
		}
		if n == len(packet) && binary.BigEndian.Uint64(packet) == p.sent {
			return from.Addr().Unmap(), time.Now(), nil
		}
	}
}

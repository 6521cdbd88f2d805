package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

const (
	// settled is how long the agent is left alone before its memory is read.
	settled = time.Second
	// mapPoll is how often a map is looked at.
	mapPoll = 100 * time.Microsecond
	// betweenFew is how long nothing changes after a change: those that come thick and fast would be taken together. Where there are thousands of
	// nodes the agent looks at all of its routes again after each, longer than that; Nodes of a cluster change seconds apart.
	betweenFew  = 20 * time.Millisecond
	betweenMany = 300 * time.Millisecond
	// probeTimeout is how long a probe may be on its way, and probePause the time to the next one.
	probeTimeout = 5 * time.Millisecond
	probePause   = 200 * time.Microsecond
	probePort    = 9000
	// tunnelPort is the agent's default.
	tunnelPort = 4789
)

// agents measures the agent, on a node of its own.
type agents struct {
	changes int
	lab     *lab.Lab
}

func (a *agents) close() error {
	if a.lab == nil {
		return nil
	}
	return a.lab.Close()
}

// specs are so many nodes, this one included. The last one has another podCIDR with another variant.
func (a *agents) specs(count, variant int) []lab.NodeSpec {
	specs := modes.FarNodes(a.lab.NodeSpecs(), count+1, wire.IPv4)
	specs[count-1].PodCIDRs = specs[count-1+variant].PodCIDRs
	return specs[:count]
}

// source is where an agent learns of Nodes: a file, or an API server.
type source struct {
	// stage prepares that the last node has the podCIDR of a variant. The function returned has the agent learn of it.
	stage func(variant int) (publish func() error, err error)
	close func() error
}

// feed gives the agent of the node so many Nodes.
func (a *agents) feed(w result.Workload) (source, error) {
	if w.API {
		s, err := serveNodes(a.lab, a.specs(w.Size, 0))
		if err != nil {
			return source{}, err
		}
		return source{
			stage: func(variant int) (func() error, error) { return s.stage(w.Size-1, a.specs(w.Size, variant)[w.Size-1]) },
			close: s.close,
		}, nil
	}
	var lists [2][]byte
	for variant := range lists {
		var err error
		if lists[variant], err = lab.NodeListJSON(a.specs(w.Size, variant)...); err != nil {
			return source{}, err
		}
	}
	file := source{
		stage: func(variant int) (func() error, error) { return a.lab.StageNodesFile(lists[variant]) },
		close: func() error { return nil },
	}
	return file, a.lab.WriteNodesFile(lists[0])
}

// measure starts an agent of a mode with nothing there, which learns of a workload's Nodes, measures it, and takes away all that it has left. All other nodes are
// on its link, as far as it can tell.
func (a *agents) measure(ctx context.Context, w result.Workload, mode string) (sample result.Sample, err error) {
	if a.lab == nil {
		if a.lab, err = lab.New(ctx, lab.Options{Nodes: 1, FabricBits: 16}); err != nil {
			return result.Sample{}, fmt.Errorf("build a node for the agent: %w", err)
		}
	}
	if w.Services > 0 {
		return a.measureServices(ctx, w, mode)
	}
	node := a.lab.Nodes[0]
	nodes, err := a.feed(w)
	if err != nil {
		return result.Sample{}, err
	}
	defer func() {
		_, stopped := node.StopAgent()
		err = errors.Join(err, stopped, node.Reboot(), nodes.close())
	}()
	started := time.Now()
	if err = node.StartAgent(modes.AgentFlags(mode)...); err == nil {
		if w.Kind == result.Starts {
			sample, err = complete(ctx, node, w.Size-1, started)
		} else {
			sample, err = a.change(ctx, w, nodes, mode == result.VXLAN)
		}
	}
	if err != nil {
		err = fmt.Errorf("%w; the agent says:\n%s", err, node.LogTail(5))
	}
	return sample, err
}

// complete measures how long it takes until the map has every node, and what the agent then weighs.
func complete(ctx context.Context, node *lab.Node, peers int, started time.Time) (result.Sample, error) {
	for modes.Known(node) < peers {
		if err := pause(ctx, mapPoll); err != nil {
			return result.Sample{}, fmt.Errorf("the map has %d of %d podCIDRs: %w", modes.Known(node), peers, err)
		}
	}
	took := time.Since(started)
	if err := pause(ctx, settled); err != nil {
		return result.Sample{}, err
	}
	now, peak, err := memory(node.AgentPID())
	return result.Sample{Values: map[string]float64{"memory": now, "peak": peak, "complete": took.Seconds()}}, err
}

// memory is what a process has resident, and had at most, in bytes.
func memory(pid int) (now, peak float64, err error) {
	status := fmt.Sprintf("/proc/%d/status", pid)
	kilobytes := func(name string) float64 {
		n, _ := strconv.ParseFloat(strings.TrimSuffix(field(status, name), " kB"), 64)
		return n
	}
	if now, peak = 1024*kilobytes("VmRSS"), 1024*kilobytes("VmHWM"); now == 0 {
		return 0, 0, fmt.Errorf("%s has no VmRSS", status)
	}
	return now, peak, nil
}

// change gives the last of a workload's Nodes another podCIDR, again and again, and measures from the moment that this is published until a pod's packet
// takes the new way: it leaves for that node, under the pod's own address and by a tunnel where there is one. Until then it is one for the outside, and masqueraded.
func (a *agents) change(ctx context.Context, w result.Workload, nodes source, tunnel bool) (sample result.Sample, err error) {
	p, err := a.newProbe(ctx, w.Size, tunnel)
	if err != nil {
		return result.Sample{}, err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	between := betweenFew
	if w.API {
		between = betweenMany
	}
	var delays []float64
	// The first is not counted: neighbours are resolved.
	for i := 1; i <= a.changes+1; i++ {
		publish, err := nodes.stage(i % 2)
		if err != nil {
			return result.Sample{}, err
		}
		if err := pause(ctx, between); err != nil {
			return result.Sample{}, err
		}
		delay, err := p.flip(ctx, publish, p.variants[i%2].Addr().Next().Next())
		if err != nil {
			return result.Sample{}, err
		}
		delays = append(delays, delay.Seconds())
	}
	return result.Delays(delays[1:]), nil
}

// probe sends packets from a pod, and has the host outside tell under which address they come. That host is the changing node too, as far as links
// can tell: what goes to it either way arrives.
type probe struct {
	out *net.UDPConn
	// in has all UDP datagrams, those of a tunnel with what is in them.
	in        *net.IPConn
	pod, node netip.Addr
	tunnel    bool // the way to other nodes
	// variants are the podCIDRs that the changing node may have.
	variants [2]netip.Prefix
	sent     uint64
}

func (a *agents) newProbe(ctx context.Context, nodes int, tunnel bool) (p *probe, err error) {
	node := a.lab.Nodes[0]
	if err := node.WaitReady(ctx); err != nil {
		return nil, err
	}
	pod, err := node.AddPod(ctx, "probe", lab.PodOptions{}) // removed with the node's memory
	if err != nil {
		return nil, fmt.Errorf("add a pod that sends probes: %w", err)
	}
	p = &probe{pod: pod.Addr(), node: node.Addr(), tunnel: tunnel}
	last := a.specs(nodes, 0)[nodes-1]
	p.variants = [2]netip.Prefix{last.PodCIDRs[0], a.specs(nodes, 1)[nodes-1].PodCIDRs[0]}
	outside := a.lab.Outside
	for _, prefix := range []netip.Prefix{netip.PrefixFrom(last.InternalIPs[0], 32), p.variants[0], p.variants[1]} {
		if err := answerFor(outside, prefix); err != nil {
			return nil, err
		}
	}
	// What has no way back could be taken for forged.
	if err := outside.AddRoute(netip.PrefixFrom(pod.Addr(), 32), node.Addr(), ""); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, err
	}
	err = outside.Do(func() (err error) {
		p.in, err = net.ListenIP("ip4:udp", &net.IPAddr{})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open a raw socket in %s: %w", outside.Netns(), err)
	}
	err = pod.Do(func() (err error) {
		p.out, err = net.ListenUDP("udp4", &net.UDPAddr{})
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open a socket in %s: %w", pod.Netns(), err), p.in.Close())
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
		Dst:  &net.IPNet{IP: prefix.Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), 32)},
		Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST, LinkIndex: lo.Attrs().Index,
	}
	if err := host.Netlink().RouteReplace(route); err != nil {
		return fmt.Errorf("make %s addresses of %s: %w", prefix, host.Netns(), err)
	}
	return nil
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

// until sends one probe after the other until one arrives that came from that address, and says when that was.
func (p *probe) until(ctx context.Context, to, from netip.Addr) (time.Time, error) {
	for {
		source, at, err := p.once(netip.AddrPortFrom(to, probePort))
		if err != nil || source == from {
			return at, err
		}
		if err := pause(ctx, probePause); err != nil {
			return at, fmt.Errorf("%w; the last probe came from %v", err, source)
		}
	}
}

// once sends a probe. source is invalid when it did not arrive in time.
func (p *probe) once(to netip.AddrPort) (source netip.Addr, at time.Time, err error) {
	p.sent++
	packet := make([]byte, 256)
	binary.BigEndian.PutUint64(packet, p.sent)
	if _, err := p.out.WriteToUDPAddrPort(packet[:8], to); err != nil {
		return source, at, fmt.Errorf("send a probe: %w", err)
	}
	if err := p.in.SetReadDeadline(time.Now().Add(probeTimeout)); err != nil {
		return source, at, err
	}
	for {
		n, from, err := p.in.ReadFromIP(packet)
		if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
			return source, at, nil
		}
		if err != nil {
			return source, at, fmt.Errorf("receive a probe: %w", err)
		}
		source, tunnel, number := probed(from, packet[:n])
		if number == p.sent && (source != p.pod || tunnel == p.tunnel) {
			return source, time.Now(), nil
		}
	}
}

// probed is what a host gets of a probe: where it came from and whether in a tunnel, and its number; 0 of any other datagram. A datagram begins with its UDP
// header.
func probed(from *net.IPAddr, datagram []byte) (source netip.Addr, tunnel bool, number uint64) {
	const udp, ipv4 = 8, 20
	source, _ = netip.AddrFromSlice(from.IP)
	inner := udp + 8 + 14 // after VXLAN's header and Ethernet's
	tunnel = len(datagram) > inner+ipv4 && binary.BigEndian.Uint16(datagram[2:]) == tunnelPort
	if tunnel {
		source, _ = netip.AddrFromSlice(datagram[inner+12:][:4])
		datagram = datagram[inner+ipv4:]
	}
	if len(datagram) == udp+8 {
		number = binary.BigEndian.Uint64(datagram[udp:])
	}
	return source.Unmap(), tunnel, number
}

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// caller sends datagrams from a pod to a Service on one flow, and has the host outside tell to which endpoint they go. That host is all of the nodes with
// endpoints, as far as links can tell.
type caller struct {
	out, in *net.UDPConn
	sent    uint64
}

func (a *agents) newCaller(ctx context.Context, s modes.Service, nodes []lab.NodeSpec) (c *caller, err error) {
	node, outside := a.lab.Nodes[0], a.lab.Outside
	if err := node.WaitReady(ctx); err != nil {
		return nil, err
	}
	pod, err := node.AddPod(ctx, "caller", lab.PodOptions{}) // removed with the node's memory
	if err != nil {
		return nil, fmt.Errorf("add a pod that sends to a Service: %w", err)
	}
	// What has no way back could be taken for forged.
	if err := outside.AddRoute(netip.PrefixFrom(pod.Addr(), 32), node.Addr(), ""); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, err
	}
	for _, n := range nodes[1:] {
		err = errors.Join(err, answerFor(outside, netip.PrefixFrom(n.InternalIPs[0], 32)), answerFor(outside, n.PodCIDRs[0]))
	}
	if err != nil {
		return nil, err
	}
	c = &caller{}
	if err := outside.Do(func() error { return c.listen(ctx, s.Ports[0].Target) }); err != nil {
		return nil, fmt.Errorf("open a socket in %s: %w", outside.Netns(), err)
	}
	err = pod.Do(func() (err error) {
		c.out, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(s.IP, s.Ports[0].Port)))
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open a socket in %s: %w", pod.Netns(), err), c.in.Close())
	}
	return c, nil
}

// listen opens the socket of all endpoints, which is told to which of them a datagram went.
func (c *caller) listen(ctx context.Context, port uint16) error {
	config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		failed := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1) })
		return errors.Join(failed, err)
	}}
	in, err := config.ListenPacket(ctx, "udp4", fmt.Sprintf(":%d", port))
	if err == nil {
		c.in = in.(*net.UDPConn)
	}
	return err
}

func (c *caller) close() error { return errors.Join(c.in.Close(), c.out.Close()) }

// leaves sends one datagram after the other until one arrives at another endpoint, and says which and when.
func (c *caller) leaves(ctx context.Context, endpoint netip.Addr) (to netip.Addr, at time.Time, err error) {
	for {
		to, err = c.once()
		if err != nil || to.IsValid() && to != endpoint {
			return to, time.Now(), err
		}
		if err := pause(ctx, probePause); err != nil {
			return to, at, fmt.Errorf("the flow still goes to %v: %w", to, err)
		}
	}
}

// once sends a datagram. The endpoint is invalid when it did not arrive in time.
func (c *caller) once() (to netip.Addr, err error) {
	c.sent++
	packet := make([]byte, 256)
	binary.BigEndian.PutUint64(packet, c.sent)
	if _, err := c.out.Write(packet[:8]); err != nil {
		return to, fmt.Errorf("send to a Service: %w", err)
	}
	if err := c.in.SetReadDeadline(time.Now().Add(probeTimeout)); err != nil {
		return to, err
	}
	control := make([]byte, 128)
	for {
		n, with, _, _, err := c.in.ReadMsgUDPAddrPort(packet, control)
		if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
			return to, nil
		}
		if err != nil {
			return to, fmt.Errorf("receive what was sent to a Service: %w", err)
		}
		if n == 8 && binary.BigEndian.Uint64(packet) == c.sent {
			return sentTo(control[:with])
		}
	}
}

// sentTo is the destination of a datagram, as the control message beside it says.
func sentTo(control []byte) (netip.Addr, error) {
	header, data, _, err := unix.ParseOneSocketControlMessage(control)
	if err != nil || header.Type != unix.IP_PKTINFO || len(data) < unix.SizeofInet4Pktinfo {
		return netip.Addr{}, fmt.Errorf("the kernel does not say where a datagram went: %w", err)
	}
	return netip.AddrFrom4([4]byte(data[8:12])), nil // struct in_pktinfo: the destination in the header
}

// changeEndpoints takes away the endpoint to which a pod's flow to the first Service goes, again and again, and measures from the sending of the event until the
// flow goes to another one; then the endpoint comes back. Both times the agent's system calls that write maps are counted.
func (a *agents) changeEndpoints(ctx context.Context, publish func(modes.Service) error, s modes.Service, nodes []lab.NodeSpec) (sample result.Sample, err error) {
	c, err := a.newCaller(ctx, s, nodes)
	if err != nil {
		return result.Sample{}, err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	calls, err := countBPFCalls(a.lab.Nodes[0].AgentPID())
	if err != nil {
		return result.Sample{}, err
	}
	defer func() { err = errors.Join(err, calls.close()) }()
	endpoint, _, err := c.leaves(ctx, netip.Addr{})
	if err != nil {
		return result.Sample{}, err
	}
	var delays, made []float64
	for range a.changes + 1 { // the first is not counted: neighbours are resolved
		without := s
		without.Endpoints = slices.DeleteFunc(slices.Clone(s.Endpoints), func(e modes.Endpoint) bool { return e.Addr == endpoint })
		gone, err1 := calls.during(func() error {
			started := time.Now()
			if err := publish(without); err != nil {
				return err
			}
			to, at, err := c.leaves(ctx, endpoint)
			endpoint, delays = to, append(delays, at.Sub(started).Seconds())
			return errors.Join(err, pause(ctx, betweenMany))
		})
		back, err2 := calls.during(func() error { return errors.Join(publish(s), pause(ctx, betweenMany)) })
		if err := errors.Join(err1, err2); err != nil {
			return result.Sample{}, err
		}
		made = append(made, gone, back)
	}
	sample = result.Delays(delays[1:])
	sample.Values["calls"] = result.Quantile(made[2:], 0.5) // others happen to fall into some
	return sample, nil
}

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

const (
	// addsAtOnce is how many pods are added at a time to fill a node.
	addsAtOnce = 4
	// afterStart is for what an agent does once it is ready.
	afterStart = 5 * time.Second
	// operation is how long the adding, deleting or pinging of a pod may take.
	operation = time.Minute
)

// scale is a node full of pods and an empty one, in a large cluster whose Nodes an API server tells them of. No agent runs there.
type scale struct {
	lab         *lab.Lab
	api         *apiServer
	full, empty *lab.Node
	nodes       int
}

func newScale(ctx context.Context, nodes, pods int) (s *scale, err error) {
	l, err := lab.New(ctx, lab.Options{Nodes: 2, FabricBits: 16})
	if err != nil {
		return nil, fmt.Errorf("build a node for many pods: %w", err)
	}
	s = &scale{lab: l, full: l.Nodes[0], empty: l.Nodes[1], nodes: nodes}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if s.api, err = serveNodes(l, modes.FarNodes(l.NodeSpecs(), nodes, wire.IPv4)); err != nil {
		return nil, err
	}
	if err := s.start(ctx, s.full); err != nil {
		return nil, err
	}
	_, err = each(pods, addsAtOnce, func(i int) (time.Duration, error) {
		_, err := s.full.AddPod(ctx, fmt.Sprintf("p%d", i), lab.PodOptions{})
		return 0, err
	})
	_, stopped := s.full.StopAgent()
	return s, errors.Join(err, stopped)
}

func (s *scale) close() (err error) {
	if s.api != nil {
		err = s.api.close()
	}
	return errors.Join(err, s.lab.Close())
}

// start starts the agent of a node, and waits until it knows all Nodes.
func (s *scale) start(ctx context.Context, node *lab.Node) error {
	if err := node.StartAgent(modes.AgentFlags(result.EBPF)...); err != nil {
		return err
	}
	if err := node.WaitReady(ctx); err != nil {
		return err
	}
	for modes.Known(node) < s.nodes-1 {
		if err := pause(ctx, mapPoll); err != nil {
			return fmt.Errorf("the map of %s has %d of %d podCIDRs: %w", node.Name, modes.Known(node), s.nodes-1, err)
		}
	}
	return nil
}

// foreign are routes and addresses that somebody else gives a node, as routing daemons and IPVS do.
type foreign struct {
	node   *lab.Node
	uplink int
}

func newForeign(node *lab.Node) (*foreign, error) {
	link, err := node.Netlink().LinkByName(lab.Uplink)
	if err != nil {
		return nil, fmt.Errorf("find the uplink of %s: %w", node.Name, err)
	}
	return &foreign{node, link.Attrs().Index}, nil
}

// route is number i of them: one of 16 addresses, by way of the gateway, as BGP daemons have them.
func (f *foreign) route(i int) *netlink.Route {
	return &netlink.Route{
		Dst: &net.IPNet{IP: net.IP{100, byte(64 + i>>12), byte(i >> 4), byte(i << 4)}, Mask: net.CIDRMask(28, 32)},
		Gw:  lab.GatewayAddr[wire.IPv4].AsSlice(), LinkIndex: f.uplink, Protocol: unix.RTPROT_BGP,
	}
}

// addRoutes adds the routes of these numbers.
func (f *foreign) addRoutes(from, to int) error {
	for i := from; i < to; i++ {
		if err := f.node.Netlink().RouteAdd(f.route(i)); err != nil {
			return fmt.Errorf("add route %s to %s: %w", f.route(i).Dst, f.node.Name, err)
		}
	}
	return nil
}

// addAddresses gives the node so many addresses on its loopback.
func (f *foreign) addAddresses(count int) error {
	nl := f.node.Netlink()
	link, err := nl.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find the loopback of %s: %w", f.node.Name, err)
	}
	for i := range count {
		ip := netip.AddrFrom4([4]byte{100, 127, byte(i >> 8), byte(i)})
		if err := nl.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: ip.AsSlice(), Mask: net.CIDRMask(32, 32)}}); err != nil {
			return fmt.Errorf("add address %s to %s: %w", ip, f.node.Name, err)
		}
	}
	return nil
}

// churning is how many routes come and go in turn.
const churning = 50

// change adds and deletes routes, so many times a second in all, until the context ends, and says how often it did.
func (f *foreign) change(ctx context.Context, perSecond float64) (changes int, err error) {
	if perSecond == 0 {
		<-ctx.Done()
		return 0, nil
	}
	tick := time.NewTicker(time.Duration(float64(time.Second) / perSecond))
	defer tick.Stop()
	for ; ; changes++ {
		select {
		case <-ctx.Done():
			return changes, nil
		case <-tick.C:
		}
		route := f.route(1<<17 + changes/2%churning)
		if changes%2 == 0 {
			err = f.node.Netlink().RouteReplace(route)
		} else {
			err = f.node.Netlink().RouteDel(route)
		}
		if err != nil {
			return changes, fmt.Errorf("change route %s of %s: %w", route.Dst, f.node.Name, err)
		}
	}
}

// spent is what an agent has taken until now.
type spent struct {
	at    time.Time
	cpu   time.Duration
	lines int // of its log
}

func spentBy(node *lab.Node) (spent, error) {
	cpu, err := cpuTime(node.AgentPID())
	if err != nil {
		return spent{}, err
	}
	log, err := os.ReadFile(node.AgentLog())
	if err != nil {
		return spent{}, fmt.Errorf("read the agent's log: %w", err)
	}
	return spent{time.Now(), cpu, bytes.Count(log, []byte("\n"))}, nil
}

// since are the share of a CPU and the log's lines a minute between two looks.
func (s spent) since(before spent) (cpu, lines float64) {
	took := s.at.Sub(before.at)
	return (s.cpu - before.cpu).Seconds() / took.Seconds(), float64(s.lines-before.lines) / took.Minutes()
}

// cpuTime is what a process has run for, in user space and in the kernel, to 10 ms.
func cpuTime(pid int) (time.Duration, error) {
	const afterName, userTime = ") ", 11 // proc(5): utime is the 14th field, and the name, which may hold spaces, the second
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, fmt.Errorf("read the agent's CPU time: %w", err)
	}
	fields := bytes.Fields(raw[bytes.LastIndex(raw, []byte(afterName))+len(afterName):])
	var ticks [2]int64
	for i := range ticks {
		if _, err := fmt.Sscan(string(fields[userTime+i]), &ticks[i]); err != nil {
			return 0, fmt.Errorf("read the agent's CPU time: %w", err)
		}
	}
	return time.Duration(ticks[0]+ticks[1]) * 10 * time.Millisecond, nil
}

package modes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/journal"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// ebpfPlane is this project as an operator gets it on nodes without kube-proxy: agents with their default flags and a list of Node objects, the
// plugin and the list of plugins that the agent has installed. There is no netfilter rule in its namespaces, as on a
// node whose kube-proxy is off.
type ebpfPlane struct{ lab *lab.Lab }

func (e *ebpfPlane) prepare(ctx context.Context) error { return e.lab.StartAgents(ctx) }

// carriedName and droppedName are counters of the programs; their own names for things serve.
func carriedName(node string, direction wire.Direction, event traffic.Event) string {
	return fmt.Sprintf("%s %v %v", node, direction, event)
}

func droppedName(node string) string { return node + " dropped " }

func (e *ebpfPlane) count(_ context.Context, into Counters, pods map[string]*lab.Pod) error {
	for name, pod := range pods {
		if err := countSent(into, name, pod); err != nil {
			return err
		}
	}
	for _, node := range e.lab.Nodes {
		if err := countTraffic(into, node); err != nil {
			return err
		}
		dropped, err := node.Drops()
		if err != nil {
			return err
		}
		for _, counter := range dropped {
			// A pod's kernel asks for IPv6 routers by itself.
			if counter.Slot != drops.IPv6Unsupported {
				into[droppedName(nodeName(node))+fmt.Sprintf("%v %v", counter.Direction, counter.Slot)] = counter.Packets
			}
		}
	}
	return nil
}

// countSent adds what the program on a pod's link has seen of the pod: the traffic counters are sums over all pods.
func countSent(into Counters, name string, pod *lab.Pod) error {
	link, err := pod.Node.Netlink().LinkByName(hostLink(pod))
	if err != nil {
		return fmt.Errorf("find the host's end of pod %s: %w", name, err)
	}
	m, err := devices.Open(bpffs.Dir(pod.Node.BPFFS()).Map(devices.Name))
	if err != nil {
		return fmt.Errorf("devices of %s: %w", pod.Node.Name, err)
	}
	defer m.Close()
	device, err := m.Get(devices.Key{Ifindex: uint32(link.Attrs().Index)})
	if err != nil {
		return fmt.Errorf("device of pod %s: %w", name, err)
	}
	into[name+" from_pod"], into[bytesOf(name+" from_pod")] = device.Packets, device.Bytes
	return nil
}

func countTraffic(into Counters, node *lab.Node) error {
	counters, err := traffic.Open(bpffs.Dir(node.BPFFS()).Map(traffic.Name))
	if err != nil {
		return fmt.Errorf("traffic of %s: %w", node.Name, err)
	}
	defer counters.Close()
	for direction := range wire.Directions {
		for event := range traffic.Events {
			sum, err := counters.Sum(direction, event)
			if err != nil {
				return fmt.Errorf("traffic of %s: %w", node.Name, err)
			}
			name := carriedName(nodeName(node), direction, event)
			into[name], into[bytesOf(name)] = sum.Packets, sum.Bytes
		}
	}
	return nil
}

func (*ebpfPlane) proof(path string) proof {
	p := proof{
		few:  []string{carriedName("n1", wire.FromPod, traffic.Stack), carriedName("n1", wire.FromUplink, traffic.Stack)},
		none: []string{droppedName("n1"), droppedName("n2")},
	}
	sent := client + " from_pod"
	switch path {
	case result.SameNode:
		p.through = []string{sent}
		p.both = []string{carriedName("n1", wire.FromPod, traffic.Delivered)}
		p.few = append(p.few, "n1 eth0 tx")
	case result.AcrossNodes:
		p.through = []string{
			sent, carriedName("n1", wire.FromPod, traffic.Forwarded), "n1 eth0 tx",
			"n2 eth0 rx", carriedName("n2", wire.FromUplink, traffic.Delivered),
		}
		p.few = append(p.few, carriedName("n2", wire.FromPod, traffic.Stack), carriedName("n2", wire.FromUplink, traffic.Stack))
	default:
		p.through = []string{sent, carriedName("n1", wire.FromPod, traffic.Forwarded), "n1 eth0 tx"}
		p.opened = []string{carriedName("n1", wire.FromPod, traffic.SnatAllocated)}
		p.few = append(p.few, "n2 eth0 rx")
	}
	return p
}

// setNodes writes the list that the agents watch, and waits until all of it is in each node's map and, for the nodes' own
// traffic to the pods, routes.
func (e *ebpfPlane) setNodes(ctx context.Context, k int) error {
	raw, err := lab.NodeListJSON(FarNodes(e.lab.NodeSpecs(), k)...)
	if err != nil {
		return err
	}
	if err := e.lab.WriteNodesFile(raw); err != nil {
		return err
	}
	return forAll(e.lab, func(node *lab.Node) error { return waitForPeers(ctx, node, k-1) })
}

func waitForPeers(ctx context.Context, node *lab.Node, want int) error {
	var h *device.Handle
	err := node.Do(func() (err error) {
		h, err = device.Open()
		return err
	})
	if err != nil {
		return err
	}
	defer h.Close()
	for {
		routes, err := h.OwnRoutes()
		if err != nil {
			return err
		}
		remote := 0
		for _, r := range routes {
			if r.Gateway.IsValid() && !r.Unreachable {
				remote++
			}
		}
		known := Known(node)
		if known == want && remote == want {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the agent of %s knows %d other nodes and has %d routes to them, want %d: %w\n%s",
				node.Name, known, remote, want, ctx.Err(), node.LogTail(10))
		case <-time.After(20 * time.Millisecond): // neither a map nor the agent tells when it is complete
		}
	}
}

// Known counts other nodes' podCIDRs in a node's map; none as long as there is no map.
func Known(node *lab.Node) (n int) {
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

// setServices has nothing to do that would cost anything, and says so rather than measure nothing.
func (*ebpfPlane) setServices(_ context.Context, k int) error {
	if k == 0 {
		return nil
	}
	return fmt.Errorf("there are no Service rules without kube-proxy: %w", ErrNotApplicable)
}

// longer than any flow lives.
const longer = 48 * time.Hour

// forget has the agent's own sweep believe that it is two days later, when every flow has ended.
func (*ebpfPlane) forget(node *lab.Node) (err error) {
	dir := bpffs.Dir(node.BPFFS())
	c := datapath.Collector{Maps: map[string]*ebpf.Map{}}
	defer func() {
		for _, m := range c.Maps {
			m.Close()
		}
	}()
	if c.Program, err = ebpf.LoadPinnedProgram(dir.Program("ec_collect"), nil); err != nil {
		return fmt.Errorf("open the program that sweeps: %w", err)
	}
	defer c.Program.Close()
	for _, name := range []string{snat.Name, snat.ReverseName, conntrack.Name, journal.CandidatesName} {
		if c.Maps[name], err = ebpf.LoadPinnedMap(dir.Map(name), nil); err != nil {
			return fmt.Errorf("open map %s: %w", name, err)
		}
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return fmt.Errorf("read the clock: %w", err)
	}
	for table := range usage.Tables {
		if _, err := c.SweepAt(table, uint64(now.Nano()+int64(longer)), false); err != nil {
			return fmt.Errorf("sweep table %s: %w", table, err)
		}
	}
	left, err := entries(node, usage.Snat)
	if err == nil && left > 0 {
		err = fmt.Errorf("%d flows are left in table %s", left, usage.Snat)
	}
	return err
}

// entries is how many flows the programs say that a table has.
func entries(node *lab.Node, table usage.Table) (n uint64, err error) {
	m, err := usage.Open(bpffs.Dir(node.BPFFS()).Map(usage.Name))
	if err != nil {
		return 0, fmt.Errorf("usage of %s: %w", node.Name, err)
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	v, err := m.Get(usage.Key{Table: table})
	return v.Entries, err
}

// Program is what the kernel has counted of one BPF program, on both nodes, while kernel.bpf_stats_enabled was set.
type Program struct {
	RunTime time.Duration
	Runs    uint64
}

// Programs are the network's BPF programs by name; none in the classical modes.
func (n *Network) Programs() (map[string]Program, error) {
	all := map[string]Program{}
	for _, node := range n.lab.Nodes {
		pins, err := filepath.Glob(filepath.Join(node.BPFFS(), "progs", "*"))
		if err != nil {
			return nil, fmt.Errorf("list the programs of %s: %w", node.Name, err)
		}
		for _, pin := range pins {
			program, err := ebpf.LoadPinnedProgram(pin, &ebpf.LoadPinOptions{ReadOnly: true})
			if errors.Is(err, os.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, fmt.Errorf("open program %s: %w", pin, err)
			}
			stats, err := program.Stats()
			if err := errors.Join(err, program.Close()); err != nil {
				return nil, fmt.Errorf("statistics of program %s: %w", pin, err)
			}
			sum := all[filepath.Base(pin)]
			all[filepath.Base(pin)] = Program{sum.RunTime + stats.Runtime, sum.Runs + stats.RunCount}
		}
	}
	return all, nil
}

// kubeProxyPlane is this project on nodes where kube-proxy translates: its rules stand in netfilter, each packet between pods is asked
// for in the kernel's table of connections, and what leaves walks the stack. As on kubeadm's nodes upstream's plugins are there, so that the
// agent chains portmap after ours.
type kubeProxyPlane struct {
	*ebpfPlane

	// plugins is where buildPlugins has put them.
	plugins string
}

func (k kubeProxyPlane) prepare(ctx context.Context) error {
	for _, node := range k.lab.Nodes {
		if err := errors.Join(installPlugins(node, k.plugins), set(node, kubeProxySysctls())); err != nil {
			return err
		}
	}
	if err := k.setServices(ctx, 0); err != nil {
		return err
	}
	return k.lab.StartAgents(ctx, "--kube-proxy", "on")
}

// setServices writes kube-proxy's rules alone: masquerading is the programs'.
func (k kubeProxyPlane) setServices(ctx context.Context, n int) error {
	return forAll(k.lab, func(node *lab.Node) error {
		return apply(ctx, node, iptablesRules(nil, false, n), "iptables-restore", "-w", "10")
	})
}

func (k kubeProxyPlane) count(ctx context.Context, into Counters, pods map[string]*lab.Pod) error {
	for _, node := range k.lab.Nodes {
		if err := countTracking(into, node); err != nil {
			return err
		}
	}
	return k.ebpfPlane.count(ctx, into, pods)
}

// proof: between pods as without kube-proxy; what leaves goes by the stack, and is masqueraded on its way out.
func (k kubeProxyPlane) proof(path string) proof {
	p := k.ebpfPlane.proof(path)
	if path == result.Egress {
		p = proof{
			through: []string{
				client + " from_pod", carriedName("n1", wire.FromPod, traffic.Stack),
				carriedName("n1", wire.ToUplink, traffic.Stack), "n1 eth0 tx",
			},
			opened: []string{carriedName("n1", wire.ToUplink, traffic.SnatAllocated)},
			few: []string{
				carriedName("n1", wire.FromPod, traffic.Forwarded), carriedName("n1", wire.FromPod, traffic.Delivered), "n2 eth0 rx",
			},
			none: p.none,
		}
	}
	for _, node := range k.lab.Nodes {
		p.none = append(p.none, trackingFaults(nodeName(node)))
	}
	return p
}

// forget empties both tables: the programs' and netfilter's.
func (k kubeProxyPlane) forget(node *lab.Node) error {
	return errors.Join(flushTracking(node), k.ebpfPlane.forget(node))
}

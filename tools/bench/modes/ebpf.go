package modes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// ebpfPlane is this project as an operator gets it on nodes without kube-proxy: agents with their default flags and a list of Node objects, the
// plugin and the list of plugins that the agent has installed. There is no netfilter rule in its namespaces, as on a
// node whose kube-proxy is off.
type ebpfPlane struct {
	lab *lab.Lab
	// pods are those at the ends of paths; filled after prepare.
	pods map[string]*lab.Pod
}

func (e *ebpfPlane) prepare(ctx context.Context) error { return e.lab.StartAgents(ctx) }

// carriedName and droppedName are counters of the programs; their own names for things serve.
func carriedName(node string, direction wire.Direction, event traffic.Event) string {
	return fmt.Sprintf("%s %v %v", node, direction, event)
}

func droppedName(node string) string { return node + " dropped " }

func (e *ebpfPlane) count(_ context.Context, into Counters) error {
	for name, pod := range e.pods {
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
	return countUplinks(into, e.lab)
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

func (*ebpfPlane) proof(path Path) proof {
	p := proof{
		few:  []string{carriedName("n1", wire.FromPod, traffic.Stack), carriedName("n1", wire.FromUplink, traffic.Stack)},
		none: []string{droppedName("n1"), droppedName("n2")},
	}
	sent := client + " from_pod"
	switch path {
	case SameNode:
		p.through = []string{sent}
		p.both = []string{carriedName("n1", wire.FromPod, traffic.Delivered)}
		p.few = append(p.few, "n1 eth0 tx")
	case AcrossNodes:
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
	specs := e.lab.NodeSpecs()
	for i := range k - len(specs) {
		node := farNode(i)
		specs = append(specs, lab.NodeSpec{Name: node.name, InternalIPs: list(node.addr), PodCIDRs: list(node.podCIDR)})
	}
	raw, err := lab.NodeListJSON(specs...)
	if err != nil {
		return err
	}
	if err := e.lab.WriteNodesFile(raw); err != nil {
		return err
	}
	for _, node := range e.lab.Nodes {
		if err := waitForPeers(ctx, node, k-1); err != nil {
			return err
		}
	}
	return nil
}

func list[T any](one T) []T { return []T{one} }

func waitForPeers(ctx context.Context, node *lab.Node, want int) error {
	h, err := openHandle(node)
	if err != nil {
		return err
	}
	defer h.Close()
	m, err := destinations.Open(bpffs.Dir(node.BPFFS()).Map(destinations.Name))
	if err != nil {
		return fmt.Errorf("destinations of %s: %w", node.Name, err)
	}
	defer m.Close()
	for {
		inMap, err := peersIn(m)
		if err != nil {
			return fmt.Errorf("destinations of %s: %w", node.Name, err)
		}
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
		if inMap == want && remote == want {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the agent of %s knows %d other nodes and has %d routes to them, want %d: %w\n%s",
				node.Name, inMap, remote, want, ctx.Err(), node.LogTail(10))
		case <-time.After(20 * time.Millisecond): // neither a map nor the agent tells when it is complete
		}
	}
}

func openHandle(node *lab.Node) (*device.Handle, error) {
	var h *device.Handle
	err := node.Do(func() (err error) {
		h, err = device.Open()
		return err
	})
	return h, err
}

// peersIn counts the podCIDRs of other nodes.
func peersIn(m *destinations.Map) (int, error) {
	peers := 0
	for entry, err := range m.All() {
		if err != nil {
			return 0, err
		}
		if entry.Value.Kind == destinations.PodCIDR {
			peers++
		}
	}
	return peers, nil
}

// setServices has nothing to do that would cost anything, and says so rather than measure nothing.
func (*ebpfPlane) setServices(_ context.Context, k int) error {
	if k == 0 {
		return nil
	}
	return fmt.Errorf("there are no Service rules without kube-proxy: %w", ErrNotApplicable)
}

// Programs are the network's BPF programs, by node and name; none in the classical modes.
func (n *Network) Programs() ([]Program, error) {
	if !ours(n.Mode) {
		return nil, nil
	}
	var all []Program
	for _, node := range n.lab.Nodes {
		dir := filepath.Join(node.BPFFS(), "progs")
		pins, err := os.ReadDir(dir)
		if err != nil {
			return nil, fmt.Errorf("list the programs of %s: %w", node.Name, err)
		}
		for _, pin := range pins {
			program, err := readProgram(filepath.Join(dir, pin.Name()))
			if err != nil {
				return nil, err
			}
			program.Node, program.Name = nodeName(node), pin.Name()
			all = append(all, program)
		}
	}
	return all, nil
}

func readProgram(pin string) (p Program, err error) {
	program, err := ebpf.LoadPinnedProgram(pin, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return p, fmt.Errorf("open program %s: %w", pin, err)
	}
	defer func() { err = errors.Join(err, program.Close()) }()
	stats, err := program.Stats()
	if err != nil {
		return p, fmt.Errorf("statistics of program %s: %w", pin, err)
	}
	return Program{RunTime: stats.Runtime, Runs: stats.RunCount}, nil
}

// Package modes builds the networks that the benchmark compares, each a cluster of two nodes and a host outside, out of
// network namespaces on one machine. It owns what the networks are made of and the proof that traffic took the way that
// it claims; what is sent, how long and how often is for others.
//
//	network, err := modes.Build(ctx, "iptables", log)
//	...
//	defer network.Close()
//	client, server := network.Ends(result.AcrossNodes)
//	before, err := network.Count()
//	... send ...
//	after, err := network.Count()
//	err = network.Carried(before, after, result.AcrossNodes, modes.Traffic{Forth: sent, Exact: true, Flows: 1})
//
// All modes stand on the same hosts, links, MTU and offloads (test/lab); whatever differs is what the network in question
// brings along itself. They can all stand at once: each has namespaces of its own, and an idle one handles no packet.
package modes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// buildLimit is how long a mode may take to stand, once its programs are built.
const buildLimit = 30 * time.Second

// fabricBits leaves room on the fabric for the nodes of SetNodes: direct routing goes to nodes on the link only, ours
// as well as flannel's host-gw.
const fabricBits = 16

// ErrNotApplicable is returned for what a mode does not have: a plugin in direct, Service rules in ebpf.
var ErrNotApplicable = errors.New("does not apply to this mode")

// dataplane is what tells one mode from another. Its hosts stand already.
type dataplane interface {
	// prepare makes the network of both nodes, ready for the first pod.
	prepare(ctx context.Context) error
	// count reads the counters; pods are those at the ends of paths.
	count(ctx context.Context, into Counters, pods map[string]*lab.Pod) error
	// proof says which counters a path's packets move.
	proof(path string) proof
	setNodes(ctx context.Context, k int) error
	setServices(ctx context.Context, k int) error
	// forget empties a node's tables of flows.
	forget(node *lab.Node) error
}

// Network is a mode that stands.
type Network struct {
	// Mode is one of result.Modes.
	Mode string

	lab   *lab.Lab
	plane dataplane
	pods  map[string]*lab.Pod
	ends  map[string][2]*lab.Namespace
}

// Build builds a mode. Whatever it has made before an error is removed again.
func Build(ctx context.Context, mode string, log *slog.Logger) (n *Network, err error) {
	if !slices.Contains(result.Modes(), mode) {
		return nil, fmt.Errorf("build mode %q: want one of %q", mode, result.Modes())
	}
	if err := Ready(mode); err != nil {
		return nil, fmt.Errorf("build: %w", err)
	}
	n = &Network{Mode: mode, pods: map[string]*lab.Pod{}}
	if n.lab, err = lab.New(ctx, lab.Options{Nodes: 2, FabricBits: fabricBits}); err != nil {
		return nil, fmt.Errorf("build mode %s: %w", mode, err)
	}
	if err := n.furnish(ctx, log); err != nil {
		return nil, fmt.Errorf("build mode %s: %w", mode, errors.Join(err, n.lab.Close()))
	}
	return n, nil
}

// furnish puts the network into the hosts, and pods into the network, and has each path's hosts find their neighbours. In a cluster
// that runs they know them; a flow that opens while a neighbour is still being asked for is the stack's for as long as it lives.
func (n *Network) furnish(ctx context.Context, log *slog.Logger) (err error) {
	plugins := ""
	if n.Mode != result.Direct && n.Mode != result.EBPF {
		if plugins, err = buildPlugins(ctx, n.lab); err != nil {
			return err
		}
	}
	switch n.Mode {
	case result.Direct:
		n.plane = &directPlane{lab: n.lab}
	case result.EBPF:
		n.plane = &ebpfPlane{lab: n.lab}
	case result.KubeProxy:
		n.plane = kubeProxyPlane{&ebpfPlane{lab: n.lab}, plugins}
	default:
		n.plane = &classical{mode: n.Mode, lab: n.lab, log: log, plugins: plugins}
	}
	ctx, cancel := context.WithTimeout(ctx, priv.Patience(buildLimit))
	defer cancel()
	if err := n.plane.prepare(ctx); err != nil {
		return err
	}
	if err := n.addPods(ctx); err != nil {
		return err
	}
	for _, path := range result.Paths() {
		client, server := n.Ends(path)
		if _, err := client.Ping(ctx, server.Addr(), lab.PingOptions{}); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

// The pods at the ends of the paths.
const (
	client = "client" // on the first node
	server = "server" // on the first node
	remote = "remote" // on the second node
)

func (n *Network) addPods(ctx context.Context) (err error) {
	if direct, ok := n.plane.(*directPlane); ok {
		n.ends = direct.ends()
		return nil
	}
	for name, node := range map[string]*lab.Node{client: n.lab.Nodes[0], server: n.lab.Nodes[0], remote: n.lab.Nodes[1]} {
		if n.pods[name], err = node.AddPod(ctx, name, lab.PodOptions{}); err != nil {
			return err
		}
	}
	from := n.pods[client].Namespace
	n.ends = map[string][2]*lab.Namespace{
		result.SameNode:    {from, n.pods[server].Namespace},
		result.AcrossNodes: {from, n.pods[remote].Namespace},
		result.Egress:      {from, n.lab.Outside},
	}
	return nil
}

// Ends are the two ends of a path.
func (n *Network) Ends(path string) (client, server *lab.Namespace) {
	return n.ends[path][0], n.ends[path][1]
}

// Count reads the counters.
func (n *Network) Count() (Counters, error) {
	ctx, cancel := context.WithTimeout(context.Background(), priv.Patience(10*time.Second))
	defer cancel()
	counters := Counters{}
	err := errors.Join(n.plane.count(ctx, counters, n.pods), countUplinks(counters, n.lab), countLinkDrops(counters, n.lab))
	if err != nil {
		return nil, fmt.Errorf("count packets of mode %s: %w", n.Mode, err)
	}
	return counters, nil
}

// Carried is an error unless the traffic went the path's way between two counts, all of it and as far as its generator knows not more; none
// of it went another way, and nothing at all was dropped.
func (n *Network) Carried(before, after Counters, path string, t Traffic) error {
	if err := n.proof(path).judge(before, after, t); err != nil {
		return fmt.Errorf("mode %s, %s: the traffic did not go the way of this network: %w", n.Mode, path, err)
	}
	return nil
}

// Intact is the part of Carried that holds of any traffic: an error when a program, a link or connection tracking has dropped something.
func (n *Network) Intact(before, after Counters, path string) error {
	if err := n.proof(path).intact(before, after); err != nil {
		return fmt.Errorf("mode %s, %s: %w", n.Mode, path, err)
	}
	return nil
}

func (n *Network) proof(path string) proof {
	p := n.plane.proof(path)
	p.none = append(p.none, linkDrops)
	return p
}

// SetNodes makes the network know k nodes, its own two among them, and returns when every node's tables are complete.
func (n *Network) SetNodes(ctx context.Context, k int) error {
	if k < len(n.lab.Nodes) || k > maxNodes {
		return fmt.Errorf("mode %s with %d nodes: want %d to %d", n.Mode, k, len(n.lab.Nodes), maxNodes)
	}
	if err := n.plane.setNodes(ctx, k); err != nil {
		return fmt.Errorf("mode %s with %d nodes: %w", n.Mode, k, err)
	}
	return nil
}

// SetServices makes the network have k Services of one endpoint each, none of which the benchmark's traffic is for.
func (n *Network) SetServices(ctx context.Context, k int) error {
	if err := n.plane.setServices(ctx, k); err != nil {
		return fmt.Errorf("mode %s with %d Services: %w", n.Mode, k, err)
	}
	return nil
}

// Add has the mode's plugins add a pod of that number on the first node, and says how long libcni took: the plugins' processes and all
// they do, but not the making of the pod's namespace. Several may run at once.
func (n *Network) Add(ctx context.Context, i int) (*lab.Pod, time.Duration, error) {
	if n.Mode == result.Direct {
		return nil, 0, fmt.Errorf("add a pod in mode %s: %w", n.Mode, ErrNotApplicable)
	}
	node := n.lab.Nodes[0]
	pod, err := node.NewPod(fmt.Sprintf("p%d", i), lab.PodOptions{})
	if err != nil {
		return nil, 0, fmt.Errorf("add pod %d in mode %s: %w", i, n.Mode, err)
	}
	started := time.Now()
	err = pod.Add(ctx)
	took := time.Since(started)
	if err != nil {
		return nil, took, errors.Join(fmt.Errorf("add pod %d in mode %s: %w", i, n.Mode, err), node.LosePod(pod))
	}
	return pod, took, nil
}

// Del has the plugins take a pod away again. It measures what Add measures.
func (n *Network) Del(ctx context.Context, pod *lab.Pod) (time.Duration, error) {
	started := time.Now()
	err := pod.Del(ctx)
	took := time.Since(started)
	return took, errors.Join(err, pod.Node.LosePod(pod))
}

// Forget empties the tables of flows on both nodes. Every sample begins like that in every mode: what earlier ones have left would
// lengthen the way of the next, and since namespaces share the kernel's table of connections, of other modes too.
func (n *Network) Forget() error {
	for _, node := range n.lab.Nodes {
		if err := n.plane.forget(node); err != nil {
			return fmt.Errorf("mode %s: empty the flow tables of %s: %w", n.Mode, node.Name, err)
		}
	}
	return nil
}

// Close removes the network and everything that belongs to it.
func (n *Network) Close() error {
	if err := n.lab.Close(); err != nil {
		return fmt.Errorf("remove mode %s: %w", n.Mode, err)
	}
	return nil
}

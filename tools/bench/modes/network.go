package modes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// buildLimit is how long a mode may take to stand, once its programs are built.
const buildLimit = 30 * time.Second

// fabricBits leaves room on the fabric for the nodes of SetNodes: direct routing goes to nodes on the link only, ours
// as well as flannel's host-gw.
const fabricBits = 16

// dataplane is what tells one mode from another. Its hosts stand already.
type dataplane interface {
	// prepare makes the network of both nodes, ready for the first pod.
	prepare(ctx context.Context) error
	// count reads the counters.
	count(ctx context.Context, into Counters) error
	// proof says which counters a path's packets move.
	proof(path Path) proof
	setNodes(ctx context.Context, k int) error
	setServices(ctx context.Context, k int) error
	// forget empties a node's tables of flows; flows is how many the first node's has.
	forget(node *lab.Node) error
	flows() (uint64, error)
}

// Network is a mode that stands.
type Network struct {
	// Mode is one of Names.
	Mode string

	lab   *lab.Lab
	plane dataplane
	ends  map[Path][2]End

	mu    sync.Mutex
	added map[int]*lab.Pod
}

// Build builds a mode. Whatever it has made before an error is removed again.
func Build(ctx context.Context, mode string, log *slog.Logger) (n *Network, err error) {
	if !slices.Contains(Names(), mode) {
		return nil, fmt.Errorf("build mode %q: want one of %q", mode, Names())
	}
	if why := Missing(mode); why != "" {
		return nil, fmt.Errorf("build mode %s: it %s", mode, why)
	}
	if err := Ready(mode); err != nil {
		return nil, fmt.Errorf("build: %w", err)
	}
	started := time.Now()
	n = &Network{Mode: mode, added: map[int]*lab.Pod{}}
	if n.lab, err = lab.New(ctx, lab.Options{Nodes: 2, FabricBits: fabricBits}); err != nil {
		return nil, fmt.Errorf("build mode %s: %w", mode, err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("build mode %s: %w", mode, errors.Join(err, n.Close()))
			n = nil
		}
	}()
	if err := n.furnish(ctx, log); err != nil {
		return n, err
	}
	if err := n.acquaint(ctx); err != nil {
		return n, err
	}
	log.Debug("mode stands", "mode", mode, "lab", n.lab.ID, "took", time.Since(started))
	return n, nil
}

// furnish puts the network into the hosts, and pods into the network.
func (n *Network) furnish(ctx context.Context, log *slog.Logger) error {
	if n.Mode == Direct {
		plane := &directPlane{lab: n.lab}
		n.plane = plane
		if err := plane.prepare(ctx); err != nil {
			return err
		}
		n.ends = plane.ends()
		return nil
	}
	var pods map[string]*lab.Pod
	switch n.Mode {
	case EBPF, EBPFKubeProxy:
		plane := &ebpfPlane{lab: n.lab, pods: map[string]*lab.Pod{}}
		n.plane, pods = plane, plane.pods
		if n.Mode == EBPFKubeProxy {
			plugins, err := buildPlugins(ctx, n.lab)
			if err != nil {
				return err
			}
			n.plane = kubeProxyPlane{plane, plugins}
		}
	default:
		plugins, err := buildPlugins(ctx, n.lab)
		if err != nil {
			return err
		}
		plane := &classical{mode: n.Mode, lab: n.lab, log: log, plugins: plugins, pods: map[string]*lab.Pod{}}
		n.plane, pods = plane, plane.pods
	}
	ctx, cancel := context.WithTimeout(ctx, lab.Patience(buildLimit))
	defer cancel()
	if err := n.plane.prepare(ctx); err != nil {
		return err
	}
	for _, p := range []struct {
		name string
		node *lab.Node
	}{{client, n.lab.Nodes[0]}, {server, n.lab.Nodes[0]}, {remote, n.lab.Nodes[1]}} {
		pod, err := p.node.AddPod(ctx, p.name, lab.PodOptions{})
		if err != nil {
			return err
		}
		pods[p.name] = pod
	}
	from := end("pod on n1", pods[client].Namespace)
	n.ends = map[Path][2]End{
		SameNode:    {from, end("other pod on n1", pods[server].Namespace)},
		AcrossNodes: {from, end("pod on n2", pods[remote].Namespace)},
		SNAT:        {from, end("host outside", n.lab.Outside)},
	}
	return nil
}

// acquaint has each path's hosts find their neighbours. In a cluster that runs they know them; a flow that opens while a
// neighbour is still being asked for is the stack's for as long as it lives.
func (n *Network) acquaint(ctx context.Context) error {
	for _, path := range Paths() {
		ends := n.ends[path]
		if _, err := ends[0].ns.Ping(ctx, ends[1].Address, lab.PingOptions{}); err != nil {
			return fmt.Errorf("from %s to %s: %w", ends[0].Name, ends[1].Name, err)
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

func end(name string, ns *lab.Namespace) End {
	return End{Name: name, Netns: ns.Path(), Address: ns.Addr(), ns: ns}
}

// Ends are the two ends of a path; false for a path that the mode does not have.
func (n *Network) Ends(path Path) (client, server End, ok bool) {
	ends, ok := n.ends[path]
	return ends[0], ends[1], ok
}

// Count reads the counters.
func (n *Network) Count() (Counters, error) {
	ctx, cancel := context.WithTimeout(context.Background(), lab.Patience(10*time.Second))
	defer cancel()
	counters := Counters{}
	if err := errors.Join(n.plane.count(ctx, counters), countLinkDrops(counters, n.lab)); err != nil {
		return nil, fmt.Errorf("count packets of mode %s: %w", n.Mode, err)
	}
	return counters, nil
}

// Carried is an error unless the traffic went the path's way between two counts, all of it and as far as its generator knows not more; none
// of it went another way, and nothing at all was dropped.
func (n *Network) Carried(before, after Counters, path Path, t Traffic) error {
	if err := n.proof(path).judge(before, after, t); err != nil {
		return fmt.Errorf("mode %s, %s: the traffic did not go the way of this network: %w", n.Mode, path, err)
	}
	return nil
}

// Intact is the part of Carried that holds of any traffic: an error when a program, a link or connection tracking has dropped something.
func (n *Network) Intact(before, after Counters, path Path) error {
	if err := n.proof(path).intact(before, after); err != nil {
		return fmt.Errorf("mode %s, %s: %w", n.Mode, path, err)
	}
	return nil
}

func (n *Network) proof(path Path) proof {
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
	if k < 0 || k > maxServices {
		return fmt.Errorf("mode %s with %d Services: want 0 to %d", n.Mode, k, maxServices)
	}
	if err := n.plane.setServices(ctx, k); err != nil {
		return fmt.Errorf("mode %s with %d Services: %w", n.Mode, k, err)
	}
	return nil
}

// Add has the mode's plugins add pod i on the first node, and says how long libcni took: the plugins' processes and all
// they do, but not the making of the pod's namespace. Several may run at once.
func (n *Network) Add(ctx context.Context, i int) (time.Duration, error) {
	if n.Mode == Direct {
		return 0, fmt.Errorf("add a pod in mode %s: %w", n.Mode, ErrNotApplicable)
	}
	node := n.lab.Nodes[0]
	n.mu.Lock()
	_, taken := n.added[i]
	n.mu.Unlock()
	if taken {
		return 0, fmt.Errorf("add pod %d in mode %s: it is there", i, n.Mode)
	}
	pod, err := node.NewPod(fmt.Sprintf("p%d", i), lab.PodOptions{})
	if err != nil {
		return 0, fmt.Errorf("add pod %d in mode %s: %w", i, n.Mode, err)
	}
	started := time.Now()
	err = pod.Add(ctx)
	took := time.Since(started)
	if err != nil {
		return took, errors.Join(fmt.Errorf("add pod %d in mode %s: %w", i, n.Mode, err), node.LosePod(pod))
	}
	n.mu.Lock()
	n.added[i] = pod
	n.mu.Unlock()
	return took, nil
}

// Del has the plugins take pod i away again. It measures what Add measures.
func (n *Network) Del(ctx context.Context, i int) (time.Duration, error) {
	n.mu.Lock()
	pod := n.added[i]
	delete(n.added, i)
	n.mu.Unlock()
	if pod == nil {
		return 0, fmt.Errorf("delete pod %d in mode %s: there is none", i, n.Mode)
	}
	started := time.Now()
	err := pod.Del(ctx)
	took := time.Since(started)
	return took, errors.Join(err, n.lab.Nodes[0].LosePod(pod))
}

// Close removes the network and everything that belongs to it.
func (n *Network) Close() error {
	if err := n.lab.Close(); err != nil {
		return fmt.Errorf("remove mode %s: %w", n.Mode, err)
	}
	return nil
}

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
	"net/netip"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// setup is what a mode makes its network of.
type setup struct {
	// agent: this project's agents and plugin, as an operator gets them: default flags but for these, a list of Node objects, and the list of plugins
	// that the agent has installed.
	agent bool
	flags []string
	// plugin is the first of upstream's plugins, which portmap follows: bridge, ptp. The kernel forwards, by a route for each node.
	plugin string
	// rules is the file of what stands in netfilter, kube-proxy's rules; empty: nothing, as on a node whose kube-proxy is off.
	rules string
	// masquerade is whose masquerading stands there too.
	masquerade string
	// family is that of all its addresses.
	family wire.Family
	// tunnel is the device by which nodes reach each other's pods; empty: directly.
	tunnel string
	// services: the agents serve Services.
	services bool
}

const (
	iptables = "iptables"
	nftables = "nftables"
)

// setups are all modes. The one without any is the machine's own limit.
var setups = map[string]setup{
	result.Direct: {},
	result.EBPF:   {agent: true, services: true},
	// Each packet between pods is looked up in the kernel's table of connections, and what leaves walks the stack. Host ports are left to
	// portmap, whose rules stand beside kube-proxy's in the classical networks.
	result.KubeProxy: {agent: true, flags: []string{"--kube-proxy", "on", "--portmap", "on"}, rules: iptables},
	result.IPTables:  {plugin: "bridge", rules: iptables, masquerade: "flannel"},
	result.PTP:       {plugin: "ptp", rules: iptables, masquerade: "kind"},
	result.NFTables:  {plugin: "bridge", rules: nftables, masquerade: "flannel"},
	// Both have a tunnel though their nodes share a link, on which it is compared with the other networks' direct way.
	result.VXLAN:         {agent: true, flags: []string{"--routing-mode", "vxlan"}, tunnel: ownTunnel, services: true},
	result.IPTablesVXLAN: {plugin: "bridge", rules: iptables, masquerade: "flannel", tunnel: flannelDevice},
	result.IPv6:          {agent: true, family: wire.IPv6, services: true},
	result.IPTablesIPv6:  {plugin: "bridge", rules: iptables, masquerade: "flannel", family: wire.IPv6},
}

// AgentFlags are those of a mode's agents.
func AgentFlags(mode string) []string { return setups[mode].agentFlags() }

// agentFlags are those that differ from the lab's: there Services are off unless a flag says so, and nothing tells of their range.
func (s setup) agentFlags() []string {
	if !s.services {
		return s.flags
	}
	return append([]string{"--services", "auto", "--service-cidr", serviceCIDR[s.family].String()}, s.flags...)
}

func (s setup) bridged() bool { return s.plugin == "bridge" }

// buildLimit is how long a mode may take to stand, once its programs are built.
const buildLimit = 30 * time.Second

// fabricBits leaves room on the fabric for the nodes of Resize: direct routing goes to nodes on the link only, ours
// as well as flannel's host-gw.
const fabricBits = 16

// Network is a mode that stands.
type Network struct {
	// Mode is one of result.Modes.
	Mode string

	setup setup
	lab   *lab.Lab
	log   *slog.Logger
	// hosts are those at the ends of paths.
	hosts map[string]*lab.Namespace
	// nodes and services are its size.
	nodes    int
	services Services
}

// Build builds a mode. Whatever it has made before an error is removed again.
func Build(ctx context.Context, mode string, log *slog.Logger) (n *Network, err error) {
	s, known := setups[mode]
	if !known {
		return nil, fmt.Errorf("build mode %q: want one of %q", mode, result.Modes())
	}
	if err := Ready(mode); err != nil {
		return nil, fmt.Errorf("build: %w", err)
	}
	n = &Network{Mode: mode, setup: s, log: log, hosts: map[string]*lab.Namespace{}, nodes: 2}
	if n.lab, err = lab.New(ctx, lab.Options{Nodes: n.nodes, FabricBits: fabricBits, Families: []wire.Family{s.family}}); err != nil {
		return nil, fmt.Errorf("build mode %s: %w", mode, err)
	}
	if err := n.furnish(ctx); err != nil {
		return nil, fmt.Errorf("build mode %s: %w", mode, errors.Join(err, n.lab.Close()))
	}
	return n, nil
}

// furnish puts the network into the hosts, and pods into the network, and has each path's hosts find their neighbours.
func (n *Network) furnish(ctx context.Context) error {
	if n.setup.rules != "" {
		if err := n.installPlugins(ctx); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, priv.Patience(buildLimit))
	defer cancel()
	if err := errors.Join(n.configure(), n.writeRules(ctx, n.services)); err != nil {
		return err
	}
	if n.setup.agent {
		if err := n.lab.StartAgents(ctx, n.setup.agentFlags()...); err != nil {
			return err
		}
	}
	if err := n.addHosts(ctx); err != nil {
		return err
	}
	return n.Resolve(ctx)
}

// The hosts at the ends of the paths.
const (
	client = "client" // on the first node
	server = "server" // on the first node
	remote = "remote" // on the second node
)

// addHosts adds the pods at the ends of paths. The machine's limit has none: on one node that is two namespaces at the ends of a veth pair, and across
// nodes and to the outside the nodes themselves, over the fabric that every mode's packets take.
func (n *Network) addHosts(ctx context.Context) (err error) {
	if n.Mode == result.Direct {
		for i, name := range []string{client, server} {
			if n.hosts[name], err = n.lab.NewHost(name, netip.AddrFrom4([4]byte{10, 244, 0, byte(2 + i)})); err != nil {
				return err
			}
		}
		return n.lab.Wire(n.hosts[client], n.hosts[server], 24)
	}
	for name, node := range map[string]*lab.Node{client: n.lab.Nodes[0], server: n.lab.Nodes[0], remote: n.lab.Nodes[1]} {
		pod, err := node.AddPod(ctx, name, lab.PodOptions{})
		if err != nil {
			return err
		}
		n.hosts[name] = pod.Namespace
	}
	// The world as a cloud's network: it knows the way to a pod, for what it sends straight to one.
	pod := n.hosts[server].Addr()
	return n.lab.Outside.AddRoute(netip.PrefixFrom(pod, pod.BitLen()), n.lab.Nodes[0].Addr(), "")
}

// Ends are the two ends of a path.
func (n *Network) Ends(path string) (from, to *lab.Namespace) {
	from, remote := n.hosts[client], n.hosts[remote]
	switch path {
	case result.Inbound:
		return n.lab.Outside, remote
	case result.InboundLocal:
		return n.lab.Outside, n.hosts[server]
	case result.FromNode:
		return n.lab.Nodes[0].Namespace, remote
	}
	if n.Mode == result.Direct && path != result.SameNode {
		from, remote = n.lab.Nodes[0].Namespace, n.lab.Nodes[1].Namespace
	}
	return from, map[string]*lab.Namespace{result.SameNode: n.hosts[server], result.AcrossNodes: remote, result.Egress: n.lab.Outside}[path]
}

// Pods are so many pods on the first node, of which the first is the client of every path. Those that are missing are added.
func (n *Network) Pods(ctx context.Context, count int) ([]*lab.Namespace, error) {
	pods := []*lab.Namespace{n.hosts[client]}
	for i := 1; i < count; i++ {
		name := fmt.Sprintf("client-%d", i)
		if n.hosts[name] == nil {
			pod, err := n.lab.Nodes[0].AddPod(ctx, name, lab.PodOptions{})
			if err != nil {
				return nil, fmt.Errorf("mode %s: %w", n.Mode, err)
			}
			n.hosts[name] = pod.Namespace
		}
		pods = append(pods, n.hosts[name])
	}
	for _, pod := range pods {
		if _, err := pod.Ping(ctx, n.lab.Outside.Addr(), lab.PingOptions{}); err != nil {
			return nil, fmt.Errorf("mode %s: %w", n.Mode, err)
		}
	}
	return pods, nil
}

// Resolve has each path's hosts find their neighbours, which the kernel forgets when nobody has used them for a minute, as while other networks are measured. In a
// cluster that runs they know them; a flow that opens while a neighbour is still being asked for is the stack's for as long as it lives.
func (n *Network) Resolve(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, priv.Patience(buildLimit))
	defer cancel()
	for _, path := range result.Paths() {
		client, server := n.Ends(path)
		if _, err := client.Ping(ctx, server.Addr(), lab.PingOptions{}); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

// Enter has this process be one of the node's while packets are sent on a path that begins at one, where programs on the node's cgroup are to see its sockets.
func (n *Network) Enter(path string) (leave func() error, err error) {
	if path != result.FromNode || !n.setup.services {
		return func() error { return nil }, nil
	}
	return n.lab.Nodes[0].EnterCgroup()
}

// Count reads the counters.
func (n *Network) Count() (Counters, error) {
	ctx, cancel := context.WithTimeout(context.Background(), priv.Patience(10*time.Second))
	defer cancel()
	counters := Counters{}
	err := errors.Join(n.countLinks(counters), countBacklog(counters))
	for _, node := range n.lab.Nodes {
		if n.setup.rules != "" {
			err = errors.Join(err, countTracking(counters, node))
		}
		err = errors.Join(err, n.countRules(ctx, counters, node))
		if n.setup.agent {
			err = errors.Join(err, countTraffic(counters, node), countDrops(counters, node), countPrograms(counters, node), countFlows(counters, node))
		}
	}
	if err != nil {
		return nil, fmt.Errorf("count packets of mode %s: %w", n.Mode, err)
	}
	return counters, nil
}

// Carried is an error unless the traffic went the path's way between two counts, all of it and as far as its generator knows not more; none
// of it went another way, and nothing at all was dropped.
func (n *Network) Carried(before, after Counters, path string, t Traffic) error {
	if err := n.proof(path, t.Served).judge(before, after, t); err != nil {
		return fmt.Errorf("mode %s, %s: the traffic did not go the way of this network: %w", n.Mode, path, err)
	}
	return nil
}

// Took is an error unless at least so many packets took the path's way. Packets may have been dropped.
func (n *Network) Took(before, after Counters, path string, t Traffic) error {
	p := proof{through: n.proof(path, t.Served).through}
	if err := p.judge(before, after, t); err != nil {
		return fmt.Errorf("mode %s, %s: the traffic did not go the way of this network: %w", n.Mode, path, err)
	}
	return nil
}

// Intact is the part of Carried that holds of any traffic: an error when a program, a link or connection tracking has dropped something.
func (n *Network) Intact(before, after Counters, path string) error {
	if err := n.proof(path, false).intact(before, after); err != nil {
		return fmt.Errorf("mode %s, %s: %w", n.Mode, path, err)
	}
	return nil
}

// Resize makes the network know so many nodes, its own two among them, and have these Services, and returns when every node's tables are complete. A mode
// that has no such tables is left as it is.
func (n *Network) Resize(ctx context.Context, nodes int, s Services) (changed bool, err error) {
	if nodes < len(n.lab.Nodes) || nodes > maxNodes {
		return false, fmt.Errorf("mode %s with %d nodes: want %d to %d", n.Mode, nodes, len(n.lab.Nodes), maxNodes)
	}
	if nodes != n.nodes {
		changed = true
		if err := n.setNodes(ctx, nodes); err != nil {
			return changed, fmt.Errorf("mode %s with %d nodes: %w", n.Mode, nodes, err)
		}
	}
	if s != n.services {
		changed, n.services = true, Services{Number: unknown}
		if err := n.setServices(ctx, s); err != nil {
			return changed, fmt.Errorf("mode %s with %d Services: %w", n.Mode, s.Number, err)
		}
		n.services = s
	}
	return changed, nil
}

// setServices has the network serve these Services. None does where neither agents nor rules do.
func (n *Network) setServices(ctx context.Context, s Services) error {
	if n.setup.services {
		return n.tellServices(ctx, s)
	}
	return n.writeRules(ctx, s)
}

// unknown is the size of what failed on the way to another one.
const unknown = -1

// setNodes tells the network of k nodes: the agents by the list that they watch.
func (n *Network) setNodes(ctx context.Context, k int) error {
	if n.setup.plugin != "" {
		return n.setRoutes(ctx, k)
	}
	n.nodes = unknown
	if n.setup.agent {
		if err := n.setPeers(ctx, k); err != nil {
			return err
		}
	}
	n.nodes = k
	return nil
}

func (n *Network) setPeers(ctx context.Context, k int) error {
	raw, err := n.list(k, n.services)
	if err != nil {
		return err
	}
	if err := n.lab.WriteNodesFile(raw); err != nil {
		return err
	}
	return n.forAll(func(node *lab.Node) error { return waitForPeers(ctx, node, k-1) })
}

// Add has the mode's plugins add a pod of that number on the first node, and says how long libcni took: the plugins' processes and all
// they do, but not the making of the pod's namespace. Several may run at once.
func (n *Network) Add(ctx context.Context, i int) (*lab.Pod, time.Duration, error) {
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

// Forget empties the tables of flows on both nodes, the programs' and netfilter's. Every sample begins like that in every mode: what earlier ones have
// left would lengthen the way of the next, and since namespaces share the kernel's table of connections, of other modes too.
func (n *Network) Forget() (err error) {
	for _, node := range n.lab.Nodes {
		if n.setup.rules != "" {
			err = errors.Join(err, flushTracking(node))
		}
		if n.setup.agent {
			err = errors.Join(err, sweepAll(node))
		}
		if n.setup.services {
			err = errors.Join(err, makeClients(node))
		}
	}
	if err != nil {
		return fmt.Errorf("mode %s: empty the flow tables: %w", n.Mode, err)
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

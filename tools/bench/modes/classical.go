package modes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

const bridge = "cni0"

// classical is a network of the kernel's own forwarding and netfilter: every mode but direct and ours.
type classical struct {
	mode string
	lab  *lab.Lab
	log  *slog.Logger
	// plugins is where buildPlugins has put them.
	plugins string
	far     int // far nodes there are routes to
}

func (c *classical) bridged() bool { return c.mode != result.PTP }

func (c *classical) prepare(ctx context.Context) error {
	for i, node := range c.lab.Nodes {
		if err := c.prepareNode(node); err != nil {
			return err
		}
		peer := c.lab.Nodes[1-i]
		if err := node.AddRoute(peer.PodCIDR, peer.Addr(), ""); err != nil {
			return err
		}
	}
	return c.setServices(ctx, 0)
}

func (c *classical) prepareNode(node *lab.Node) error {
	if err := installPlugins(node, c.plugins); err != nil {
		return err
	}
	content := ptpList(node, c.lab.Options.FabricMTU)
	if c.bridged() {
		content = bridgeList(node, c.lab.Options.FabricMTU)
	}
	node.NetworkConfig = filepath.Join(node.ConfDir(), "10-classical.conflist")
	if err := os.WriteFile(node.NetworkConfig, []byte(content), 0o600); err != nil {
		return fmt.Errorf("write the network configuration of %s: %w", node.Name, err)
	}
	// kubeadm's preflight check wants forwarding.
	settings := append(kubeProxySysctls(), [2]string{"net/ipv4/ip_forward", "1"})
	if c.bridged() {
		// kubeadm's check and flannel's documentation: without them a Service's backend on the client's own node
		// answers past the translation.
		settings = append(settings, [2]string{"net/bridge/bridge-nf-call-iptables", "1"}, [2]string{"net/bridge/bridge-nf-call-ip6tables", "1"})
	}
	if err := set(node, settings); err != nil {
		return err
	}
	limit, err := node.ReadSysctl("net/netfilter/nf_conntrack_max")
	if n, _ := strconv.Atoi(limit); err == nil && n < 131072 {
		c.log.Warn("the machine's limit of connections is below what kube-proxy sets (131072)", "nf_conntrack_max", n, "mode", c.mode)
	}
	return err
}

// kubeProxySysctls are what kube-proxy sets, beside nf_conntrack_max, which only the machine's own namespace can.
func kubeProxySysctls() [][2]string {
	return [][2]string{
		{"net/netfilter/nf_conntrack_tcp_timeout_established", "86400"},
		{"net/netfilter/nf_conntrack_tcp_timeout_close_wait", "3600"},
	}
}

func set(node *lab.Node, settings [][2]string) error {
	for _, setting := range settings {
		if err := node.WriteSysctl(setting[0], setting[1]); err != nil {
			return err
		}
	}
	return nil
}

// setNodes adds one route for each node, as flannel's host-gw does for each lease and kindnetd for each Node.
func (c *classical) setNodes(ctx context.Context, k int) error {
	for want := k - len(c.lab.Nodes); c.far != want && ctx.Err() == nil; {
		add := c.far < want
		if !add {
			c.far--
		}
		far := farNode(c.far)
		for _, node := range c.lab.Nodes {
			var err error
			if add {
				err = node.AddRoute(far.podCIDR, far.addr, "")
			} else {
				to := &net.IPNet{IP: far.podCIDR.Addr().AsSlice(), Mask: net.CIDRMask(far.podCIDR.Bits(), 32)}
				err = node.Netlink().RouteDel(&netlink.Route{Dst: to})
			}
			if err != nil {
				return fmt.Errorf("the route to %s on %s: %w", far.name, node.Name, err)
			}
		}
		if add {
			c.far++
		}
	}
	return context.Cause(ctx)
}

// setServices writes the whole set of rules anew, in one transaction per node as kube-proxy does.
func (c *classical) setServices(ctx context.Context, k int) error {
	return forAll(c.lab, func(node *lab.Node) error {
		switch c.mode {
		case result.NFTables:
			return apply(ctx, node, nftRules(node.Addr(), node.PodCIDR, k), "nft", "-f")
		case result.PTP:
			return apply(ctx, node, iptablesRules(kindMasquerade(), false, k), "iptables-restore", "-w", "10")
		}
		return apply(ctx, node, iptablesRules(flannelMasquerade(node.PodCIDR), true, k), "iptables-restore", "-w", "10")
	})
}

func forAll(l *lab.Lab, do func(*lab.Node) error) error {
	var group errgroup.Group
	for _, node := range l.Nodes {
		group.Go(func() error { return do(node) })
	}
	return group.Wait()
}

// apply feeds rules to the program that kube-proxy feeds them to.
func apply(ctx context.Context, node *lab.Node, rules, program string, args ...string) error {
	file := filepath.Join(node.Dir, "rules")
	if err := os.WriteFile(file, []byte(rules), 0o600); err != nil {
		return fmt.Errorf("write the rules of %s: %w", node.Name, err)
	}
	_, err := node.Exec(ctx, program, append(args, file)...)
	return err
}

// forget is what `conntrack -F` does.
func (*classical) forget(node *lab.Node) error { return flushTracking(node) }

func (c *classical) count(ctx context.Context, into Counters, pods map[string]*lab.Pod) (err error) {
	for _, node := range c.lab.Nodes {
		err = errors.Join(err, countTracking(into, node), c.countRules(ctx, into, node))
		if c.bridged() {
			err = errors.Join(err, countLink(into, nodeName(node)+" "+bridge, node.Namespace, bridge))
		}
	}
	for name, pod := range pods {
		err = errors.Join(err, countLink(into, name, pod.Node.Namespace, hostLink(pod)))
	}
	return err
}

// countRules reads the rules that count, each chain by itself: iptables-save would list 20 000 Services in another table first.
func (c *classical) countRules(ctx context.Context, into Counters, node *lab.Node) error {
	for _, rules := range c.countingRules() {
		listing, err := node.Exec(ctx, rules.list[0], rules.list[1:]...)
		if err != nil {
			return err
		}
		for counter, text := range rules.counters {
			packets, bytes, err := ruleCounter(string(listing), text)
			if err != nil {
				return fmt.Errorf("count packets in the rules of %s: %w", node.Name, err)
			}
			name := nodeName(node) + " " + counter
			into[name], into[bytesOf(name)] = packets, bytes
		}
	}
	return nil
}

// countingRules says how rules that count are listed, and of which counter each is, by a part of its text.
type countingRules struct {
	list     []string
	counters map[string]string
}

// forwarded are all packets that met the FORWARD chain: the jump that each of them reaches. opened are the first ones of new connections, by the
// jump that no other packet takes.
const (
	forwarded = "FORWARD"
	opened    = "new"
	invalid   = "INVALID"
)

func (c *classical) countingRules() []countingRules {
	if c.mode == result.NFTables {
		// Neither kube-proxy's nor flannel's nft rules count. One that sees new connections only can, and costs their packets nothing.
		return []countingRules{{[]string{"nft", "list", "chain", "ip", "kube-proxy", "filter-forward"}, map[string]string{opened: nftNew}}}
	}
	list := func(chain string) []string {
		return []string{"iptables", "-w", "10", "-t", "filter", "-v", "-S", chain}
	}
	return []countingRules{
		{list("FORWARD"), map[string]string{forwarded: "-j KUBE-FORWARD", opened: "-j KUBE-SERVICES"}},
		{list("KUBE-FORWARD"), map[string]string{invalid: "--ctstate INVALID"}},
	}
}

// proof: the links on the way, and netfilter. Every new flow met the FORWARD chain (also between ports of a bridge) and is tracked since. Where its
// rules count, so did every packet.
func (c *classical) proof(path string) proof {
	p := proof{through: []string{client + " rx"}}
	nodes := []string{"n1"}
	switch path {
	case result.SameNode:
		p.through = append(p.through, server+" tx")
		p.few = append(p.few, "n1 eth0 tx")
	case result.AcrossNodes:
		nodes = append(nodes, "n2")
		p.through = append(p.through, "n1 eth0 tx", "n2 eth0 rx", remote+" tx")
	default:
		p.through = append(p.through, "n1 eth0 tx")
		p.few = append(p.few, "n2 eth0 rx")
	}
	if c.bridged() && path != result.SameNode {
		p.through = append(p.through, "n1 "+bridge+" rx")
	}
	for _, node := range nodes {
		p.opened = append(p.opened, node+" "+opened)
		p.held = append(p.held, node+" tracked")
		p.none = append(p.none, trackingFaults(node))
		if c.mode != result.NFTables {
			p.both = append(p.both, node+" "+forwarded)
			p.few = append(p.few, node+" "+invalid)
		}
	}
	return p
}

package modes

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sync/errgroup"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

const (
	bridge = "cni0"
	// vxlanOverhead is what flannel takes off the uplink's MTU: outer Ethernet, IPv4, UDP and VXLAN headers.
	vxlanOverhead = 50
)

// classical is a network of the kernel's own forwarding and netfilter: every mode but direct and ours.
type classical struct {
	mode string
	lab  *lab.Lab
	log  *slog.Logger
	// plugins is where buildPlugins has put them.
	plugins string
	// pods are those at the ends of paths; filled after prepare.
	pods map[string]*lab.Pod
	far  int // far nodes there are routes to
}

func (c *classical) bridged() bool { return c.mode != PTP }
func (c *classical) vxlan() bool   { return c.mode == IPTablesVXLAN }

func (c *classical) podMTU() int {
	if c.vxlan() {
		return c.lab.Options.FabricMTU - vxlanOverhead
	}
	return c.lab.Options.FabricMTU
}

func (c *classical) prepare(ctx context.Context) error {
	for _, node := range c.lab.Nodes {
		if err := c.prepareNode(node); err != nil {
			return err
		}
	}
	if c.vxlan() {
		for _, node := range c.lab.Nodes {
			if err := addVXLAN(node, c.podMTU()); err != nil {
				return err
			}
		}
	}
	for i, node := range c.lab.Nodes {
		peer := c.lab.Nodes[1-i]
		to := aFarNode{name: peer.Name, addr: peer.Addr(), podCIDR: peer.PodCIDR, vtep: vtepOf(peer)}
		if err := c.addPeer(node, to); err != nil {
			return err
		}
	}
	return c.setServices(ctx, 0)
}

func (c *classical) prepareNode(node *lab.Node) error {
	if err := installPlugins(node, c.plugins); err != nil {
		return err
	}
	content := ptpList(node, c.podMTU())
	if c.bridged() {
		content = bridgeList(node, c.podMTU())
	}
	node.NetworkConfig = filepath.Join(node.ConfDir(), "10-classical.conflist")
	if err := os.WriteFile(node.NetworkConfig, []byte(content), 0o600); err != nil {
		return fmt.Errorf("write the network configuration of %s: %w", node.Name, err)
	}
	for _, setting := range c.sysctls() {
		if err := node.WriteSysctl(setting[0], setting[1]); err != nil {
			return err
		}
	}
	limit, err := node.ReadSysctl("net/netfilter/nf_conntrack_max")
	if err != nil {
		return err
	}
	if n, err := strconv.Atoi(limit); err == nil && n < 131072 {
		c.log.Warn("the machine's limit of connections is below what kube-proxy sets (131072)", "nf_conntrack_max", n, "mode", c.mode)
	}
	return nil
}

// kubeProxySysctls are what kube-proxy sets, beside nf_conntrack_max, which only the machine's own namespace can.
func kubeProxySysctls() [][2]string {
	return [][2]string{
		{"net/netfilter/nf_conntrack_tcp_timeout_established", "86400"},
		{"net/netfilter/nf_conntrack_tcp_timeout_close_wait", "3600"},
	}
}

// sysctls are what an installed node has, beside the kernel's defaults.
func (c *classical) sysctls() [][2]string {
	// kubeadm's preflight check wants forwarding.
	all := append(kubeProxySysctls(), [2]string{"net/ipv4/ip_forward", "1"})
	if c.bridged() {
		// kubeadm's check and flannel's documentation: without them a Service's backend on the client's own node
		// answers past the translation.
		all = append(all, [2]string{"net/bridge/bridge-nf-call-iptables", "1"}, [2]string{"net/bridge/bridge-nf-call-ip6tables", "1"})
	}
	return all
}

// setServices writes the whole set of rules anew, in one transaction per node as kube-proxy does.
func (c *classical) setServices(ctx context.Context, k int) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, node := range c.lab.Nodes {
		group.Go(func() error {
			if c.mode == NFTables {
				return apply(ctx, node, nftRules(node.Addr(), node.PodCIDR, k), "nft", "-f")
			}
			masquerade := flannelMasquerade
			if c.mode == PTP {
				masquerade = kindMasquerade
			}
			return apply(ctx, node, iptablesRules(masquerade(node.PodCIDR), c.bridged(), k), "iptables-restore", "-w", "10")
		})
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

func (c *classical) count(ctx context.Context, into Counters) error {
	if err := countUplinks(into, c.lab); err != nil {
		return err
	}
	for _, node := range c.lab.Nodes {
		if err := c.countNode(ctx, into, node); err != nil {
			return err
		}
	}
	for name, pod := range c.pods {
		if err := countLink(into, name, pod.Node.Namespace, hostLink(pod)); err != nil {
			return err
		}
	}
	return nil
}

func (c *classical) countNode(ctx context.Context, into Counters, node *lab.Node) error {
	name := nodeName(node)
	if err := countTracking(into, node); err != nil {
		return err
	}
	if c.bridged() {
		if err := countLink(into, name+" "+bridge, node.Namespace, bridge); err != nil {
			return err
		}
	}
	if c.vxlan() {
		if err := countLink(into, name+" "+vxlanName, node.Namespace, vxlanName); err != nil {
			return err
		}
	}
	for _, rule := range c.countingRules() {
		// Of one chain: iptables-save would list 20 000 Services in another table first.
		listing, err := node.Exec(ctx, rule.list[0], rule.list[1:]...)
		if err != nil {
			return err
		}
		for _, counter := range rule.counters {
			packets, bytes, err := ruleCounter(string(listing), counter[1])
			if err != nil {
				return fmt.Errorf("count packets in the rules of %s: %w", node.Name, err)
			}
			into[name+" "+counter[0]], into[bytesOf(name+" "+counter[0])] = packets, bytes
		}
	}
	return nil
}

// countingRules says how rules that count are listed, and of which counter each is, by a part of its text.
type countingRules struct {
	list     []string
	counters [][2]string
}

// forwarded are all packets that met the FORWARD chain: the jump that each of them reaches. opened are the first ones of new connections, by the
// jump that no other packet takes.
const (
	forwarded = "FORWARD"
	opened    = "new"
	invalid   = "INVALID"
)

func (c *classical) countingRules() []countingRules {
	if c.mode == NFTables {
		// Neither kube-proxy's nor flannel's nft rules count. One that sees new connections only can, and costs their packets nothing.
		return []countingRules{{[]string{"nft", "list", "chain", "ip", "kube-proxy", "filter-forward"}, [][2]string{{opened, nftNew}}}}
	}
	list := func(chain string) []string {
		return []string{"iptables", "-w", "10", "-t", "filter", "-v", "-S", chain}
	}
	return []countingRules{
		{list("FORWARD"), [][2]string{{forwarded, "-j KUBE-FORWARD"}, {opened, "-j KUBE-SERVICES"}}},
		{list("KUBE-FORWARD"), [][2]string{{invalid, "--ctstate INVALID"}}},
	}
}

// hostLink is the node's end of a pod's veth pair; "" when the plugin's result does not name it.
func hostLink(pod *lab.Pod) string {
	for _, link := range pod.Result.Interfaces {
		if link.Sandbox == "" && link.Name != bridge {
			return link.Name
		}
	}
	return ""
}

// proof: the links on the way, and netfilter. Every new flow met the FORWARD chain (also between ports of a bridge) and is tracked since. Where its
// rules count, so did every packet.
func (c *classical) proof(path Path) proof {
	p := proof{through: []string{client + " rx"}}
	nodes := []string{"n1"}
	switch path {
	case SameNode:
		p.through = append(p.through, server+" tx")
		p.few = append(p.few, "n1 eth0 tx")
	case AcrossNodes:
		nodes = append(nodes, "n2")
		p.through = append(p.through, "n1 eth0 tx", "n2 eth0 rx", remote+" tx")
		if c.vxlan() {
			p.through = append(p.through, "n1 "+vxlanName+" tx", "n2 "+vxlanName+" rx")
		}
	default:
		p.through = append(p.through, "n1 eth0 tx")
		p.few = append(p.few, "n2 eth0 rx")
	}
	if c.bridged() && path != SameNode {
		p.through = append(p.through, "n1 "+bridge+" rx")
	}
	for _, node := range nodes {
		p.opened = append(p.opened, node+" "+opened)
		p.held = append(p.held, node+" tracked")
		p.none = append(p.none, trackingFaults(node))
		if c.mode != NFTables {
			p.both = append(p.both, node+" "+forwarded)
			p.few = append(p.few, node+" "+invalid)
		}
	}
	return p
}

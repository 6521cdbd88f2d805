package modes

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"text/template"

	"golang.org/x/sync/errgroup"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// The addresses of the whole cluster, in each family. They are one network (flannel's Network, kube-proxy's --cluster-cidr), wide enough
// for the podCIDRs of maxNodes nodes.
var (
	clusterCIDR = [wire.Families]netip.Prefix{netip.MustParsePrefix("10.192.0.0/10"), netip.MustParsePrefix("fd00:10:244::/48")}
	serviceCIDR = [wire.Families]netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("fd00:10:96::/112")}
)

const maxNodes = 10_000

// farNode is number i, from 0, of the nodes that exist in lists, tables and maps only. Its address is on the fabric's link, where nobody has it.
func farNode(i int, family wire.Family) lab.NodeSpec {
	addr := [wire.Families]string{fmt.Sprintf("172.18.%d.%d", 1+i/250, 1+i%250), fmt.Sprintf("fd00:172:18::1:%x", i)}[family]
	podCIDR := [wire.Families]string{fmt.Sprintf("10.%d.%d.0/24", 192+i/256, i%256), fmt.Sprintf("fd00:10:244:%x::/64", 0x1000+i)}[family]
	return lab.NodeSpec{
		Name:        fmt.Sprintf("far-%d", i),
		InternalIPs: []netip.Addr{netip.MustParseAddr(addr)}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix(podCIDR)},
	}
}

// FarNodes adds nodes of a family that do not exist, until there are k.
func FarNodes(specs []lab.NodeSpec, k int, family wire.Family) []lab.NodeSpec {
	for i := range k - len(specs) {
		specs = append(specs, farNode(i, family))
	}
	return specs
}

// ruleFiles are what kube-proxy and the networks write into a node's tables, as the programs that they feed read it.
//
//go:embed rules
var ruleFiles embed.FS

// ruleset is what the rules of a node depend on.
type ruleset struct {
	Node             netip.Addr
	PodCIDR, Cluster netip.Prefix
	// Masquerade is whose masquerading it is: flannel, kind; empty: the programs'.
	Masquerade string
	Services   []Service
}

// text is everything in the tables of a node: for iptables-restore or for nft -f.
func (r ruleset) text(file string) ([]byte, error) {
	parsed, err := template.ParseFS(ruleFiles, "rules/"+file)
	if err != nil {
		return nil, err
	}
	var text bytes.Buffer
	err = parsed.Execute(&text, r)
	return text.Bytes(), err
}

// writeRules writes the whole set of rules anew, in one transaction per node as kube-proxy does.
func (n *Network) writeRules(ctx context.Context, s Services) error {
	if n.setup.rules == "" {
		return nil
	}
	return n.forAll(func(node *lab.Node) error {
		rules := ruleset{
			Node: node.Addr(), PodCIDR: node.PodCIDR(), Cluster: clusterCIDR[n.setup.family], Masquerade: n.setup.masquerade, Services: n.all(s),
		}
		text, err := rules.text(n.setup.rules)
		if err != nil {
			return err
		}
		return apply(ctx, node, text, n.setup.feeder())
	})
}

func (n *Network) forAll(do func(*lab.Node) error) error {
	var group errgroup.Group
	for _, node := range n.lab.Nodes {
		group.Go(func() error { return do(node) })
	}
	return group.Wait()
}

// programs are those that kube-proxy feeds rules of its iptables mode to, and that list them.
var programs = [wire.Families]struct{ restore, list string }{{"iptables-restore", "iptables"}, {"ip6tables-restore", "ip6tables"}}

// feeder is the command that reads the rules from a file, as kube-proxy has it do.
func (s setup) feeder() []string {
	if s.rules == nftables {
		return []string{"nft", "-f"}
	}
	return []string{programs[s.family].restore, "-w", "10"}
}

// apply feeds rules to a command.
func apply(ctx context.Context, node *lab.Node, rules []byte, command []string) error {
	path := filepath.Join(node.Dir, "rules")
	if err := os.WriteFile(path, rules, 0o600); err != nil {
		return fmt.Errorf("write the rules of %s: %w", node.Name, err)
	}
	_, err := node.Exec(ctx, command[0], append(command[1:], path)...)
	return err
}

// The counters of rules. forwarded are all packets that met the FORWARD chain: the jump that each of them reaches. opened are the first ones of new
// connections, by the jump that no other packet takes; translated are those that were for the Service that traffic is for.
const (
	forwarded  = "FORWARD"
	opened     = "new"
	invalid    = "INVALID"
	translated = "translated"
)

// nftNew is what a new connection's first packet meets in the forward hook.
const nftNew = "jump service-endpoints-check"

// chain is a part of a node's tables that can be listed by itself, and parts of the texts of its rules that count.
type chain struct {
	list     []string
	counters map[string]string
}

// chains are those that tell which way packets went: iptables-save would list 20 000 Services in another table first.
func (n *Network) chains(node *lab.Node) (all []chain) {
	list := func(table, name string) []string {
		return []string{programs[n.setup.family].list, "-w", "10", "-t", table, "-v", "-S", name}
	}
	if n.setup.plugin != "" {
		all = map[string][]chain{
			iptables: {
				{list("filter", "FORWARD"), map[string]string{forwarded: "-j KUBE-FORWARD", opened: "-j KUBE-SERVICES"}},
				{list("filter", "KUBE-FORWARD"), map[string]string{invalid: "--ctstate INVALID"}},
			},
			// Neither kube-proxy's nor flannel's nft rules count. One that sees new connections only can, and costs their packets nothing.
			nftables: {{[]string{"nft", "list", "chain", "ip", "kube-proxy", "filter-forward"}, map[string]string{opened: nftNew}}},
		}[n.setup.rules]
	}
	if n.setup.rules != "" && n.services.Served != "" && node == n.lab.Nodes[0] { // where the client is
		ip := n.Frontend("").Addr()
		of := map[string]chain{
			iptables: {list("nat", "KUBE-SERVICES"), map[string]string{translated: fmt.Sprintf("-d %s/", ip)}},
			nftables: {[]string{"nft", "list", "chain", "ip", "kube-proxy", "services"}, map[string]string{translated: fmt.Sprintf("ip daddr %s counter", ip)}},
		}
		if inbound(n.services.Served) {
			of[iptables] = chain{list("nat", "KUBE-NODEPORTS"), map[string]string{translated: "-j KUBE-EXT-"}}
			of[nftables] = chain{of[nftables].list, map[string]string{translated: "ip daddr @nodeport-ips counter"}}
		}
		all = append(all, of[n.setup.rules])
	}
	return all
}

// countRules reads the rules that count.
func (n *Network) countRules(ctx context.Context, into Counters, node *lab.Node) error {
	for _, c := range n.chains(node) {
		listing, err := node.Exec(ctx, c.list[0], c.list[1:]...)
		if err != nil {
			return err
		}
		for counter, text := range c.counters {
			packets, bytes, err := ruleCounter(string(listing), text)
			if err != nil {
				return fmt.Errorf("count packets in the rules of %s: %w", node.Name, err)
			}
			into.add(nodeName(node)+" "+counter, packets, bytes)
		}
	}
	return nil
}

// counted finds a rule's counter as `iptables -v -S` and `nft list` print it.
var counted = regexp.MustCompile(`(?:-c|counter packets) (\d+)(?: bytes)? (\d+)`)

// ruleCounter is how many packets and bytes some rules have seen, in a chain as it is listed: all whose lines contain the text.
func ruleCounter(listing, text string) (packets, bytes uint64, err error) {
	found := false
	for line := range strings.Lines(listing) {
		if !strings.Contains(line, text) {
			continue
		}
		numbers := counted.FindStringSubmatch(line)
		if numbers == nil {
			return 0, 0, fmt.Errorf("rule %q has no counter", strings.TrimSpace(line))
		}
		p, err1 := strconv.ParseUint(numbers[1], 10, 64)
		b, err2 := strconv.ParseUint(numbers[2], 10, 64)
		if err := errors.Join(err1, err2); err != nil {
			return 0, 0, err
		}
		packets, bytes, found = packets+p, bytes+b, true
	}
	if !found {
		return 0, 0, fmt.Errorf("no rule with %q in %q", text, listing)
	}
	return packets, bytes, nil
}

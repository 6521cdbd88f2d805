package modes

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/base32"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"text/template"

	"golang.org/x/sync/errgroup"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// The addresses of the whole cluster. They are one network (flannel's Network, kube-proxy's --cluster-cidr), wide enough
// for the podCIDRs of maxNodes nodes.
var (
	clusterCIDR = netip.MustParsePrefix("10.192.0.0/10")
	serviceCIDR = netip.MustParsePrefix("10.96.0.0/12")
)

const maxNodes = 10_000

// farNode is number i, from 0, of the nodes that exist in lists, tables and maps only. Its address is on the fabric's link, where nobody has it.
func farNode(i int) lab.NodeSpec {
	return lab.NodeSpec{
		Name:        fmt.Sprintf("far-%d", i),
		InternalIPs: []netip.Addr{netip.AddrFrom4([4]byte{172, 18, byte(1 + i/250), byte(1 + i%250)})},
		PodCIDRs:    []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(192 + i/256), byte(i), 0}), 24)},
	}
}

// FarNodes adds nodes that do not exist, until there are k.
func FarNodes(specs []lab.NodeSpec, k int) []lab.NodeSpec {
	for i := range k - len(specs) {
		specs = append(specs, farNode(i))
	}
	return specs
}

// service is a Service with one ready endpoint, on a far node. What a packet that is for none of them costs does not depend on the number of endpoints.
type service struct {
	Name         string // namespace/name
	IP, Endpoint netip.Addr
}

func services(k int) []service {
	plus := func(a netip.Addr, n int) netip.Addr {
		raw := a.As4()
		binary.BigEndian.PutUint32(raw[:], binary.BigEndian.Uint32(raw[:])+uint32(n))
		return netip.AddrFrom4(raw)
	}
	all := make([]service, k)
	for i := range all {
		all[i] = service{fmt.Sprintf("default/service-%d", i), plus(serviceCIDR.Addr(), i+10), plus(clusterCIDR.Addr(), i+10)}
	}
	return all
}

// Hash names a Service's chain as kube-proxy does: so many letters and digits that depend on what the chain is for.
func (s service) Hash(length int) string { return hash(s.Name, length) }

// EndpointHash names the chain of its endpoint.
func (s service) EndpointHash(length int) string { return hash(s.Name+s.Endpoint.String(), length) }

func hash(of string, length int) string {
	sum := sha256.Sum256([]byte(of))
	return base32.StdEncoding.EncodeToString(sum[:])[:length]
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
	Services   []service
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

// setServices writes the whole set of rules anew, in one transaction per node as kube-proxy does. None of the benchmark's traffic is for one of the Services.
func (n *Network) setServices(ctx context.Context, k int) error {
	if n.setup.rules == "" {
		return nil
	}
	return n.forAll(func(node *lab.Node) error {
		rules := ruleset{Node: node.Addr(), PodCIDR: node.PodCIDR(), Cluster: clusterCIDR, Masquerade: n.setup.masquerade, Services: services(k)}
		text, err := rules.text(n.setup.rules)
		if err != nil {
			return err
		}
		return apply(ctx, node, text, n.setup.rules)
	})
}

func (n *Network) forAll(do func(*lab.Node) error) error {
	var group errgroup.Group
	for _, node := range n.lab.Nodes {
		group.Go(func() error { return do(node) })
	}
	return group.Wait()
}

// apply feeds rules to the program that kube-proxy feeds them to.
func apply(ctx context.Context, node *lab.Node, rules []byte, file string) error {
	command := map[string][]string{iptables: {"iptables-restore", "-w", "10"}, nftables: {"nft", "-f"}}[file]
	path := filepath.Join(node.Dir, "rules")
	if err := os.WriteFile(path, rules, 0o600); err != nil {
		return fmt.Errorf("write the rules of %s: %w", node.Name, err)
	}
	_, err := node.Exec(ctx, command[0], append(command[1:], path)...)
	return err
}

// The counters of rules. forwarded are all packets that met the FORWARD chain: the jump that each of them reaches. opened are the first ones of new
// connections, by the jump that no other packet takes.
const (
	forwarded = "FORWARD"
	opened    = "new"
	invalid   = "INVALID"
)

// nftNew is what a new connection's first packet meets in the forward hook.
const nftNew = "jump service-endpoints-check"

// countRules reads the rules that count, each chain by itself: iptables-save would list 20 000 Services in another table first. A rule is known by a
// part of its text.
func countRules(ctx context.Context, into Counters, node *lab.Node, file string) error {
	type chain struct {
		list     []string
		counters map[string]string
	}
	list := func(chain string) []string {
		return []string{"iptables", "-w", "10", "-t", "filter", "-v", "-S", chain}
	}
	chains := map[string][]chain{
		iptables: {
			{list("FORWARD"), map[string]string{forwarded: "-j KUBE-FORWARD", opened: "-j KUBE-SERVICES"}},
			{list("KUBE-FORWARD"), map[string]string{invalid: "--ctstate INVALID"}},
		},
		// Neither kube-proxy's nor flannel's nft rules count. One that sees new connections only can, and costs their packets nothing.
		nftables: {{[]string{"nft", "list", "chain", "ip", "kube-proxy", "filter-forward"}, map[string]string{opened: nftNew}}},
	}[file]
	for _, c := range chains {
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

// ruleCounter is how many packets and bytes a rule has seen, in a chain as it is listed. The rule is the one whose line contains the text.
func ruleCounter(listing, text string) (packets, bytes uint64, err error) {
	for line := range strings.Lines(listing) {
		if !strings.Contains(line, text) {
			continue
		}
		numbers := counted.FindStringSubmatch(line)
		if numbers == nil {
			return 0, 0, fmt.Errorf("rule %q has no counter", strings.TrimSpace(line))
		}
		packets, err = strconv.ParseUint(numbers[1], 10, 64)
		if err == nil {
			bytes, err = strconv.ParseUint(numbers[2], 10, 64)
		}
		return packets, bytes, err
	}
	return 0, 0, fmt.Errorf("no rule with %q in %q", text, listing)
}

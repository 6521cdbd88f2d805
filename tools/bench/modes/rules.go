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

// service is a Service with one ready endpoint, on a far node. What a packet that is for none of them costs does not depend on the number of endpoints.
type service struct {
	Name         string // namespace/name
	IP, Endpoint netip.Addr
}

func services(k int, family wire.Family) []service {
	plus := func(a netip.Addr, n int) netip.Addr {
		raw := a.AsSlice()
		last := raw[len(raw)-4:]
		binary.BigEndian.PutUint32(last, binary.BigEndian.Uint32(last)+uint32(n))
		sum, _ := netip.AddrFromSlice(raw) // as long as it was
		return sum
	}
	all := make([]service, k)
	for i := range all {
		all[i] = service{fmt.Sprintf("default/service-%d", i), plus(serviceCIDR[family].Addr(), i+10), plus(clusterCIDR[family].Addr(), i+10)}
	}
	return all
}

// Backend is where the endpoint listens.
func (s service) Backend() netip.AddrPort { return netip.AddrPortFrom(s.Endpoint, 8080) }

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
		rules := ruleset{
			Node: node.Addr(), PodCIDR: node.PodCIDR(), Cluster: clusterCIDR[n.setup.family], Masquerade: n.setup.masquerade,
			Services: services(k, n.setup.family),
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
func (s setup) countRules(ctx context.Context, into Counters, node *lab.Node) error {
	type chain struct {
		list     []string
		counters map[string]string
	}
	list := func(chain string) []string {
		return []string{programs[s.family].list, "-w", "10", "-t", "filter", "-v", "-S", chain}
	}
	chains := map[string][]chain{
		iptables: {
			{list("FORWARD"), map[string]string{forwarded: "-j KUBE-FORWARD", opened: "-j KUBE-SERVICES"}},
			{list("KUBE-FORWARD"), map[string]string{invalid: "--ctstate INVALID"}},
		},
		// Neither kube-proxy's nor flannel's nft rules count. One that sees new connections only can, and costs their packets nothing.
		nftables: {{[]string{"nft", "list", "chain", "ip", "kube-proxy", "filter-forward"}, map[string]string{opened: nftNew}}},
	}[s.rules]
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

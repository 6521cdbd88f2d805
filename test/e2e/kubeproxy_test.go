package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// kubeService is a Service with one endpoint, for TCP and UDP alike.
type kubeService struct {
	name     string
	cluster  netip.AddrPort
	endpoint netip.AddrPort
	nodePort uint16 // 0: none
	local    bool   // its externalTrafficPolicy
}

// netfilterNames are what rules of a family are made of.
type netfilterNames struct {
	pods     string // the parent of all podCIDRs of a lab, which kube-proxy is told
	loopback string
	iptables string // what the programs for it are called
	// In nftables, the table, its headers and its addresses.
	nft, address string
}

var netfilters = [wire.Families]netfilterNames{
	wire.IPv4: {"10.244.0.0/16", "127.0.0.0/8", "iptables", "ip", "ipv4_addr"},
	wire.IPv6: {"fd00:10:244::/48", "::1", "ip6tables", "ip6", "ipv6_addr"},
}

// names are those of the Service's family.
func (s kubeService) names() netfilterNames { return netfilters[wire.FamilyOf(s.cluster.Addr())] }

// only is the prefix of an address that has no network around it.
func only(addr netip.Addr) netip.Prefix { return netip.PrefixFrom(addr, addr.BitLen()) }

// kubeProxy are the ways in which kube-proxy writes its rules: what makes a node have them, what takes them away, and the
// program that takes both.
var kubeProxy = map[string]struct {
	rules   func(*lab.Node, []kubeService) string
	clear   func(netfilterNames) string
	program func(netfilterNames) []string
}{
	"iptables-nft":    {iptablesMode, noIptables, iptablesRestore("nft")},
	"iptables-legacy": {iptablesMode, noIptables, iptablesRestore("legacy")},
	"nftables": {
		nftablesMode, func(n netfilterNames) string { return "delete table " + n.nft + " kube-proxy\n" },
		func(netfilterNames) []string { return []string{"nft", "-f"} },
	},
}

func noIptables(netfilterNames) string { return "*filter\nCOMMIT\n*nat\nCOMMIT\n" }

func iptablesRestore(variant string) func(netfilterNames) []string {
	return func(n netfilterNames) []string { return []string{n.iptables + "-" + variant + "-restore"} }
}

// proxy has every node translate Services, all of one family, as kube-proxy does.
func proxy(t *testing.T, l *lab.Lab, how string, services []kubeService) {
	t.Helper()
	for _, node := range l.Nodes {
		applyRules(t, node, kubeProxy[how].rules(node, services), kubeProxy[how].program(services[0].names())...)
	}
}

// unproxy takes all of that away.
func unproxy(t *testing.T, l *lab.Lab, how string, family wire.Family) {
	t.Helper()
	for _, node := range l.Nodes {
		applyRules(t, node, kubeProxy[how].clear(netfilters[family]), kubeProxy[how].program(netfilters[family])...)
	}
}

// applyRules hands rules to the program that takes them.
func applyRules(t *testing.T, node *lab.Node, rules string, program ...string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "rules")
	if err := os.WriteFile(file, []byte(rules), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := node.Exec(t.Context(), program[0], append(program[1:], file)...); err != nil {
		t.Fatalf("%v\n%s", err, rules)
	}
}

// ruleText collects lines.
type ruleText struct{ strings.Builder }

func (r *ruleText) add(format string, args ...any) { fmt.Fprintf(r, format+"\n", args...) }

// hasEndpoint says whether a node has the Service's endpoint as one of its pods.
func (s kubeService) hasEndpoint(node *lab.Node) bool {
	return node.PodCIDROf(wire.FamilyOf(s.endpoint.Addr())).Contains(s.endpoint.Addr())
}

// iptablesMode is what kube-proxy writes in its iptables mode, without comments.
func iptablesMode(node *lab.Node, services []kubeService) string {
	r := &ruleText{}
	r.add("*filter\n:INPUT ACCEPT [0:0]\n:FORWARD ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:KUBE-FORWARD - [0:0]\n:KUBE-EXTERNAL-SERVICES - [0:0]")
	r.add("-A INPUT -m conntrack --ctstate NEW -j KUBE-EXTERNAL-SERVICES")
	r.add("-A FORWARD -j KUBE-FORWARD\n-A FORWARD -m conntrack --ctstate NEW -j KUBE-EXTERNAL-SERVICES")
	r.add("-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP")
	r.add("-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT")
	r.add("-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT")
	for _, s := range services {
		if s.local && !s.hasEndpoint(node) {
			for _, proto := range []string{"tcp", "udp"} {
				r.add("-A KUBE-EXTERNAL-SERVICES -p %[1]s -m addrtype --dst-type LOCAL -m %[1]s --dport %[2]d -j DROP", proto, s.nodePort)
			}
		}
	}
	r.add("COMMIT\n*nat\n:PREROUTING ACCEPT [0:0]\n:INPUT ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:POSTROUTING ACCEPT [0:0]")
	r.add(":KUBE-SERVICES - [0:0]\n:KUBE-NODEPORTS - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n:KUBE-POSTROUTING - [0:0]")
	r.add("-A PREROUTING -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES\n-A POSTROUTING -j KUBE-POSTROUTING")
	r.add("-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000")
	r.add("-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000")
	r.add("-A KUBE-POSTROUTING -j MASQUERADE --random-fully")
	for _, s := range services {
		for _, proto := range []string{"tcp", "udp"} {
			s.iptables(r, node, proto)
		}
	}
	r.add("-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\nCOMMIT")
	return r.String()
}

func (s kubeService) iptables(r *ruleText, node *lab.Node, proto string) {
	tail := strings.ToUpper(s.name + "-" + proto)
	svc, sep, ext := "KUBE-SVC-"+tail, "KUBE-SEP-"+tail, "KUBE-EXT-"+tail
	r.add(":%s - [0:0]\n:%s - [0:0]\n:%s - [0:0]", svc, sep, ext)
	match := fmt.Sprintf("-d %s -p %[2]s -m %[2]s --dport %[3]d", only(s.cluster.Addr()), proto, s.cluster.Port())
	r.add("-A KUBE-SERVICES %s -j %s", match, svc)
	r.add("-A %s ! -s %s %s -j KUBE-MARK-MASQ", svc, s.names().pods, match)
	r.add("-A %s -j %s", svc, sep)
	r.add("-A %s -s %s -j KUBE-MARK-MASQ", sep, only(s.endpoint.Addr()))
	r.add("-A %s -p %[2]s -m %[2]s -j DNAT --to-destination %[3]s", sep, proto, s.endpoint)
	if s.nodePort == 0 {
		return
	}
	r.add("-A KUBE-NODEPORTS -p %[1]s -m %[1]s --dport %[2]d -j %[3]s", proto, s.nodePort, ext)
	if !s.local {
		r.add("-A %s -j KUBE-MARK-MASQ\n-A %[1]s -j %[2]s", ext, svc)
		return
	}
	r.add("-A %s -s %s -j %s", ext, s.names().pods, svc)
	r.add("-A %s -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ\n-A %[1]s -m addrtype --src-type LOCAL -j %[2]s", ext, svc)
	if s.hasEndpoint(node) {
		r.add("-A %s -j %s", ext, sep)
	}
}

// nftablesMode is what kube-proxy writes in its nftables mode, and a rule against what is INVALID, as its other mode has.
func nftablesMode(node *lab.Node, services []kubeService) string {
	r, n := &ruleText{}, services[0].names()
	r.add("table %s kube-proxy {", n.nft)
	r.add("chain mark-for-masquerade { mark set mark or 0x4000; }")
	r.add("chain masquerading { mark and 0x4000 == 0 return; mark set mark xor 0x4000; masquerade fully-random; }")
	for _, s := range services {
		for _, proto := range []string{"tcp", "udp"} {
			s.nftables(r, node, proto)
		}
	}
	addresses, ports := &ruleText{}, &ruleText{}
	for _, s := range services {
		for _, proto := range []string{"tcp", "udp"} {
			addresses.add("%s . %s . %d : goto service-%s-%[2]s,", s.cluster.Addr(), proto, s.cluster.Port(), s.name)
			if s.nodePort != 0 {
				ports.add("%s . %d : goto external-%s-%[1]s,", proto, s.nodePort, s.name)
			}
		}
	}
	r.add("map service-ips { type %s . inet_proto . inet_service : verdict; elements = { %s } }", n.address, addresses.String())
	r.add("map service-nodeports { type inet_proto . inet_service : verdict; elements = { %s } }", ports.String())
	r.add("chain services { %[1]s daddr . meta l4proto . th dport vmap @service-ips\n"+
		"fib daddr type local %[1]s daddr != %[2]s meta l4proto . th dport vmap @service-nodeports\n}", n.nft, n.loopback)
	r.add("chain nat-prerouting { type nat hook prerouting priority -100; jump services; }")
	r.add("chain nat-output { type nat hook output priority -100; jump services; }")
	r.add("chain nat-postrouting { type nat hook postrouting priority 100; jump masquerading; }")
	r.add("chain filter-forward { type filter hook forward priority 0; ct state invalid drop; }")
	r.add("}")
	return r.String()
}

func (s kubeService) nftables(r *ruleText, node *lab.Node, proto string) {
	n := s.names()
	r.add("chain endpoint-%s-%s {\n%s saddr %s jump mark-for-masquerade\nmeta l4proto %[2]s dnat to %[5]s\n}", s.name, proto, n.nft, s.endpoint.Addr(), s.endpoint)
	r.add("chain service-%s-%s {\n%[3]s daddr %[4]s %[2]s dport %[5]d %[3]s saddr != %[6]s jump mark-for-masquerade\ngoto endpoint-%[1]s-%[2]s\n}",
		s.name, proto, n.nft, s.cluster.Addr(), s.cluster.Port(), n.pods)
	if s.nodePort == 0 {
		return
	}
	r.add("chain external-%s-%s {", s.name, proto)
	switch {
	case !s.local:
		r.add("jump mark-for-masquerade\ngoto service-%s-%s", s.name, proto)
	case s.hasEndpoint(node):
		r.add("%s saddr %s goto service-%s-%s", n.nft, n.pods, s.name, proto)
		r.add("fib saddr type local jump mark-for-masquerade\ngoto endpoint-%s-%s", s.name, proto)
	default:
		r.add("%s saddr %s goto service-%s-%s\ndrop", n.nft, n.pods, s.name, proto)
	}
	r.add("}")
}

package modes

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

func TestUnknownMode(t *testing.T) {
	if _, err := Build(t.Context(), "ipvs", nil); err == nil || !strings.Contains(err.Error(), result.IPTables) {
		t.Errorf("an unknown mode: error %v does not name the known ones", err)
	}
}

// judged is a proof with one counter of each kind, what they say before, and what they say after a thousand datagrams.
func judged() (p proof, before, after Counters) {
	p = proof{
		through: []string{"in", "out"}, both: []string{"rules"}, opened: []string{"new"}, few: []string{"stack"},
		none: []string{"dropped "}, held: []string{"tracked"},
	}
	before = Counters{"in": 10, "out": 20, "rules": 0, "new": 1, "stack": 5, "tracked": 0, "dropped A": 3,
		"in bytes": 1000, "out bytes": 2000, "rules bytes": 0}
	after = Counters{"in": 1010, "out": 1020, "rules": 1100, "new": 2, "stack": 5, "tracked": 1, "dropped A": 3,
		"in bytes": 1000, "out bytes": 2000, "rules bytes": 0}
	return p, before, after
}

func TestJudge(t *testing.T) {
	sent := func(n uint64) Traffic { return Traffic{Forth: n, Back: 100, Exact: true, Flows: 1} }
	for _, tc := range []struct {
		name    string
		change  func(after Counters)
		traffic Traffic
		wrong   string // part of the error; "" for none
	}{
		{"all went the way", func(Counters) {}, sent(1000), ""},
		{"a first one waited for a neighbour", func(Counters) {}, sent(1005), ""},
		{"fewer than were sent", func(Counters) {}, sent(1006), `"in" rose by 1000, want 1001 to`},
		{"neighbour discovery's too", func(Counters) {}, sent(951), ""},
		{"more than were sent", func(Counters) {}, sent(940), `"in" rose by 1000, want 935 to 990`},
		{"more than are known of", func(Counters) {}, Traffic{Forth: 500, Flows: 1}, ""},
		{"one stage was not passed", func(c Counters) { c["out"] = 20 }, sent(1000), `"out" rose by 0`},
		{"any at all, and none came", func(c Counters) { c["out"] = 20 }, Traffic{}, `"out" rose by 0, want at least 1`},
		{"rules that saw one direction", func(c Counters) { c["rules"] = 1000 }, sent(1000), `"rules" rose by 1000, want 1095 to`},
		{"rules that saw all twice", func(c Counters) { c["rules"] = 2200 }, sent(1000), `"rules" rose by 2200`},
		{"a flow that no rule met", func(c Counters) { c["new"] = 1 }, sent(1000), `"new" rose by 0, want 1 to 51`},
		{"flows that nobody opened", func(c Counters) { c["new"] = 900 }, sent(1000), `"new" rose by 899`},
		{"a few strays", func(c Counters) { c["stack"] = 56 }, sent(1000), ""},
		{"too many strays", func(c Counters) { c["stack"] = 57 }, sent(1000), `"stack" rose by 52`},
		{"a drop", func(c Counters) { c["dropped A"] = 4 }, sent(1000), `"dropped A" rose by 1`},
		{"a drop of a new kind", func(c Counters) { c["dropped B"] = 1 }, sent(1000), `"dropped B" rose by 1`},
		{"nothing tracked", func(c Counters) { c["tracked"] = 0 }, sent(1000), `"tracked" rose by 0`},
		{"a counter that began anew", func(c Counters) { c["in"] = 9 }, sent(1000), `"in" went from 10 to 9`},
		{"a counter that is not there", func(c Counters) { delete(c, "stack") }, sent(1000), `"stack"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p, before, after := judged()
			tc.change(after)
			complains(t, p.judge(before, after, tc.traffic), tc.wrong)
		})
	}
}

// A stream's packets are of any size: it is its bytes that must be on every link, with their headers, and no more.
func TestJudgeStream(t *testing.T) {
	const sent = 100_000_000
	for _, tc := range []struct {
		name       string
		in, wanted uint64
		wrong      string
	}{
		{"with headers", sent * 105 / 100, sent, ""},
		{"in large packets", sent, sent, ""},
		{"half of it", sent / 2, sent, `"in bytes" rose by 50000000, want 99900000 to`},
		{"another stream's too", 2 * sent, sent, `"in bytes" rose by 200000000`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p, before, after := judged()
			after["in bytes"], after["out bytes"], after["rules bytes"] = 1000+tc.in, 2000+sent, sent
			complains(t, p.judge(before, after, Traffic{Forth: 1000, Bytes: tc.wanted, Flows: 1}), tc.wrong)
		})
	}
}

// What is dropped is found out also when nobody knows what was sent.
func TestIntact(t *testing.T) {
	p, before, after := judged()
	after["in"] = 0
	complains(t, p.intact(before, after), "")
	after["dropped A"]++
	complains(t, p.intact(before, after), `"dropped A" rose by 1, want 0 to 0`)
}

func complains(t *testing.T, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Error(err)
	case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
		t.Errorf("error %v, want one with %s", err, want)
	}
}

func TestColumn(t *testing.T) {
	const table = "entries found insert_failed drop\n00000005 0 0000000a 1\n00000005 0 00000001 0\n"
	if n, err := column(table, "insert_failed"); n != 11 || err != nil {
		t.Errorf("%d, %v; want 11", n, err)
	}
	for name, table := range map[string]string{"empty": "", "no such column": "entries\n1\n", "cut off": table + "00000005 0\n", "no number": table + "1 1 x 1\n"} {
		if n, err := column(table, "insert_failed"); err == nil {
			t.Errorf("%s: %d and no error", name, n)
		}
	}
}

func TestBacklog(t *testing.T) {
	if n, err := sum("22bc0177 0000000a 00000005\n09d03c20 00000001 00000000\n", 1); n != 11 || err != nil {
		t.Errorf("%d, %v; want 11", n, err)
	}
	for _, table := range []string{"22bc0177\n", "22bc0177 x 0\n"} {
		if n, err := sum(table, 1); err == nil {
			t.Errorf("%q was read as %d", table, n)
		}
	}
}

func inEachFamily(t *testing.T, test func(t *testing.T, family wire.Family)) {
	for family := range wire.Families {
		t.Run(family.String(), func(t *testing.T) { test(t, family) })
	}
}

// No far node shares anything with another, with the nodes that there are, or with a Service.
func TestFarNodes(t *testing.T) { inEachFamily(t, farNodesAreApart) }

func farNodesAreApart(t *testing.T, family wire.Family) {
	t.Helper()
	near := [wire.Families]string{"10.244.0.0/16", "fd00:10:244::/56"}[family]
	fabric := [wire.Families]string{"172.18.0.0/16", "fd00:172:18::/64"}[family]
	nodes := [wire.Families]string{"172.18.0.0/24", "fd00:172:18::/112"}[family]
	taken := []netip.Prefix{netip.MustParsePrefix(near), serviceCIDR[family]}
	names, addrs, cidrs := map[string]bool{}, map[netip.Addr]bool{}, map[netip.Prefix]bool{}
	for i := range maxNodes {
		node := farNode(i, family)
		addr, podCIDR := node.InternalIPs[0], node.PodCIDRs[0]
		names[node.Name], addrs[addr], cidrs[podCIDR] = true, true, true
		if !clusterCIDR[family].Contains(podCIDR.Addr()) || slices.ContainsFunc(taken, podCIDR.Overlaps) || podCIDR != podCIDR.Masked() {
			t.Fatalf("far node %d has podCIDR %s", i, podCIDR)
		}
		last := addr.AsSlice()[len(addr.AsSlice())-1]
		if addr.Is4() && (last == 0 || last == 255) || !netip.MustParsePrefix(fabric).Contains(addr) || netip.MustParsePrefix(nodes).Contains(addr) {
			t.Fatalf("far node %d has address %s", i, addr)
		}
	}
	if len(names) != maxNodes || len(addrs) != maxNodes || len(cidrs) != maxNodes {
		t.Errorf("of %d far nodes there are %d names, %d addresses, %d podCIDRs", maxNodes, len(names), len(addrs), len(cidrs))
	}
}

func TestServices(t *testing.T) { inEachFamily(t, servicesAreApart) }

func servicesAreApart(t *testing.T, family wire.Family) {
	t.Helper()
	const maxServices = 50_000
	all := farServices(maxServices, family)
	frontend := (&Network{setup: setup{family: family}}).Frontend("").Addr()
	clusters, chains := map[netip.Addr]bool{frontend: true}, map[string]bool{}
	for _, s := range all {
		clusters[s.IP], chains[s.Hash(s.Ports[0], 16)], chains[s.EndpointHash(s.Ports[0], 16)] = true, true, true
		if !serviceCIDR[family].Contains(s.IP) || !clusterCIDR[family].Contains(s.Endpoint()) {
			t.Fatalf("service %+v is out of the Services' or the pods' network", s)
		}
	}
	if len(clusters) != maxServices+1 || len(chains) != 2*maxServices || !serviceCIDR[family].Contains(frontend) {
		t.Errorf("%d Services and the one that traffic is for, %s, have %d addresses; the others %d chains", maxServices, frontend, len(clusters), len(chains))
	}
}

// The list that the first packet of a connection walks grows by one rule per Service's port, before its last rule. That of the Service that traffic is for is in
// its middle.
func TestServiceRules(t *testing.T) {
	ip, server := netip.MustParseAddr("10.96.0.5"), Endpoint{Addr: netip.MustParseAddr("10.244.1.2")}
	for name, c := range map[string]struct {
		services             []Service
		ports, before, count int
	}{
		"none":             {nil, 0, 0, 0},
		"seven":            {farServices(7, wire.IPv4), 7, 0, 0},
		"one, with server": {withServed(nil, ip, server), 5, 0, 1},
		"with server":      {withServed(farServices(6, wire.IPv4), ip, server), 11, 3, 1},
	} {
		rules := ruleset{Node: netip.MustParseAddr("172.18.0.11"), PodCIDR: netip.MustParsePrefix("10.244.0.0/24"), Cluster: clusterCIDR[wire.IPv4], Masquerade: "flannel",
			Services: c.services}
		text := rendered(t, rules, iptables)
		if got := strings.Count(text, "-A KUBE-SERVICES "); got != c.ports+1 {
			t.Errorf("%s: %d rules in KUBE-SERVICES, want %d", name, got, c.ports+1)
		}
		last := text[strings.LastIndex(text, "-A KUBE-SERVICES "):]
		if !strings.Contains(strings.SplitN(last, "\n", 2)[0], "KUBE-NODEPORTS") {
			t.Errorf("%s: node ports are not last", name)
		}
		before, _, _ := strings.Cut(text, "-A KUBE-SERVICES -d "+ip.String()+" ")
		if got := strings.Count(before, "-A KUBE-SERVICES "); c.count > 0 && got != c.before {
			t.Errorf("%s: the Service that traffic is for comes after %d others, want %d", name, got, c.before)
		}
		if got := strings.Count(text, "-j DNAT"); got != c.ports {
			t.Errorf("%s: %d translations, want %d", name, got, c.ports)
		}
		if got := strings.Count(text, "-A KUBE-NODEPORTS "); got != c.count*(ServicePorts+1) {
			t.Errorf("%s: %d rules of node ports, want those of the Service that traffic is for", name, got)
		}
		text = rendered(t, rules, nftables)
		if got := strings.Count(text, "add element ip kube-proxy service-ips"); got != c.ports {
			t.Errorf("%s: %d elements of service-ips, want %d", name, got, c.ports)
		}
		if got := strings.Count(text, "ip daddr "+ip.String()+" counter"); got != c.count {
			t.Errorf("%s: %d rules count what is for the Service, want %d", name, got, c.count)
		}
	}
}

func rendered(t *testing.T, r ruleset, file string) string {
	t.Helper()
	text, err := r.text(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestRuleCounter(t *testing.T) {
	const listing = `-P FORWARD ACCEPT -c 7 700
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "load balancer firewall" -c 12 1200 -j KUBE-PROXY-FIREWALL
-A FORWARD -m comment --comment "forwarding rules" -c 34 3400 -j KUBE-FORWARD
		ct state new counter packets 8 bytes 512 jump service-endpoints-check
`
	for text, want := range map[string][2]uint64{"-j KUBE-FORWARD": {34, 3400}, nftNew: {8, 512}} {
		if packets, bytes, err := ruleCounter(listing, text); [2]uint64{packets, bytes} != want || err != nil {
			t.Errorf("%s: %d packets, %d bytes, error %v; want %d", text, packets, bytes, err, want)
		}
	}
	for name, broken := range map[string]string{
		"the rule is gone": "-P FORWARD ACCEPT -c 7 700\n",
		"no counter":       strings.ReplaceAll(listing, "-c 34 3400 ", ""),
		"no number":        strings.ReplaceAll(listing, "-c 34", "-c 99999999999999999999"),
	} {
		if got, _, err := ruleCounter(broken, "-j KUBE-FORWARD"); err == nil {
			t.Errorf("%s: %d packets and no error", name, got)
		}
	}
}

func touch(t *testing.T, dir, path string) {
	t.Helper()
	path = filepath.Join(dir, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
}

// A mode asks for what it lacks, one after the other, until there is nothing left to ask for.
func TestReady(t *testing.T) {
	for mode, wants := range map[string][]string{
		result.Direct:       nil,
		result.EBPF:         {"bin/ebpf-cni", "bin/ebpf-agent"},
		result.KubeProxy:    {"path/iptables-restore", "path/iptables", "path/go", "net/netfilter/nf_conntrack_max", "bin/ebpf-cni", "bin/ebpf-agent"},
		result.PTP:          {"path/iptables-restore", "path/iptables", "path/go", "net/netfilter/nf_conntrack_max", "bin/ebpf-cni"},
		result.VXLAN:        {"bin/ebpf-cni", "bin/ebpf-agent"},
		result.IPTablesIPv6: {"path/ip6tables-restore", "path/ip6tables", "path/go", "net/netfilter/nf_conntrack_max", "net/bridge/bridge-nf-call-iptables", "bin/ebpf-cni"},
		result.NFTables:     {"path/nft", "path/go", "net/netfilter/nf_conntrack_max", "net/bridge/bridge-nf-call-iptables", "bin/ebpf-cni"},
	} {
		t.Run(mode, func(t *testing.T) {
			dir := t.TempDir()
			t.Setenv("PATH", filepath.Join(dir, "path"))
			t.Setenv("EBPF_CNI_BIN", filepath.Join(dir, "bin"))
			for _, want := range wants {
				if err := ready(filepath.Join(dir, "net"), mode); err == nil || !strings.Contains(err.Error(), filepath.Base(want)) {
					t.Errorf("without %s: %v", want, err)
				}
				touch(t, dir, want)
			}
			if err := ready(filepath.Join(dir, "net"), mode); err != nil {
				t.Errorf("with all that it takes: %v", err)
			}
		})
	}
}

package netfilter

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// kubeProxyLeft is what kube-proxy and the kubelet of one node have in all tables, as iptables-save lists it, with rules of others.
const kubeProxyLeft = `*mangle
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-PROXY-CANARY - [0:0]
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-NWPLCY-DEFAULT - [0:0]
:KUBE-PROXY-CANARY - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-ROUTER-FORWARD - [0:0]
:KUBE-SERVICES - [0:0]
[1:60] -A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
[2:60] -A INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS
[3:60] -A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
[4:60] -A INPUT -j KUBE-FIREWALL
[5:60] -A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
[6:60] -A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
[7:60] -A FORWARD -j KUBE-ROUTER-FORWARD
[8:60] -A FORWARD -i docker0 -j ACCEPT
[9:60] -A OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
[10:60] -A OUTPUT -j KUBE-FIREWALL
[11:60] -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
[12:60] -A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
[13:60] -A KUBE-ROUTER-FORWARD -j KUBE-NWPLCY-DEFAULT
[14:60] -A KUBE-SERVICES -p tcp -m comment --comment "shop/web has no endpoints" -m tcp --dport 80 -j REJECT
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:DOCKER - [0:0]
:KUBE-EXT-5NTGYRLTAEHUU6PK - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-PROXY-CANARY - [0:0]
:KUBE-SEP-6E7XQMQ4RAYOWTTM - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-NPX46M4PTMTKRN6Y - [0:0]
[21:60] -A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
[22:60] -A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
[23:60] -A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
[24:60] -A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
[25:60] -A POSTROUTING -o docker0 -m comment --comment "not KUBE-SERVICES" -j RETURN
[26:60] -A DOCKER -i docker0 -j RETURN
[27:60] -A KUBE-EXT-5NTGYRLTAEHUU6PK -j KUBE-MARK-MASQ
[28:60] -A KUBE-EXT-5NTGYRLTAEHUU6PK -j KUBE-SVC-NPX46M4PTMTKRN6Y
[29:60] -A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
[30:60] -A KUBE-NODEPORTS -p tcp -m tcp --dport 30443 -j KUBE-EXT-5NTGYRLTAEHUU6PK
[31:60] -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
[32:60] -A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
[33:60] -A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
[34:60] -A KUBE-SEP-6E7XQMQ4RAYOWTTM -p tcp -m tcp -j DNAT --to-destination %BACKEND%
[35:60] -A KUBE-SERVICES -p tcp -m tcp --dport 443 -j KUBE-SVC-NPX46M4PTMTKRN6Y
[36:60] -A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
[37:60] -A KUBE-SVC-NPX46M4PTMTKRN6Y -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-6E7XQMQ4RAYOWTTM
[38:60] -A KUBE-SVC-NPX46M4PTMTKRN6Y -j KUBE-SEP-6E7XQMQ4RAYOWTTM
COMMIT
`

// kubeProxyGone says of a line of iptables-save that it goes with kube-proxy.
func kubeProxyGone(line string) bool {
	if strings.Contains(line, "-j KUBE-FIREWALL") || strings.Contains(line, "KUBE-ROUTER") || strings.Contains(line, `"not KUBE-SERVICES"`) || strings.HasSuffix(line, "-j KUBE-HOSTPORTS") {
		return false
	}
	for _, stays := range []string{":KUBE-KUBELET-CANARY", ":KUBE-IPTABLES-HINT", ":KUBE-FIREWALL", ":KUBE-NWPLCY"} {
		if strings.HasPrefix(line, stays) {
			return false
		}
	}
	return strings.Contains(line, "KUBE-")
}

// savedAll are the rules of all tables, without what stands beside them.
func savedAll(t *testing.T, command string) (lines []string) {
	t.Helper()
	out, err := exec.Command(command, "-c").Output()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		if line = strings.TrimSpace(line); !strings.HasPrefix(line, "#") {
			lines = append(lines, line)
		}
	}
	return lines
}

// removeAll cleans up and returns what was told.
func removeAll(t *testing.T) (told []string) {
	t.Helper()
	if err := RemoveKubeProxy(func(what string) { told = append(told, what) }); err != nil {
		t.Error(err)
	}
	return told
}

// What kube-proxy has left in iptables goes, the filter last; what the kubelet and others have stays as it is.
func TestKubeProxyIsRemoved(t *testing.T) {
	for _, tt := range []struct{ command, backend, first, last string }{
		{"iptables-nft", "172.18.0.12:6443", "nftables table ip nat: 8 chains, and 3 rules that led there", "nftables table ip filter: 6 chains, and 6 rules that led there"},
		{"ip6tables-nft", "[fd00::12]:6443", "nftables table ip6 nat: 8 chains, and 3 rules that led there", "nftables table ip6 filter: 6 chains, and 6 rules that led there"},
		{"iptables-legacy", "172.18.0.12:6443", "iptables table nat: 8 chains, and 3 rules that led there", "iptables table filter: 6 chains, and 6 rules that led there"},
		{"ip6tables-legacy", "[fd00::12]:6443", "ip6tables table nat: 8 chains, and 3 rules that led there", "ip6tables table filter: 6 chains, and 6 rules that led there"},
	} {
		t.Run(tt.command, func(t *testing.T) {
			priv.Isolate(t)
			if told := removeAll(t); told != nil {
				t.Errorf("without anything: %q", told)
			}
			write(t, of(kubeProxyLeft, "%BACKEND%", tt.backend), tt.command+"-restore", "-c")
			want := slices.DeleteFunc(savedAll(t, tt.command+"-save"), kubeProxyGone)
			told := removeAll(t)
			if len(told) != 3 || told[0] != tt.first || told[2] != tt.last {
				t.Errorf("told %q", told)
			}
			if left := savedAll(t, tt.command+"-save"); !slices.Equal(left, want) {
				t.Errorf("left:\n%s\nwant\n%s", strings.Join(left, "\n"), strings.Join(want, "\n"))
			}
			if told := removeAll(t); told != nil {
				t.Errorf("a second time: %q", told)
			}
		})
	}
}

// A chain that a runtime's host ports need stays, and what it leads to of kube-proxy's does not.
func TestKubeProxyChainsThatOthersNeed(t *testing.T) {
	for _, variant := range []string{"nft", "legacy"} {
		t.Run(variant, func(t *testing.T) {
			priv.Isolate(t)
			write(t, of(kubeProxyLeft, "%BACKEND%", "172.18.0.12:6443"), "iptables-"+variant+"-restore", "-c")
			run(t, "iptables-"+variant+" -t nat -N KUBE-HP-ABC")
			run(t, "iptables-"+variant+" -t nat -A KUBE-HP-ABC -s 10.244.1.5 -j KUBE-MARK-MASQ")
			if told := removeAll(t); len(told) != 3 || !strings.HasSuffix(told[0], "7 chains, and 3 rules that led there; left, as others' rules lead there: KUBE-MARK-MASQ") {
				t.Errorf("told %q", told)
			}
			if left := saved(t, variant); !strings.Contains(left, "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000") || strings.Contains(left, "KUBE-SERVICES -") {
				t.Errorf("left:\n%s", left)
			}
			expect(t, around, Nothing, "")
		})
	}
}

// The tables of the nftables mode go, and nobody else's.
func TestKubeProxyTablesAreRemoved(t *testing.T) {
	priv.Isolate(t)
	write(t, kubeProxyNft, "nft", "-f", "-")
	write(t, of(kubeProxyNft, "table ip kube-proxy", "table ip other"), "nft", "-f", "-")
	run(t, "nft add table ip6 kube-proxy")
	if told := removeAll(t); !slices.Equal(told, []string{"nftables table ip kube-proxy", "nftables table ip6 kube-proxy"}) {
		t.Errorf("told %q", told)
	}
	out, err := exec.Command("nft", "list", "tables").Output()
	if err != nil || string(out) != "table ip other\n" {
		t.Errorf("left %s, error %v", out, err)
	}
	if told := removeAll(t); told != nil {
		t.Errorf("a second time: %q", told)
	}
}

// More chains than a socket's buffer has room for answers go in one step.
func TestKubeProxyOfManyServices(t *testing.T) {
	for _, variant := range []string{"nft", "legacy"} {
		t.Run(variant, func(t *testing.T) {
			priv.Isolate(t)
			const services = 3000
			var chains, rules strings.Builder
			for i := range services {
				name := portmapChains("KUBE", string(rune('a'+i%26))+strings.Repeat("x", i/26))[0]
				name = "KUBE-SVC-" + strings.ToUpper(name[len(name)-16:])
				chains.WriteString(":" + name + " - [0:0]\n")
				rules.WriteString("-A KUBE-SERVICES -p tcp -j " + name + "\n-A " + name + " -j KUBE-MARK-MASQ\n")
			}
			write(t, "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n"+chains.String()+rules.String()+"-A OUTPUT -j KUBE-SERVICES\nCOMMIT\n", "iptables-"+variant+"-restore")
			if told := removeAll(t); len(told) != 1 || !strings.Contains(told[0], ": 3002 chains, and 1 rules") {
				t.Errorf("told %q", told)
			}
			if left := saved(t, variant); strings.Contains(left, "KUBE-") {
				t.Errorf("left %d bytes", len(left))
			}
		})
	}
}

// The sets of the IPVS mode go once no rule needs them, and nobody else's.
func TestKubeProxySetsAreRemoved(t *testing.T) {
	priv.Isolate(t)
	for _, set := range []string{"KUBE-CLUSTER-IP hash:ip,port", "KUBE-6-LOAD-BALANCER-SOURCE-CID hash:net family inet6", "KUBE-SRC-ABCDEF hash:ip", "mine hash:ip"} {
		run(t, "ipset create "+set)
	}
	write(t, "*nat\n:KUBE-SERVICES - [0:0]\n-A OUTPUT -j KUBE-SERVICES\n-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT\nCOMMIT\n", "iptables-nft-restore")
	remove := func() (told []string) {
		t.Helper()
		if err := RemoveKubeProxySets(func(what string) { told = append(told, what) }); err != nil {
			t.Error(err)
		}
		slices.Sort(told)
		return told
	}
	removeAll(t)
	if told := remove(); !slices.Equal(told, []string{"ipset KUBE-6-LOAD-BALANCER-SOURCE-CIDR", "ipset KUBE-CLUSTER-IP"}) {
		t.Errorf("told %q", told)
	}
	out, err := exec.Command("ipset", "list", "-n").Output()
	if left := strings.Fields(string(out)); err != nil || len(left) != 2 {
		t.Errorf("left %q, error %v", left, err)
	}
	if told := remove(); told != nil {
		t.Errorf("a second time: %q", told)
	}
}

package modes

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
)

// rules collects lines.
type rules struct{ strings.Builder }

func (r *rules) add(format string, args ...any) {
	fmt.Fprintf(r, format, args...)
	r.WriteByte('\n')
}

// hash names a chain as kube-proxy does: so many letters and digits that depend on what the chain is for.
func hash(of string, length int) string {
	sum := sha256.Sum256([]byte(of))
	return base32.StdEncoding.EncodeToString(sum[:])[:length]
}

// kubeMark is the bit by which kube-proxy asks its own POSTROUTING chain to masquerade.
const kubeMark = "0x4000"

// iptablesRules is everything in the tables of a node, for iptables-restore: kube-proxy's chains in its iptables mode,
// kubelet's KUBE-FIREWALL, and the network's own masquerading and, for flannel, forwarding rules. The order is that of a
// node where kube-proxy came first, as on most; base policies are ACCEPT. Left out, in the classical network's favour:
// the mangle table's empty canary chains and Docker's rules.
func iptablesRules(masquerade []string, flannel bool, serviceCount int) string {
	r := &rules{}
	r.add("*filter")
	r.add(":INPUT ACCEPT [0:0]\n:FORWARD ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]")
	filterRules(r)
	if flannel {
		// flanneld, --iptables-forward-rules (default): pods' packets pass where the policy is DROP.
		r.add(":FLANNEL-FWD - [0:0]")
		r.add(`-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD`)
		r.add(`-A FLANNEL-FWD -s %s -m comment --comment "flanneld forward" -j ACCEPT`, clusterCIDR)
		r.add(`-A FLANNEL-FWD -d %s -m comment --comment "flanneld forward" -j ACCEPT`, clusterCIDR)
	}
	r.add("COMMIT\n*nat")
	r.add(":PREROUTING ACCEPT [0:0]\n:INPUT ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:POSTROUTING ACCEPT [0:0]")
	natRules(r, services(serviceCount))
	for _, line := range masquerade {
		r.add("%s", line)
	}
	r.add("COMMIT")
	return r.String()
}

// filterRules are the filter table of kube-proxy and kubelet. In kube-proxy's KUBE-FORWARD is the rule that most replies
// meet first: what conntrack calls INVALID is dropped.
func filterRules(r *rules) {
	for _, chain := range []string{
		"EXTERNAL-SERVICES", "FIREWALL", "FORWARD", "KUBELET-CANARY", "NODEPORTS", "PROXY-CANARY", "PROXY-FIREWALL", "SERVICES",
	} {
		r.add(":KUBE-%s - [0:0]", chain)
	}
	jump := func(from, comment, to string, state string) {
		if state != "" {
			state = "-m conntrack --ctstate " + state + " "
		}
		r.add(`-A %s %s-m comment --comment "%s" -j %s`, from, state, comment, to)
	}
	jump("INPUT", "load balancer firewall", "KUBE-PROXY-FIREWALL", "NEW")
	jump("INPUT", "health check ports", "KUBE-NODEPORTS", "")
	jump("INPUT", "external portals", "KUBE-EXTERNAL-SERVICES", "NEW")
	r.add("-A INPUT -j KUBE-FIREWALL")
	jump("FORWARD", "load balancer firewall", "KUBE-PROXY-FIREWALL", "NEW")
	jump("FORWARD", "forwarding rules", "KUBE-FORWARD", "")
	jump("FORWARD", "service portals", "KUBE-SERVICES", "NEW")
	jump("FORWARD", "external portals", "KUBE-EXTERNAL-SERVICES", "NEW")
	jump("OUTPUT", "load balancer firewall", "KUBE-PROXY-FIREWALL", "NEW")
	jump("OUTPUT", "service portals", "KUBE-SERVICES", "NEW")
	r.add("-A OUTPUT -j KUBE-FIREWALL")
	r.add(`-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "foreign localnet" ` +
		`-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP`)
	r.add("-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP")
	r.add(`-A KUBE-FORWARD -m comment --comment "forwarding rules" -m mark --mark %s/%s -j ACCEPT`, kubeMark, kubeMark)
	r.add(`-A KUBE-FORWARD -m comment --comment "forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT`)
}

// natRules are kube-proxy's: a rule per Service in one list that the first packet of every connection walks, and two
// chains for each.
func natRules(r *rules, all []service) {
	for _, chain := range []string{"KUBELET-CANARY", "MARK-MASQ", "NODEPORTS", "POSTROUTING", "PROXY-CANARY", "SERVICES"} {
		r.add(":KUBE-%s - [0:0]", chain)
	}
	for _, s := range all {
		r.add(":%s - [0:0]\n:%s - [0:0]", svcChain(s), sepChain(s))
	}
	r.add(`-A PREROUTING -m comment --comment "service portals" -j KUBE-SERVICES`)
	r.add(`-A OUTPUT -m comment --comment "service portals" -j KUBE-SERVICES`)
	r.add(`-A POSTROUTING -m comment --comment "postrouting rules" -j KUBE-POSTROUTING`)
	r.add("-A KUBE-MARK-MASQ -j MARK --or-mark %s", kubeMark)
	r.add("-A KUBE-POSTROUTING -m mark ! --mark %s/%s -j RETURN", kubeMark, kubeMark)
	r.add("-A KUBE-POSTROUTING -j MARK --xor-mark %s", kubeMark)
	r.add(`-A KUBE-POSTROUTING -m comment --comment "service traffic that needs SNAT" -j MASQUERADE --random-fully`)
	for _, s := range all {
		r.add(`-A KUBE-SERVICES -d %s/32 -p tcp -m comment --comment "%s cluster IP" -m tcp --dport %d -j %s`, s.cluster, s.name, servicePort, svcChain(s))
		r.add(`-A %s ! -s %s -d %s/32 -p tcp -m comment --comment "%s cluster IP" -m tcp --dport %d -j KUBE-MARK-MASQ`,
			svcChain(s), clusterCIDR, s.cluster, s.name, servicePort)
		r.add(`-A %s -m comment --comment "%s" -j %s`, svcChain(s), s.name, sepChain(s))
		r.add(`-A %s -s %s/32 -m comment --comment "%s" -j KUBE-MARK-MASQ`, sepChain(s), s.endpoint, s.name)
		r.add(`-A %s -p tcp -m comment --comment "%s" -m tcp -j DNAT --to-destination %s:%d`, sepChain(s), s.name, s.endpoint, endpointPort)
	}
	r.add(`-A KUBE-SERVICES -m comment --comment "node ports, last of all" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS`)
}

func svcChain(s service) string { return "KUBE-SVC-" + hash(s.name, 16) }
func sepChain(s service) string { return "KUBE-SEP-" + hash(s.name+s.endpoint.String(), 16) }

// flannelMasquerade is flanneld's --ip-masq: nothing between pods, everything else of a pod's but multicast.
func flannelMasquerade(podCIDR netip.Prefix) []string {
	const comment = `-m comment --comment "flanneld masq"`
	rule := func(match, target string) string {
		return "-A FLANNEL-POSTRTG " + match + " " + comment + " -j " + target
	}
	return []string{
		":FLANNEL-POSTRTG - [0:0]",
		"-A POSTROUTING " + comment + " -j FLANNEL-POSTRTG",
		rule("-m mark --mark "+kubeMark+"/"+kubeMark, "RETURN"), // kube-proxy has seen to it
		rule(fmt.Sprintf("-s %s -d %s", podCIDR, clusterCIDR), "RETURN"),
		rule(fmt.Sprintf("-s %s -d %s", clusterCIDR, podCIDR), "RETURN"),
		rule(fmt.Sprintf("! -s %s -d %s", clusterCIDR, podCIDR), "RETURN"),
		rule(fmt.Sprintf("-s %s ! -d 224.0.0.0/4", clusterCIDR), "MASQUERADE --random-fully"),
		rule(fmt.Sprintf("! -s %s -d %s", clusterCIDR, clusterCIDR), "MASQUERADE --random-fully"),
	}
}

// kindMasquerade is kindnetd's masquerading in iptables: all but what stays in the cluster. It does not ask for random
// ports.
func kindMasquerade() []string {
	return []string{
		":KIND-MASQ-AGENT - [0:0]",
		`-A POSTROUTING -m addrtype ! --dst-type LOCAL -m comment --comment "not for this node" -j KIND-MASQ-AGENT`,
		fmt.Sprintf(`-A KIND-MASQ-AGENT -d %s -m comment --comment "stays in the cluster" -j RETURN`, clusterCIDR),
		`-A KIND-MASQ-AGENT -m comment --comment "leaves it" -j MASQUERADE`,
	}
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

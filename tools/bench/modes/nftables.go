package modes

import (
	"fmt"
	"net/netip"
)

// nftNew is what a new connection's first packet meets in the forward hook. kube-proxy's rule does not count, ours does.
const nftNew = "jump service-endpoints-check"

// nftRules is everything in the tables of a node, for nft -f: kube-proxy's table in its nftables mode, where all Services
// are one map that is looked up, and flannel's tables with EnableNFTables. The tables are made anew.
func nftRules(node netip.Addr, podCIDR netip.Prefix, serviceCount int) string {
	r := &rules{}
	for _, table := range []string{"kube-proxy", "flannel-ipv4"} {
		r.add("add table ip %s\ndelete table ip %s\nadd table ip %s", table, table, table)
	}
	kubeProxyTable(r, node, services(serviceCount))
	flannelTable(r, podCIDR)
	return r.String()
}

// nftChain is a base chain with what it does: only packets of new connections are sent on from the filter chains, and NAT
// chains see no others.
type nftChain struct {
	name, hook string
	rules      []string
}

func kubeProxyTable(r *rules, node netip.Addr, all []service) {
	const table = "ip kube-proxy"
	const key = "ipv4_addr . inet_proto . inet_service : verdict"
	r.add("add set %s cluster-ips { type ipv4_addr ; }", table)
	r.add("add set %s nodeport-ips { type ipv4_addr ; elements = { %s } ; }", table, node)
	for _, name := range []string{"service-ips", "no-endpoint-services", "firewall-ips"} {
		r.add("add map %s %s { type %s ; }", table, name, key)
	}
	for _, name := range []string{"service-nodeports", "no-endpoint-nodeports"} {
		r.add("add map %s %s { type inet_proto . inet_service : verdict ; }", table, name)
	}
	const lookup = "ip daddr . meta l4proto . th dport vmap @"
	const nodePort = "ip daddr @nodeport-ips meta l4proto . th dport vmap @"
	chains := []nftChain{
		{"reject-chain", "", []string{"reject"}},
		{"mark-for-masquerade", "", []string{"mark set mark or " + kubeMark}},
		{"masquerading", "", []string{"mark and " + kubeMark + " == 0 return", "mark set mark xor " + kubeMark, "masquerade fully-random"}},
		{"services", "", []string{lookup + "service-ips", nodePort + "service-nodeports"}},
		{"service-endpoints-check", "", []string{lookup + "no-endpoint-services"}},
		{"nodeport-endpoints-check", "", []string{nodePort + "no-endpoint-nodeports"}},
		{"firewall-check", "", []string{lookup + "firewall-ips"}},
		{"cluster-ips-check", "", []string{"ip daddr @cluster-ips reject"}},
		{"filter-prerouting", "filter hook prerouting priority -110", []string{"ct state new jump firewall-check"}},
		{"filter-input", "filter hook input priority -110", []string{"ct state new jump nodeport-endpoints-check", "ct state new jump service-endpoints-check"}},
		{"filter-forward", "filter hook forward priority -110", []string{"ct state new counter " + nftNew, "ct state new jump cluster-ips-check"}},
		{"filter-output", "filter hook output priority -110", []string{"ct state new jump service-endpoints-check", "ct state new jump firewall-check"}},
		{"filter-output-post-dnat", "filter hook output priority -90", []string{"ct state new jump cluster-ips-check"}},
		{"nat-prerouting", "nat hook prerouting priority -100", []string{"jump services"}},
		{"nat-output", "nat hook output priority -100", []string{"jump services"}},
		{"nat-postrouting", "nat hook postrouting priority 100", []string{"jump masquerading"}},
	}
	addChains(r, table, chains)
	for _, s := range all {
		addService(r, table, s)
	}
}

// addChains makes all chains before any rule jumps to one.
func addChains(r *rules, table string, chains []nftChain) {
	for _, chain := range chains {
		hook := ""
		if chain.hook != "" {
			hook = fmt.Sprintf(" { type %s ; }", chain.hook)
		}
		r.add("add chain %s %s%s", table, chain.name, hook)
	}
	for _, chain := range chains {
		for _, rule := range chain.rules {
			r.add("add rule %s %s %s", table, chain.name, rule)
		}
	}
}

// addService adds one Service: two chains, and one element that leads to them. kube-proxy's own goto goes through a
// one-element map that draws lots among the endpoints. No packet of ours comes there, and the kernel takes minutes to
// make 20 000 such maps.
func addService(r *rules, table string, s service) {
	service := fmt.Sprintf("service-%s-%s/tcp/http", hash(s.name, 8), s.name)
	endpoint := fmt.Sprintf("endpoint-%s-%s/tcp/http__%s/%d", hash(s.name+s.endpoint.String(), 8), s.name, s.endpoint, endpointPort)
	r.add("add chain %s %s\nadd chain %s %s", table, service, table, endpoint)
	r.add("add rule %s %s ip daddr %s tcp dport %d ip saddr != %s jump mark-for-masquerade", table, service, s.cluster, servicePort, clusterCIDR)
	r.add("add rule %s %s goto %s", table, service, endpoint)
	r.add("add rule %s %s ip saddr %s jump mark-for-masquerade", table, endpoint, s.endpoint)
	r.add("add rule %s %s meta l4proto tcp dnat to %s:%d", table, endpoint, s.endpoint, endpointPort)
	r.add("add element %s cluster-ips { %s }", table, s.cluster)
	r.add("add element %s service-ips { %s . tcp . %d : goto %s }", table, s.cluster, servicePort, service)
}

// flannelTable is flanneld's: forwarding and masquerading of flannelMasquerade in nftables.
func flannelTable(r *rules, podCIDR netip.Prefix) {
	addChains(r, "ip flannel-ipv4", []nftChain{
		{"forward", "filter hook forward priority 0", []string{
			fmt.Sprintf("ip saddr %s accept", clusterCIDR),
			fmt.Sprintf("ip daddr %s accept", clusterCIDR),
		}},
		{"postrtg", "nat hook postrouting priority 100", []string{
			fmt.Sprintf("meta mark %s return", kubeMark),
			fmt.Sprintf("ip saddr %s ip daddr %s return", podCIDR, clusterCIDR),
			fmt.Sprintf("ip saddr %s ip daddr %s return", clusterCIDR, podCIDR),
			fmt.Sprintf("ip saddr != %s ip daddr %s return", podCIDR, clusterCIDR),
			fmt.Sprintf("ip saddr %s ip daddr != 224.0.0.0/4 masquerade fully-random", clusterCIDR),
			fmt.Sprintf("ip saddr != %s ip daddr %s masquerade fully-random", clusterCIDR, clusterCIDR),
		}},
	})
}

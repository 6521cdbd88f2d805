package cluster

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	core "k8s.io/api/core/v1"
)

// network is what a cluster has of one address family.
type network struct {
	pods     netip.Prefix // divided among the nodes
	nodeBits int          // of each node's part
	services netip.Prefix
	fabric   netip.Prefix // the link of all nodes
	world    netip.Addr
	// maskFlag tells the controller manager nodeBits.
	maskFlag string
	// forwarding is the sysctl that makes a machine a router.
	forwarding string
}

var networks = map[core.IPFamily]network{
	core.IPv4Protocol: {
		pods: netip.MustParsePrefix("10.244.0.0/16"), nodeBits: 24, services: netip.MustParsePrefix("10.96.0.0/16"),
		fabric: netip.MustParsePrefix("172.30.0.0/16"), world: netip.MustParseAddr("203.0.113.1"),
		maskFlag: "--node-cidr-mask-size-ipv4", forwarding: "net/ipv4/ip_forward",
	},
	core.IPv6Protocol: {
		pods: netip.MustParsePrefix("fd00:10:244::/48"), nodeBits: 64, services: netip.MustParsePrefix("fd00:10:96::/112"),
		fabric: netip.MustParsePrefix("fd00:172:30::/64"), world: netip.MustParseAddr("2001:db8:113::1"),
		maskFlag: "--node-cidr-mask-size-ipv6", forwarding: "net/ipv6/conf/all/forwarding",
	},
}

// FamilyChoices are the families that a cluster may have, by the names that people give them.
var FamilyChoices = map[string][]core.IPFamily{
	"ipv4": {core.IPv4Protocol}, "ipv6": {core.IPv6Protocol}, "dual": {core.IPv4Protocol, core.IPv6Protocol},
}

// FamilyOf is the family of an address.
func FamilyOf(addr netip.Addr) core.IPFamily {
	if addr.Is4() {
		return core.IPv4Protocol
	}
	return core.IPv6Protocol
}

// host is the address of a number in a prefix.
func host(prefix netip.Prefix, number byte) netip.Addr {
	raw := prefix.Addr().AsSlice()
	raw[len(raw)-1] = number
	addr, _ := netip.AddrFromSlice(raw)
	return addr
}

// The numbers of those who have an address in the fabric, and among Services.
const (
	worldNumber = 1
	firstNode   = 11
	apiNumber   = 1 // the API server's choice
	dnsNumber   = 10
)

// In is the cluster as one of its families sees it: Addr of its machines, and of pods that are asked for through it, are of that
// family. It is for looking at what is there: what comes or restarts later is in another one.
func (c *Cluster) In(family core.IPFamily) *Cluster {
	seen := *c
	seen.Options.Families = append([]core.IPFamily{family}, slices.DeleteFunc(slices.Clone(c.Options.Families),
		func(f core.IPFamily) bool { return f == family })...)
	view := func(m *Machine) *Machine {
		other := *m
		other.Addr = seen.choose(m.Addrs)
		return &other
	}
	seen.Fabric, seen.Nodes = view(c.Fabric), nil
	for _, node := range c.Nodes {
		seen.Nodes = append(seen.Nodes, view(node))
	}
	return &seen
}

// Family is the first of the cluster's families, of which Addr is.
func (c *Cluster) Family() core.IPFamily { return c.Options.Families[0] }

// network is that of the first family.
func (c *Cluster) network() network { return networks[c.Family()] }

// World is outside of the cluster; agnhost netexec answers there, HTTP on port 8080. Its own address on the nodes' link, from which
// it speaks, is Fabric's.
func (c *Cluster) World() netip.Addr { return c.network().world }

// DNS is the address of the Service of CoreDNS.
func (c *Cluster) DNS() netip.Addr { return host(c.network().services, dnsNumber) }

// choose is the address of the first family; invalid where there is none.
func (c *Cluster) choose(addrs []netip.Addr) netip.Addr {
	for _, addr := range addrs {
		if FamilyOf(addr) == c.Family() {
			return addr
		}
	}
	return netip.Addr{}
}

// addresses are those of a number on the fabric.
func (c *Cluster) addresses(number byte) (all []netip.Addr) {
	for _, family := range c.Options.Families {
		all = append(all, host(networks[family].fabric, number))
	}
	return all
}

// each lists something of every family, as Kubernetes' flags want it.
func each(families []core.IPFamily, of func(network) netip.Prefix) string {
	var all []string
	for _, family := range families {
		all = append(all, of(networks[family]).String())
	}
	return strings.Join(all, ",")
}

func (c *Cluster) podCIDRs() string {
	return each(c.Options.Families, func(n network) netip.Prefix { return n.pods })
}

func (c *Cluster) serviceCIDRs() string {
	return each(c.Options.Families, func(n network) netip.Prefix { return n.services })
}

// nodeMasks say how long a node's podCIDRs are.
func (c *Cluster) nodeMasks() (flags []string) {
	for _, family := range c.Options.Families {
		flags = append(flags, fmt.Sprintf("%s=%d", networks[family].maskFlag, networks[family].nodeBits))
	}
	return flags
}

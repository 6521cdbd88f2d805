package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Where things are, in each family. The nodes' names, IPv4 addresses and IPv4 podCIDRs are those of
// test/testdata/nodes.yaml, continued for more than three nodes.
var (
	// FabricPrefix is the network of the fabric, unless Options.FabricBits makes it wider.
	FabricPrefix = prefixes("172.18.0.0/24", "fd00:172:18::/64")
	// GatewayAddr is the nodes' default gateway: the outside host itself, or the router before it.
	GatewayAddr = addresses("172.18.0.1", "fd00:172:18::1")
	// SecondPrefix is the network of the second fabric (Options.Links), SecondGateway the router's address there.
	SecondPrefix  = prefixes("172.19.0.0/24", "fd00:172:19::/64")
	SecondGateway = addresses("172.19.0.1", "fd00:172:19::1")
	// OutsideAddr is the address of the outside host.
	OutsideAddr = addresses("203.0.113.10", "2001:db8:203:113::10")
	// RouterOutside is the router's address on the outside host's link.
	RouterOutside = addresses("203.0.113.1", "2001:db8:203:113::1")

	outsidePrefix = prefixes("203.0.113.0/24", "2001:db8:203:113::/64")
	everywhere    = prefixes("0.0.0.0/0", "::/0")

	// What a node's number makes of its podCIDRs.
	podCIDR = [wire.Families]string{"10.244.%d.0/24", "fd00:10:244:%d::/64"}
)

// fabrics are the switches that hosts are on.
var fabrics = [2]struct {
	bridge  string
	prefix  [wire.Families]netip.Prefix
	gateway [wire.Families]netip.Addr
	router  string                // its link there
	node    [wire.Families]string // what a node's number makes of its addresses
}{
	{"br0", FabricPrefix, GatewayAddr, Uplink, [wire.Families]string{"172.18.0.%d", "fd00:172:18::%d"}},
	{"br1", SecondPrefix, SecondGateway, "eth2", [wire.Families]string{"172.19.0.%d", "fd00:172:19::%d"}},
}

// FamiliesByName are the families that a cluster may have, as people choose between them: FAMILY=dual.
var FamiliesByName = map[string][]wire.Family{"ipv4": {wire.IPv4}, "ipv6": {wire.IPv6}, "dual": {wire.IPv4, wire.IPv6}}

func addresses(texts ...string) (all [wire.Families]netip.Addr) {
	for family, text := range texts {
		all[family] = netip.MustParseAddr(text)
	}
	return all
}

func prefixes(texts ...string) (all [wire.Families]netip.Prefix) {
	for family, text := range texts {
		all[family] = netip.MustParsePrefix(text)
	}
	return all
}

// selected are the addresses of some families, in their order.
func selected(all [wire.Families]netip.Addr, families []wire.Family) []netip.Addr {
	some := make([]netip.Addr, len(families))
	for i, family := range families {
		some[i] = all[family]
	}
	return some
}

// checkFamilies says what is wrong with families of which there should be one or two.
func checkFamilies(what string, families []wire.Family) error {
	for i, family := range families {
		if family >= wire.Families || slices.Contains(families[:i], family) {
			return fmt.Errorf("lab with %s %v: want each of %v and %v at most once", what, families, wire.IPv4, wire.IPv6)
		}
	}
	return nil
}

// Addr is the address at which others reach this host or pod: its first.
func (ns *Namespace) Addr() netip.Addr {
	if len(ns.addrs) == 0 {
		return netip.Addr{}
	}
	return ns.addrs[0]
}

// AddrOf is the address of a family at which others reach this host or pod; invalid where it has none.
func (ns *Namespace) AddrOf(family wire.Family) netip.Addr {
	return wire.AddressesFrom(ns.addrs...)[family].Netip()
}

// Addrs are the addresses at which others reach this host or pod, in the order of the Node's InternalIPs, or of the
// plugin's answer.
func (ns *Namespace) Addrs() []netip.Addr { return slices.Clone(ns.addrs) }

// PodCIDR is where the node's pods get their addresses from: the first of its podCIDRs.
func (n *Node) PodCIDR() netip.Prefix { return n.PodCIDRs[0] }

// PodCIDROf is where the node's pods get their addresses of a family from; invalid where they get none.
func (n *Node) PodCIDROf(family wire.Family) netip.Prefix {
	for _, cidr := range n.PodCIDRs {
		if wire.FamilyOf(cidr.Addr()) == family {
			return cidr
		}
	}
	return netip.Prefix{}
}

// RouteToPods gives the outside host, and the router before it if there is one, routes to a node's pods of a family.
func (l *Lab) RouteToPods(node *Node, family wire.Family) error {
	pods, via := node.PodCIDROf(family), node.AddrOf(family)
	if l.Router == nil {
		return l.Outside.AddRoute(pods, via, "")
	}
	return errors.Join(l.Router.AddRoute(pods, via, ""), l.Outside.AddRoute(pods, RouterOutside[family], ""))
}

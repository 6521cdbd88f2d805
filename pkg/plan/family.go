package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// FamilySet has the families that something is about.
type FamilySet [wire.Families]bool

// Used are the families that a node looks at and plans for: that of IPv4 always, the other one if a podCIDR is of it, or if
// this node has InternalIPs of it alone; none that the kernel lacks. What other Nodes list besides is none of it: their kubelets
// write that.
func Used(self string, nodes []Node, before Standing, lacks FamilySet) FamilySet {
	used := ofPods(nodes, before)
	own := FamilySet{}
	for _, a := range before.NodeIPs {
		own[wire.FamilyOf(a)] = true
	}
	if i := slices.IndexFunc(nodes, func(n Node) bool { return n.Name == self }); i >= 0 && len(nodes[i].InternalIPs) > 0 {
		own = FamilySet{}
		for _, text := range nodes[i].InternalIPs {
			own[familyOfText(text)] = true
		}
	}
	used[wire.IPv6] = used[wire.IPv6] || own == FamilySet{wire.IPv6: true}
	used[wire.IPv4] = true
	for f := range used {
		used[f] = used[f] && !lacks[f]
	}
	return used
}

// ofPods are the families in which the cluster's pods have addresses.
func ofPods(nodes []Node, before Standing) (of FamilySet) {
	for _, n := range nodes {
		for _, p := range n.PodCIDRs {
			of[familyOfText(p)] = true
		}
	}
	for _, p := range before.Own {
		of[wire.FamilyOf(p.Addr())] = true
	}
	for p := range before.Claims {
		of[wire.FamilyOf(p.Addr())] = true
	}
	return of
}

// familyOfText is the family of an address or a prefix that has not been judged yet.
func familyOfText(s string) wire.Family {
	if strings.Contains(s, ":") {
		return wire.IPv6
	}
	return wire.IPv4
}

// everything is, by family, the prefix of a default route.
var everything = [wire.Families]netip.Prefix{
	wire.IPv4: netip.PrefixFrom(netip.IPv4Unspecified(), 0),
	wire.IPv6: netip.PrefixFrom(netip.IPv6Unspecified(), 0),
}

// mapped is where the maps have the addresses of IPv4, which no prefix of IPv6 is about.
var mapped = netip.MustParseAddr("::ffff:0:0")

// ofLink are the addresses of IPv6 that mean something on a link only, and so are the host's on each.
var ofLink = []netip.Prefix{netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("ff00::/8")}

// leastMTUOf is what a link must carry, by family, in bytes of IP packet (RFC 8200, section 5); 0: anything.
var leastMTUOf = [wire.Families]int{wire.IPv6: 1280}

// missing says of each family in which the cluster's pods have addresses why this node's get none.
func (b *builder) missing(why [wire.Families]string) {
	pods, s := ofPods(b.in.Nodes, b.in.Before), b.r.Standing
	for f := range wire.Families {
		own := s.PodCIDR(f)
		switch {
		case !pods[f]:
			continue
		case b.in.Facts.Lacks[f]:
			b.r.Missing[f] = fmt.Sprintf("this node's kernel has no %s (ipv6.disable=1 on its command line?)", f.Name())
		case !own.IsValid():
			b.r.Missing[f] = why[f]
		case min(b.podMTU(), b.r.MTU) < leastMTUOf[f]: // also why an address of that family is on no interface
			b.r.Missing[f] = b.tooNarrow(leastMTUOf[f])
		case s.NodeIP(f).IsValid() || len(s.NodeIPs) == 0:
			continue
		case b.away[f].IsValid() && b.in.Mode != RouteVXLAN:
			b.r.Missing[f] = fmt.Sprintf("InternalIP %s is on no interface of this node, and other nodes on the link that it belongs to send its pods' packets there", b.away[f])
		case !b.mayTunnel():
			b.r.Missing[f] = fmt.Sprintf("Node %s has no %s InternalIP on an interface of this node, so other nodes can't reach its pods by direct routing", b.in.Self, f.Name())
		}
	}
	var all []string
	for _, p := range s.Own {
		if text := b.r.Missing[wire.FamilyOf(p.Addr())]; text != "" {
			all = append(all, text)
			continue
		}
		b.r.PodCIDRs = append(b.r.PodCIDRs, p)
	}
	if len(b.r.PodCIDRs) == 0 && b.r.NotReady == "" {
		b.r.NotReady = strings.Join(all, "; ")
	}
}

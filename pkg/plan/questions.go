package plan

import (
	"net/netip"

	"github.com/gaissmai/bart"
)

// AskedAbout returns the prefixes whose routes Make looks for: addresses and podCIDRs of Nodes, valid ones and refused ones, those that
// stood before, and the native prefixes. Of other routes Make needs the default ones, the links that routes lead over, gateways in
// podCIDRs, and the sources that routes choose.
func AskedAbout(nodes []Node, before Standing, native []netip.Prefix) *bart.Lite {
	asked := &bart.Lite{}
	address := func(a netip.Addr) {
		if a.IsValid() {
			asked.Insert(host(a))
		}
	}
	for i := range nodes {
		for _, list := range [][]string{nodes[i].InternalIPs, nodes[i].ExternalIPs} {
			for _, s := range list {
				if a, err := parseNodeIP("address", s); err == nil {
					address(a)
				}
			}
		}
		for _, s := range nodes[i].PodCIDRs {
			if p, err := parsePodCIDR(s); err == nil {
				asked.Insert(p)
			}
		}
	}
	for _, a := range before.NodeIPs {
		address(a)
	}
	for p, via := range before.Claims {
		asked.Insert(p)
		address(via)
	}
	for a, alias := range before.Aliases {
		address(a)
		address(alias)
	}
	for _, all := range [][]netip.Prefix{before.Own, native} {
		for _, p := range all {
			asked.Insert(p.Masked())
		}
	}
	return asked
}

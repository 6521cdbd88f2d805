package plan

import (
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/bridges"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
)

// Bridge is a bridge of somebody else's whose containers are treated as pods.
type Bridge struct {
	Index uint32
	Name  string
	// Addresses are the host's own on it, with the lengths of their subnets.
	Addresses []netip.Prefix
}

func (b Bridge) equal(o Bridge) bool {
	return b.Index == o.Index && b.Name == o.Name && slices.Equal(b.Addresses, o.Addresses)
}

// Within are the bridge's subnets that lie in one of the prefixes.
func (b Bridge) Within(all []netip.Prefix) (subnets []netip.Prefix) {
	for _, a := range b.Addresses {
		if slices.ContainsFunc(all, func(p netip.Prefix) bool { return isWithin(a, p) }) {
			subnets = append(subnets, a.Masked())
		}
	}
	return subnets
}

// isWithin reports whether the subnet of an address lies in a prefix.
func isWithin(a, p netip.Prefix) bool { return p.Contains(a.Addr()) && p.Bits() <= a.Bits() }

// bridged reports whether a bridge has the address, in a subnet within the prefix.
func (j *judge) bridged(p netip.Prefix, address netip.Addr) bool {
	return slices.ContainsFunc(j.in.Facts.Bridges, func(b Bridge) bool {
		return slices.ContainsFunc(b.Addresses, func(a netip.Prefix) bool {
			return a.Addr() == address && isWithin(a, p)
		})
	})
}

// leadsToBridge reports whether the kernel has the route to this podCIDR because it is the subnet of a bridge.
func (b *builder) leadsToBridge(own netip.Prefix) bool {
	_, is := b.r.Bridges[bridges.KeyFrom(own)]
	return is
}

// bridges adds the parts of this node's podCIDRs that are behind bridges.
func (b *builder) bridges() {
	for _, l := range b.in.Facts.Bridges {
		for _, p := range l.Within(b.r.Standing.Own) {
			b.r.Bridges[bridges.KeyFrom(p)] = bridges.Value{Ifindex: l.Index}
		}
	}
}

// onBridges adds the addresses behind bridges that are the host's own, or everybody's.
func (b *builder) onBridges() {
	if len(b.r.Bridges) == 0 {
		return
	}
	for k, v := range b.r.Destinations {
		if p := k.Netip(); v.Kind == destinations.Host && p.IsSingleIP() && Contains(b.r.Standing.Own, p.Addr()) {
			b.r.Bridges[bridges.Key(k)] = bridges.Value{}
		}
	}
}

package plan

import (
	"maps"
	"net/netip"
	"slices"
)

// Equal reports whether two say the same of a node, in the same order.
func (f Facts) Equal(o Facts) bool {
	return slices.Equal(f.Local, o.Local) && maps.Equal(f.Holders, o.Holders) && maps.EqualFunc(f.NotEthernet, o.NotEthernet, Link.equal) && slices.EqualFunc(f.Uplinks, o.Uplinks, Link.equal) &&
		slices.EqualFunc(f.Routes, o.Routes, KernelRoute.equal) && slices.EqualFunc(f.Others, o.Others, KernelRoute.equal) &&
		maps.EqualFunc(f.Sources, o.Sources, slices.Equal[[]netip.Prefix]) && maps.Equal(f.InPart, o.InPart) &&
		slices.Equal(f.Addresses, o.Addresses) && slices.Equal(f.Recent, o.Recent) && slices.Equal(f.Broadcast, o.Broadcast) && slices.Equal(f.Policies, o.Policies) &&
		f.RoutesToStack == o.RoutesToStack && f.Tunnel == o.Tunnel && f.Lacks == o.Lacks && slices.Equal(f.Endpoints, o.Endpoints) &&
		slices.EqualFunc(f.Bridges, o.Bridges, Bridge.equal)
}

func (l Link) equal(o Link) bool {
	return l.Index == o.Index && l.Name == o.Name && l.MTU == o.MTU && l.Bit == o.Bit && l.Away == o.Away && l.VRF == o.VRF && l.Bare == o.Bare
}

func (r KernelRoute) equal(o KernelRoute) bool {
	return r.Dst == o.Dst && r.Index == o.Index && r.OnLink == o.OnLink && r.Unreachable == o.Unreachable && r.Via == o.Via && r.MTU == o.MTU && r.Table == o.Table && r.Src == o.Src && slices.Equal(r.Hops, o.Hops) && slices.Equal(r.HopVias, o.HopVias)
}

// Equal reports whether the same is in force.
func (s Standing) Equal(o Standing) bool {
	return slices.Equal(s.Own, o.Own) && slices.Equal(s.NodeIPs, o.NodeIPs) && maps.Equal(s.Claims, o.Claims) &&
		maps.Equal(s.Aliases, o.Aliases) && maps.Equal(s.MACs, o.MACs) && s.Ways.equal(o.Ways)
}

func (w Ways) equal(o Ways) bool {
	for f := range w.World {
		if !slices.Equal(w.World[f], o.World[f]) {
			return false
		}
	}
	return slices.Equal(w.All, o.All) && w.Tunnel == o.Tunnel
}

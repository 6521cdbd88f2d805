package device

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Protocol is the route protocol number of all our routes.
const Protocol = 142

// Route is a route of the main table.
type Route struct {
	Dst      netip.Prefix
	Index    int        // egress link; 0 for Unreachable and for several next hops
	Gateway  netip.Addr // invalid: on the link
	Source   netip.Addr // preferred source; invalid: the kernel's choice
	Protocol int        // ReplaceRoute always writes ours unless Foreign is set
	Foreign  bool       // written with protocol boot, for routes inside a pod
	Priority int
	MTU      int
	AdvMSS   int
	// Unreachable is the type of a route that answers packets with an ICMP error.
	Unreachable bool
	// Hops are the egress links of a route with several next hops; only read.
	Hops []int
	// HopGateways are the gateways of the next hops in Hops; invalid: on the link.
	HopGateways []netip.Addr
	// Table is the table, if not the main one; 0: main.
	Table int
	// TOS is what a packet must have to match; only read.
	TOS int
	// Encap is what the route does with packets before they leave (`ip route ... encap`); of several next hops, what one of them does.
	Encap Encap
	// Scope, if not the usual one (link without a gateway, else global); only written.
	Scope *int
}

// HasUsualPriority reports whether a route has the priority that the kernel gives to one that is written without any.
func (r Route) HasUsualPriority() bool {
	const ofIPv6 = 1024 // IP6_RT_PRIO_USER
	return r.Priority == 0 || r.Priority == ofIPv6 && r.Dst.Addr().Is6()
}

// Links are the indexes of the egress links of a route: several of one with several next hops, none of one without a link.
func (r Route) Links() []int {
	if r.Index == 0 {
		return r.Hops
	}
	return append([]int{r.Index}, r.Hops...)
}

// ReplaceRoute writes the route, replacing one with the same destination and priority.
func (h *Handle) ReplaceRoute(r Route) error {
	n := r.netlink()
	if err := again(func() error { return h.nl.RouteReplace(&n) }); err != nil {
		return fmt.Errorf("write route to %s (link %d): %w", r.Dst, r.Index, err)
	}
	return nil
}

// AddRoute writes the route unless there is one with the same destination and priority, whoever's it is: the error then
// matches unix.EEXIST.
func (h *Handle) AddRoute(r Route) error {
	n := r.netlink()
	if err := again(func() error { return h.nl.RouteAdd(&n) }); err != nil {
		return fmt.Errorf("add route to %s (link %d): %w", r.Dst, r.Index, err)
	}
	return nil
}

// RouteTo finds the route of the main table with exactly this destination, of several the one with the lowest priority
// value; false: there is none.
func (h *Handle) RouteTo(dst netip.Prefix) (best Route, found bool, err error) {
	err = again(func() error {
		best, found = Route{}, false
		return h.EachRoute(family(dst.Addr()), 0, 0, func(r Route) {
			if r.Dst == dst && (!found || r.Priority < best.Priority) {
				best, found = r, true
			}
		})
	})
	return best, found, err
}

// DeleteRoute deletes the route of our protocol with this destination, and link and priority if they are set. It succeeds
// if the route is gone.
func (h *Handle) DeleteRoute(r Route) error {
	r.Foreign = false
	return h.deleteRoute(r)
}

// DeleteForeignRoute is DeleteRoute for one that was written with Foreign set.
func (h *Handle) DeleteForeignRoute(r Route) error {
	r.Foreign = true
	return h.deleteRoute(r)
}

func (h *Handle) deleteRoute(r Route) error {
	n := r.netlink()
	// Only what identifies the route, since the kernel compares every field of the request.
	n.Src, n.Gw, n.MTU, n.AdvMSS, n.Scope = nil, nil, 0, 0, unix.RT_SCOPE_NOWHERE
	if r.Dst.Addr().Is6() {
		n.Scope = unix.RT_SCOPE_UNIVERSE
	}
	err := again(func() error { return h.nl.RouteDel(&n) })
	if err != nil && !isErrno(err, unix.ESRCH, unix.ENODEV, unix.ENOENT) {
		return fmt.Errorf("delete route to %s (link %d): %w", r.Dst, r.Index, err)
	}
	return nil
}

func (r Route) netlink() netlink.Route {
	n := netlink.Route{
		Dst: ipNet(r.Dst), LinkIndex: r.Index, Protocol: Protocol, Priority: r.Priority, Family: family(r.Dst.Addr()),
		MTU: r.MTU, AdvMSS: r.AdvMSS, Type: unix.RTN_UNICAST, Table: unix.RT_TABLE_MAIN,
	}
	if r.Foreign {
		n.Protocol = unix.RTPROT_BOOT
	}
	if r.Unreachable {
		n.Type = unix.RTN_UNREACHABLE
	}
	if r.Table != 0 {
		n.Table = r.Table
	}
	if r.Gateway.IsValid() {
		n.Gw = r.Gateway.AsSlice()
	} else if !r.Unreachable {
		n.Scope = netlink.SCOPE_LINK
	}
	if r.Scope != nil {
		n.Scope = netlink.Scope(*r.Scope)
	}
	if r.Source.IsValid() {
		n.Src = r.Source.AsSlice()
	}
	return n
}

package device

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// LocalPrefixes lists the IPv4 addresses that the kernel treats as this host's own: the prefixes of type local in the
// local table. That includes the addresses of every interface, of any scope, and those that only a route makes local.
func (h *Handle) LocalPrefixes() ([]netip.Prefix, error) {
	return h.localTable(unix.RTN_LOCAL)
}

// BroadcastAddresses lists the IPv4 broadcast addresses of this host's links, from the same table.
func (h *Handle) BroadcastAddresses() ([]netip.Prefix, error) {
	return h.localTable(unix.RTN_BROADCAST)
}

func (h *Handle) localTable(kind int) ([]netip.Prefix, error) {
	filter := &netlink.Route{Table: unix.RT_TABLE_LOCAL, Type: kind}
	list, err := dump(func() ([]netlink.Route, error) {
		return h.nl.RouteListFiltered(netlink.FAMILY_V4, filter, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
	})
	if err != nil {
		return nil, fmt.Errorf("list local addresses: %w", err)
	}
	var out []netip.Prefix
	for _, r := range list {
		if p := prefix(r.Dst); p.IsValid() {
			out = append(out, p)
		}
	}
	return out, nil
}

// Watch calls changed after every change of links, addresses, routes, rules, filters and the settings of links in the
// namespace of the calling goroutine's thread, until ctx ends. It does not tell what has changed: callers list again,
// which is right even if the socket's buffer has overflowed.
func Watch(ctx context.Context, changed func()) error {
	return watch(ctx, changed, "network", unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_IFADDR,
		unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_TC)
}

func watch(ctx context.Context, changed func(), what string, family int, groups ...uint) error {
	socket, err := nl.Subscribe(family, groups...)
	if err != nil {
		return fmt.Errorf("subscribe to changes (%s): %w", what, err)
	}
	defer socket.Close()
	stop := context.AfterFunc(ctx, socket.Close) // ends a blocked Receive
	defer stop()
	for ctx.Err() == nil {
		_, _, err := socket.Receive()
		switch {
		case err == nil, errors.Is(err, unix.ENOBUFS):
			changed()
		case interrupted(err):
		case ctx.Err() != nil:
			return ctx.Err()
		default:
			return fmt.Errorf("receive changes (%s): %w", what, err)
		}
	}
	return ctx.Err()
}

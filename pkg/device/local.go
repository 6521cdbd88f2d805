package device

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// LocalTable lists the addresses that the kernel treats as this host's own, of these families: the prefixes of type local in
// the local table. That includes the addresses of every interface, of any scope, and those that only a route makes local. From
// the same table come the addresses of everybody on this host's links: broadcast ones, and anycast ones of IPv6 (RFC 4291,
// section 2.6.1).
func (h *Handle) LocalTable(families ...int) (local, shared []netip.Prefix, err error) {
	type entry struct {
		kind routeType
		dst  netip.Prefix
	}
	for _, family := range families {
		var all []entry
		err := again(func() error {
			all = nil
			return h.visitTable(family, unix.RT_TABLE_LOCAL, unix.RTPROT_UNSPEC, func(m []byte) {
				if r, kind, ok := decodeRoute(m); ok {
					all = append(all, entry{kind, r.Dst})
				}
			})
		})
		if err != nil && !isAbsent(err) {
			return nil, nil, fmt.Errorf("list local addresses: %w", err)
		}
		for _, e := range all {
			switch e.kind {
			case unix.RTN_LOCAL:
				local = append(local, e.dst)
			case unix.RTN_BROADCAST, unix.RTN_ANYCAST:
				shared = append(shared, e.dst)
			}
		}
	}
	return local, shared, nil
}

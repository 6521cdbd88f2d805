package device

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// LocalPrefixes lists the IPv4 addresses that the kernel treats as this host's own: the prefixes of type local in the
// local table. That includes the addresses of every interface, of any scope, and those that only a route makes local.
func (h *Handle) LocalPrefixes() ([]netip.Prefix, error) {
	local, _, err := h.LocalTable()
	return local, err
}

// LocalTable lists LocalPrefixes and, from the same table, the IPv4 broadcast addresses of this host's links.
func (h *Handle) LocalTable() (local, broadcast []netip.Prefix, err error) {
	type entry struct {
		kind routeType
		dst  netip.Prefix
	}
	all, err := listTable(h, unix.AF_INET, unix.RT_TABLE_LOCAL, unix.RTPROT_UNSPEC, func(m []byte) (entry, bool) {
		r, kind, ok := decodeRoute(m)
		return entry{kind, r.Dst}, ok
	})
	if err != nil {
		return nil, nil, fmt.Errorf("list local addresses: %w", err)
	}
	for _, e := range all {
		switch e.kind {
		case unix.RTN_LOCAL:
			local = append(local, e.dst)
		case unix.RTN_BROADCAST:
			broadcast = append(broadcast, e.dst)
		}
	}
	return local, broadcast, nil
}

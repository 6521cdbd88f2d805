package device

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Neighbour is an entry of the neighbour table.
type Neighbour struct {
	Index     int
	Addr      netip.Addr
	MAC       net.HardwareAddr
	Permanent bool
}

// ReplaceNeighbour writes a permanent entry.
func (h *Handle) ReplaceNeighbour(index int, a netip.Addr, mac net.HardwareAddr) error {
	n := netlink.Neigh{
		LinkIndex: index, Family: family(a), IP: a.AsSlice(), HardwareAddr: mac, State: netlink.NUD_PERMANENT,
	}
	if err := again(func() error { return h.nl.NeighSet(&n) }); err != nil {
		return fmt.Errorf("write neighbour %s (%s) of link %d: %w", a, mac, index, err)
	}
	return nil
}

// DeleteNeighbour deletes an entry. It succeeds if the entry is gone.
func (h *Handle) DeleteNeighbour(index int, a netip.Addr) error {
	n := netlink.Neigh{LinkIndex: index, Family: family(a), IP: a.AsSlice()}
	err := again(func() error { return h.nl.NeighDel(&n) })
	if err != nil && !isErrno(err, unix.ENOENT, unix.ENODEV) {
		return fmt.Errorf("delete neighbour %s of link %d: %w", a, index, err)
	}
	return nil
}

// Is reports whether the entry is the permanent one that ReplaceNeighbour writes.
func (n Neighbour) Is(a netip.Addr, mac net.HardwareAddr) bool {
	return n.Permanent && n.Addr == a && bytes.Equal(n.MAC, mac)
}

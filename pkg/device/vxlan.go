package device

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ErrPortTaken is returned (wrapped) when a tunnel can't have its UDP port. The error names the device that has it, if it is one.
var ErrPortTaken = errors.New("the UDP port is taken")

// kindVXLAN is the kernel's name for VXLAN devices.
const kindVXLAN = "vxlan"

// VXLAN is what only links of that kind have.
type VXLAN struct {
	Port uint16 // UDP, host byte order
	// FlowBased says that each packet brings its VNI and its far end as metadata (collect_md), instead of the device having them.
	FlowBased bool
}

// Tunnel describes a flow-based VXLAN device (RFC 7348): the program that sends a packet to it says where to. It neither
// learns nor resolves addresses.
type Tunnel struct {
	Name  string
	Index int    // asked for when the device is made; 0: any
	Port  uint16 // UDP, host byte order
	MAC   net.HardwareAddr
	MTU   int // of the packets inside
}

// EnsureTunnel makes the device, or mends what was altered of it, its name included; one on another port is made anew. A device
// that was made is down, so that programs can be attached before a packet passes. Another kind of device with that name stays, and is an
// error. The error matches ErrPortTaken if another flow-based device has the port; devices of another kind, and sockets, are
// noticed when the device is set up.
func (h *Handle) EnsureTunnel(t Tunnel) (l Link, changed bool, err error) {
	l, err = h.LinkByName(t.Name)
	if errors.Is(err, ErrNotFound) {
		if l, err = h.renamedTunnel(t); errors.Is(err, ErrNotFound) {
			l, err = h.createTunnel(t)
			return l, err == nil, err
		}
		changed = err == nil
	}
	switch {
	case err != nil:
		return l, changed, err
	case l.Kind != kindVXLAN || !l.VXLAN.FlowBased:
		return l, false, fmt.Errorf("there is another device named %s (%s), which is none of ours: rename or remove it", t.Name, l.Kind)
	case l.VXLAN.Port != t.Port:
		if err := h.DeleteLink(l.Index); err != nil {
			return l, false, err
		}
		t.Index = l.Index
		l, err = h.createTunnel(t)
		return l, true, err
	}
	l, mended, err := h.mendTunnel(l, t)
	return l, changed || mended, err
}

// renamedTunnel finds the device under a name that somebody else has given it, where it would keep the port from another one,
// and gives it its own back. It is down then where the kernel renames nothing that is up (before Linux 6.2).
func (h *Handle) renamedTunnel(t Tunnel) (Link, error) {
	links, err := h.Links()
	if err != nil {
		return Link{}, err
	}
	i := slices.IndexFunc(links, func(l Link) bool {
		return l.VXLAN.FlowBased && (l.Index == t.Index || bytes.Equal(l.MAC, t.MAC))
	})
	if i < 0 {
		return Link{}, fmt.Errorf("link %s: %w", t.Name, ErrNotFound)
	}
	rename := func() error {
		return again(func() error { return h.nl.LinkSetName(byIndex(links[i].Index), t.Name) })
	}
	err = rename()
	if isErrno(err, unix.EBUSY) {
		if err = h.SetDown(links[i].Index); err == nil {
			err = rename()
		}
	}
	if err != nil {
		return links[i], fmt.Errorf("rename VXLAN device %s to %s: %w", links[i].Name, t.Name, err)
	}
	return h.LinkByIndex(links[i].Index)
}

func (h *Handle) createTunnel(t Tunnel) (Link, error) {
	// So narrow a device has no IPv6 yet. Else a router's kernel would have it join the group of all routers, for good: it gets its
	// MTU last, when it is no device for groups any more.
	const narrow = 1279
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index, attrs.MTU, attrs.HardwareAddr = t.Name, t.Index, min(t.MTU, narrow), t.MAC
	add := func() error {
		return again(func() error {
			return h.nl.LinkAdd(&netlink.Vxlan{LinkAttrs: attrs, FlowBased: true, Port: int(t.Port)})
		})
	}
	err := add()
	if attrs.Index != 0 && isErrno(err, unix.EBUSY, unix.EEXIST) { // somebody else's by now, or it is the port
		attrs.Index = 0
		err = add()
	}
	if isErrno(err, unix.EEXIST) {
		return Link{}, h.portTaken(t, err)
	}
	if isErrno(err, unix.EOPNOTSUPP) {
		return Link{}, fmt.Errorf("create VXLAN device %s: the kernel has none (CONFIG_VXLAN, module vxlan): %w", t.Name, err)
	}
	if err != nil {
		return Link{}, fmt.Errorf("create VXLAN device %s: %w", t.Name, err)
	}
	l, err := h.LinkByName(t.Name)
	if err != nil {
		return l, err
	}
	l, _, err = h.mendTunnel(l, t)
	return l, err
}

// mendTunnel sets what is not as it should be, but for whether the device is up.
func (h *Handle) mendTunnel(l Link, t Tunnel) (_ Link, changed bool, err error) {
	link := byIndex(l.Index)
	var errs []error
	for _, one := range []struct {
		right bool
		set   func() error
	}{
		{l.NoARP, func() error { return h.nl.LinkSetARPOff(link) }},
		{l.Flags&net.FlagMulticast == 0, func() error { return h.nl.LinkSetMulticastOff(link) }}, // else the kernel reports its groups
		{l.MTU == t.MTU, func() error { return h.nl.LinkSetMTU(link, t.MTU) }},
		{bytes.Equal(l.MAC, t.MAC), func() error { return h.nl.LinkSetHardwareAddr(link, t.MAC) }},
		{l.Master == 0, func() error { return h.nl.LinkSetNoMaster(link) }},
	} {
		if !one.right {
			changed = true
			errs = append(errs, again(one.set))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return l, changed, fmt.Errorf("mend VXLAN device %s: %w", t.Name, err)
	}
	if !changed {
		return l, false, nil
	}
	l, err = h.LinkByIndex(l.Index)
	return l, true, err
}

// StartTunnel sets up a device that EnsureTunnel has returned. The error matches ErrPortTaken if another device, or a
// socket, has the port.
func (h *Handle) StartTunnel(l Link) error {
	err := h.SetUp(l.Index)
	if isErrno(err, unix.EADDRINUSE) {
		return h.portTaken(Tunnel{Name: l.Name, Port: l.VXLAN.Port}, err)
	}
	return err
}

// portTaken says who has the port that a tunnel can't have.
func (h *Handle) portTaken(t Tunnel, cause error) error {
	links, err := h.Links()
	if err != nil {
		return errors.Join(fmt.Errorf("%w: %d (%w)", ErrPortTaken, t.Port, cause), err)
	}
	for _, l := range links {
		if l.Kind == kindVXLAN && l.Name != t.Name && l.VXLAN.Port == t.Port {
			return fmt.Errorf("%w: %d is the device %s's", ErrPortTaken, t.Port, l.Name)
		}
	}
	return fmt.Errorf("%w: %d is a socket's (`ss -lunp sport = :%[2]d` shows whose)", ErrPortTaken, t.Port)
}

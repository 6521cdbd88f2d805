package device

import (
	"cmp"
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// openStrict opens a socket on which the kernel itself leaves out what a list is not to have.
func openStrict() (*nl.SocketHandle, error) {
	s, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	if err := unix.SetsockoptInt(s.GetFd(), unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1); err != nil {
		s.Close()
		return nil, err
	}
	return &nl.SocketHandle{Socket: s}, nil
}

// list asks for everything that a request's header and attributes name, and repeats that while the kernel reports that
// entries changed meanwhile. A table or a family that does not exist has nothing in it.
func list[T any](h *Handle, question int, head nl.NetlinkRequestData, decode func([]byte) (T, bool), attributes ...nl.NetlinkRequestData) ([]T, error) {
	all, err := ask(h, question, unix.NLM_F_DUMP, head, decode, attributes...)
	if isAbsent(err) {
		return nil, nil
	}
	return all, err
}

// isAbsent reports whether a table or a family does not exist.
func isAbsent(err error) bool { return isErrno(err, unix.ENOENT, unix.EOPNOTSUPP, unix.EAFNOSUPPORT) }

// ask sends a request, and decodes what the kernel answers.
func ask[T any](h *Handle, question, flags int, head nl.NetlinkRequestData, decode func([]byte) (T, bool), attributes ...nl.NetlinkRequestData) ([]T, error) {
	return dump(func() (all []T, err error) {
		err = h.visit(question, flags, head, func(m []byte) {
			if one, ok := decode(m); ok {
				all = append(all, one)
			}
		}, attributes...)
		return all, err
	})
}

// visit sends a request once, and hands each message of the kernel's answer to take, which must keep nothing of it.
func (h *Handle) visit(question, flags int, head nl.NetlinkRequestData, take func([]byte), attributes ...nl.NetlinkRequestData) error {
	request := nl.NewNetlinkRequest(question, flags)
	request.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: h.lists}
	request.AddData(head)
	for _, a := range attributes {
		request.AddData(a)
	}
	return request.ExecuteIter(unix.NETLINK_ROUTE, 0, func(m []byte) bool {
		take(m)
		return true
	})
}

// Links lists all links.
func (h *Handle) Links() ([]Link, error) {
	links, err := list(h, unix.RTM_GETLINK, nl.NewIfInfomsg(unix.AF_UNSPEC), decodeLink, withoutStatistics())
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	return links, nil
}

func withoutStatistics() *nl.RtAttr {
	const skip = 1 << 3 // RTEXT_FILTER_SKIP_STATS
	return nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(skip))
}

// Addresses lists the addresses of all links, both families.
func (h *Handle) Addresses() ([]Address, error) {
	addresses, err := list(h, unix.RTM_GETADDR, nl.NewIfAddrmsg(unix.AF_UNSPEC), decodeAddress)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	return addresses, nil
}

// Neighbours lists a link's entries of both families; for index 0 those of all links.
func (h *Handle) Neighbours(index int) ([]Neighbour, error) {
	var only []nl.NetlinkRequestData
	if index != 0 {
		only = append(only, nl.NewRtAttr(unix.NDA_IFINDEX, nl.Uint32Attr(uint32(index))))
	}
	neighbours, err := list(h, unix.RTM_GETNEIGH, &netlink.Ndmsg{}, decodeNeighbour, only...)
	if err != nil && index == 0 {
		return nil, fmt.Errorf("list neighbours: %w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("list neighbours of link %d: %w", index, err)
	}
	return neighbours, nil
}

// defaultVLAN is that of the ports of a bridge that filters VLANs; one that does not has 0 alone.
const defaultVLAN = 1

// BridgePort returns behind which port a bridge has learnt an Ethernet address to be; 0: it does not know, or is gone. It is asked for
// that alone, since whoever is behind it can have it learn a million.
func (h *Handle) BridgePort(bridge int, mac net.HardwareAddr) (int, error) {
	for _, vlan := range []uint16{0, defaultVLAN} {
		attributes := []nl.NetlinkRequestData{nl.NewRtAttr(unix.NDA_LLADDR, mac), nl.NewRtAttr(unix.NDA_MASTER, nl.Uint32Attr(uint32(bridge)))}
		if vlan != 0 {
			attributes = append(attributes, nl.NewRtAttr(unix.NDA_VLAN, nl.Uint16Attr(vlan)))
		}
		ports, err := ask(h, unix.RTM_GETNEIGH, 0, &netlink.Ndmsg{Family: unix.AF_BRIDGE}, decodeBridgePort, attributes...)
		if len(ports) > 0 {
			return ports[0], nil
		}
		if err != nil && !isErrno(err, unix.ENOENT, unix.EINVAL, unix.ENODEV) {
			return 0, fmt.Errorf("ask bridge %d for the port of %s: %w", bridge, mac, err)
		}
	}
	return 0, nil
}

// Settings lists the IPv4 settings of each link, by index, and those of AllLinks: one request instead of a file for each.
func (h *Handle) Settings() (map[int]Settings, error) {
	head := &nl.RtGenMsg{RtGenmsg: unix.RtGenmsg{Family: unix.AF_INET}} // the same as struct netconfmsg
	all, err := list(h, unix.RTM_GETNETCONF, head, decodeSettings)
	if err != nil {
		return nil, fmt.Errorf("list settings of links: %w", err)
	}
	settings := make(map[int]Settings, len(all))
	for _, s := range all {
		settings[s.Index] = s
	}
	return settings, nil
}

// Routes lists the main table, both families.
func (h *Handle) Routes() ([]Route, error) {
	return h.both(unix.RTPROT_UNSPEC)
}

// OwnRoutes lists the routes of our protocol in the main table, both families.
func (h *Handle) OwnRoutes() ([]Route, error) { return h.both(Protocol) }

func (h *Handle) both(protocol int) ([]Route, error) {
	four, err4 := h.routes(unix.AF_INET, unix.RT_TABLE_MAIN, protocol)
	six, err6 := h.routes(unix.AF_INET6, unix.RT_TABLE_MAIN, protocol)
	return append(four, six...), errors.Join(err4, err6)
}

// The families, as the kernel numbers them.
const (
	IPv4 = unix.AF_INET
	IPv6 = unix.AF_INET6
)

// EachRoute calls take for each route of a table (0: the main one), of a family, and of one protocol or of all (0). It keeps none of them,
// so a million cost no memory. The table may change meanwhile: then the error is one for which Repeat starts again. take must not list
// anything by the same Handle.
func (h *Handle) EachRoute(family, table, protocol int, take func(Route)) error {
	err := h.visitTable(family, cmp.Or(table, unix.RT_TABLE_MAIN), protocol, func(m []byte) {
		if r, _, ok := decodeRoute(m); ok {
			take(r)
		}
	})
	if err != nil && !isAbsent(err) {
		return fmt.Errorf("list routes: %w", err)
	}
	return nil
}

// Repeat repeats a request while the kernel reports that entries changed meanwhile.
func Repeat(request func() error) error { return again(request) }

// routes lists a table, of one protocol or of all (RTPROT_UNSPEC).
func (h *Handle) routes(family, table, protocol int) (all []Route, err error) {
	err = again(func() error {
		all = nil
		return h.EachRoute(family, table, protocol, func(r Route) { all = append(all, r) })
	})
	return all, err
}

// visitTable hands each message about a table to take.
func (h *Handle) visitTable(family, table, protocol int, take func([]byte)) error {
	head := nl.RtMsg{RtMsg: unix.RtMsg{Family: uint8(family), Protocol: uint8(protocol)}}
	return h.visit(unix.RTM_GETROUTE, unix.NLM_F_DUMP, &head, func(m []byte) {
		if len(m) != 0 && int(m[0]) == family { // a kernel without a family lists those of others instead
			take(m)
		}
	}, nl.NewRtAttr(unix.RTA_TABLE, nl.Uint32Attr(uint32(table))))
}

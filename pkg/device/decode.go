package device

import (
	"encoding/binary"
	"iter"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The kernel's messages are decoded here and not by package netlink: a node has thousands of routes, and only a few
// fields of each matter. Numbers are in host byte order.

var native = binary.NativeEndian

// attributes yields those of a message behind its header, until one is malformed.
func attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= unix.SizeofRtAttr {
			length := int(native.Uint16(b))
			if length < unix.SizeofRtAttr || length > len(b) {
				return
			}
			const kindMask = ^uint16(unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
			if !yield(native.Uint16(b[2:])&kindMask, b[unix.SizeofRtAttr:length]) {
				return
			}
			b = b[min(len(b), (length+unix.RTA_ALIGNTO-1)&^(unix.RTA_ALIGNTO-1)):]
		}
	}
}

// number reads a number of 32 bits; 0: there is none.
func number(b []byte) int {
	if len(b) < 4 {
		return 0
	}
	return int(int32(native.Uint32(b)))
}

func address(b []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(b)
	return a.Unmap()
}

// decodeLink reads struct ifinfomsg; false: the message is not about a link as such.
func decodeLink(m []byte) (l Link, ok bool) {
	if len(m) < unix.SizeofIfInfomsg || m[0] != unix.AF_UNSPEC {
		return l, false
	}
	flags := native.Uint32(m[8:])
	l = Link{Index: number(m[4:]), Kind: KindHardware, PeerNS: -1, NoARP: flags&unix.IFF_NOARP != 0}
	if flags&unix.IFF_UP != 0 {
		l.Flags |= net.FlagUp
	}
	if flags&unix.IFF_LOOPBACK != 0 {
		l.Flags |= net.FlagLoopback
	}
	for kind, v := range attributes(m[unix.SizeofIfInfomsg:]) {
		switch kind {
		case unix.IFLA_IFNAME:
			l.Name = unix.ByteSliceToString(v)
		case unix.IFLA_ADDRESS:
			if slices.ContainsFunc(v, func(b byte) bool { return b != 0 }) {
				l.MAC = slices.Clone(v)
			}
		case unix.IFLA_MTU:
			l.MTU = number(v)
		case unix.IFLA_LINK:
			l.PeerIndex = number(v)
		case unix.IFLA_LINK_NETNSID:
			l.PeerNS = number(v)
		case unix.IFLA_MASTER:
			l.Master = number(v)
		case unix.IFLA_OPERSTATE:
			l.Running = len(v) > 0 && v[0] == netlink.OperUp
		case unix.IFLA_LINKINFO:
			l.decodeKind(v)
		}
	}
	l.Bare = isBare(l.Kind, native.Uint16(m[2:]), flags)
	return l, l.Index > 0
}

// decodeKind reads IFLA_LINKINFO, in which the kind stands before what only that kind has.
func (l *Link) decodeKind(b []byte) {
	for kind, v := range attributes(b) {
		switch {
		case kind == unix.IFLA_INFO_KIND:
			l.Kind = unix.ByteSliceToString(v)
		case kind == unix.IFLA_INFO_DATA && l.Kind == kindVXLAN:
			for kind, v := range attributes(v) {
				switch {
				case kind == unix.IFLA_VXLAN_PORT && len(v) == 2:
					l.VXLAN.Port = binary.BigEndian.Uint16(v)
				case kind == unix.IFLA_VXLAN_COLLECT_METADATA:
					l.VXLAN.FlowBased = len(v) > 0 && v[0] != 0
				}
			}
		}
	}
}

// decodeAddress reads struct ifaddrmsg.
func decodeAddress(m []byte) (a Address, ok bool) {
	if len(m) < unix.SizeofIfAddrmsg {
		return a, false
	}
	bits, flags := int(m[1]), uint32(m[2])
	a = Address{Index: number(m[4:]), Host: m[3] == unix.RT_SCOPE_HOST, Link: m[3] == unix.RT_SCOPE_LINK}
	var local, far netip.Addr
	for kind, v := range attributes(m[unix.SizeofIfAddrmsg:]) {
		switch kind {
		case unix.IFA_ADDRESS:
			far = address(v)
		case unix.IFA_LOCAL:
			local = address(v)
		case unix.IFA_FLAGS:
			flags = uint32(number(v))
		}
	}
	if !local.IsValid() {
		local = far
	}
	if local != far { // the other end's is the one with the length
		bits = local.BitLen()
	}
	a.Prefix = netip.PrefixFrom(local, bits)
	const unproven = unix.IFA_F_TENTATIVE | unix.IFA_F_DADFAILED
	a.Secondary = flags&unix.IFA_F_SECONDARY != 0 && local.Is4()
	a.Deprecated = flags&unix.IFA_F_DEPRECATED != 0 && local.Is6()
	a.Temporary = flags&unix.IFA_F_TEMPORARY != 0 && local.Is6() // the same bit as "secondary" for IPv4
	a.Unproven = flags&unproven != 0
	return a, a.Prefix.IsValid()
}

// encapOf reads RTA_ENCAP_TYPE.
func encapOf(b []byte) Encap {
	if len(b) < 2 {
		return 0
	}
	return Encap(native.Uint16(b))
}

// viaAddress reads struct rtvia, a gateway that may be of another family than the route.
func viaAddress(b []byte) netip.Addr {
	const header = 2 // the family, which the length tells as well
	return address(b[min(len(b), header):])
}

// routeType is rtm_type of a route.
type routeType uint8

// decodeRoute reads struct rtmsg; false: it is no route of a table but a cached one, or malformed.
func decodeRoute(m []byte) (r Route, kind routeType, ok bool) {
	if len(m) < unix.SizeofRtMsg || native.Uint32(m[8:])&unix.RTM_F_CLONED != 0 {
		return r, 0, false
	}
	kind = routeType(m[7])
	r = Route{
		TOS: int(m[3]), Table: int(m[4]), Protocol: int(m[5]), Foreign: m[5] != Protocol, Unreachable: m[7] == unix.RTN_UNREACHABLE,
	}
	dst := netip.IPv4Unspecified()
	if m[0] == unix.AF_INET6 {
		dst = netip.IPv6Unspecified()
	}
	for attribute, v := range attributes(m[unix.SizeofRtMsg:]) {
		switch attribute {
		case unix.RTA_DST:
			dst = address(v)
		case unix.RTA_OIF:
			r.Index = number(v)
		case unix.RTA_GATEWAY:
			r.Gateway = address(v)
		case unix.RTA_VIA:
			r.Gateway = viaAddress(v)
		case unix.RTA_ENCAP_TYPE:
			r.Encap = encapOf(v)
		case unix.RTA_PRIORITY:
			r.Priority = number(v)
		case unix.RTA_PREFSRC:
			r.Source = address(v)
		case unix.RTA_TABLE:
			r.Table = number(v)
		case unix.RTA_METRICS:
			r.decodeMetrics(v)
		case unix.RTA_MULTIPATH:
			r.decodeHops(v)
		}
	}
	if r.Table == unix.RT_TABLE_MAIN {
		r.Table = 0
	}
	r.Dst = netip.PrefixFrom(dst, int(m[1]))
	return r, kind, r.Dst.IsValid()
}

func (r *Route) decodeMetrics(b []byte) {
	for kind, v := range attributes(b) {
		switch kind {
		case unix.RTAX_MTU:
			r.MTU = number(v)
		case unix.RTAX_ADVMSS:
			r.AdvMSS = number(v)
		}
	}
}

// decodeHops reads a list of struct rtnexthop.
func (r *Route) decodeHops(b []byte) {
	for len(b) >= unix.SizeofRtNexthop {
		length := int(native.Uint16(b))
		if length < unix.SizeofRtNexthop || length > len(b) {
			return
		}
		var via netip.Addr
		for kind, v := range attributes(b[unix.SizeofRtNexthop:length]) {
			switch kind {
			case unix.RTA_GATEWAY:
				via = address(v)
			case unix.RTA_VIA:
				via = viaAddress(v)
			case unix.RTA_ENCAP_TYPE:
				r.Encap = encapOf(v)
			}
		}
		r.Hops, r.HopGateways = append(r.Hops, number(b[4:])), append(r.HopGateways, via)
		b = b[min(len(b), (length+unix.RTA_ALIGNTO-1)&^(unix.RTA_ALIGNTO-1)):]
	}
}

// decodeNeighbour reads struct ndmsg; false: it has no address.
func decodeNeighbour(m []byte) (n Neighbour, ok bool) {
	if len(m) < unix.SizeofNdMsg {
		return n, false
	}
	n = Neighbour{Index: number(m[4:]), Permanent: native.Uint16(m[8:])&unix.NUD_PERMANENT != 0}
	for kind, v := range attributes(m[unix.SizeofNdMsg:]) {
		switch kind {
		case unix.NDA_DST:
			n.Addr = address(v)
		case unix.NDA_LLADDR:
			n.MAC = slices.Clone(v)
		}
	}
	return n, n.Addr.IsValid()
}

// decodeBridgePort reads struct ndmsg of a bridge; false: it has not learnt the entry.
func decodeBridgePort(m []byte) (port int, ok bool) {
	if len(m) < unix.SizeofNdMsg || m[0] != unix.AF_BRIDGE || native.Uint16(m[8:])&unix.NUD_PERMANENT != 0 {
		return 0, false
	}
	return number(m[4:]), true
}

// Attributes of struct netconfmsg.
const (
	netconfIndex      = 1 // NETCONFA_IFINDEX
	netconfForwarding = 2 // NETCONFA_FORWARDING
	netconfRPFilter   = 3 // NETCONFA_RP_FILTER
)

// decodeSettings reads struct netconfmsg; false: it does not say whose they are.
func decodeSettings(m []byte) (s Settings, ok bool) {
	const header = 4 // padded
	s = Settings{Forwarding: Untold, RPFilter: Untold}
	for kind, v := range attributes(m[min(len(m), header):]) {
		switch kind {
		case netconfIndex:
			s.Index, ok = number(v), true
		case netconfForwarding:
			s.Forwarding = number(v)
		case netconfRPFilter:
			s.RPFilter = number(v)
		}
	}
	return s, ok
}

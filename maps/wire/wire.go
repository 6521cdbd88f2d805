// Package wire has the types that all maps share, in the byte layout of wire.h. It
// reads and writes no map itself.
package wire

//go:generate go run ../../tools/enums

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// Addr is an address of either family, IPv4 in its IPv6-mapped form
// (RFC 4291, section 2.5.5.2). The zero Addr means "none".
type Addr [16]byte

// AddrFrom converts a netip address; the invalid address becomes the zero Addr.
func AddrFrom(a netip.Addr) Addr {
	if !a.IsValid() {
		return Addr{}
	}
	return Addr(a.As16())
}

// Netip returns the address with IPv4 unmapped; invalid when a is zero.
func (a Addr) Netip() netip.Addr {
	if a == (Addr{}) {
		return netip.Addr{}
	}
	return netip.AddrFrom16(a).Unmap()
}

// String is the usual text of the address, "-" when there is none.
func (a Addr) String() string {
	if a == (Addr{}) {
		return "-"
	}
	return a.Netip().String()
}

// Compare sorts the zero Addr first, then IPv4 before IPv6.
func (a Addr) Compare(b Addr) int { return a.Netip().Compare(b.Netip()) }

// With is the address with a port, such as "192.0.2.1:80"; "-" when there is no address.
func (a Addr) With(p Port) string {
	if a == (Addr{}) {
		return "-"
	}
	return netip.AddrPortFrom(a.Netip(), p.Host()).String()
}

// MarshalText implements encoding.TextMarshaler.
func (a Addr) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// Family is an address family: the index of what exists once for each.
type Family uint32

// FamilyOf is the family of a valid address.
func FamilyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// Name is what people call the family.
func (v Family) Name() string { return [Families]string{IPv4: "IPv4", IPv6: "IPv6"}[v] }

// Addresses are an address of each family, zero where there is none.
type Addresses [Families]Addr

// AddressesFrom has at most one address of each family: the last that is given.
func AddressesFrom(all ...netip.Addr) (a Addresses) {
	for _, addr := range all {
		if addr.IsValid() {
			a[FamilyOf(addr)] = AddrFrom(addr)
		}
	}
	return a
}

// All are the addresses that there are, IPv4 first; never nil.
func (a Addresses) All() []netip.Addr {
	all := []netip.Addr{}
	for _, addr := range a {
		if addr != (Addr{}) {
			all = append(all, addr.Netip())
		}
	}
	return all
}

// Port is a TCP or UDP port, or an ICMP echo identifier, in network byte order.
type Port [2]byte

// PortFrom converts a port from host order.
func PortFrom(p uint16) Port {
	var b Port
	binary.BigEndian.PutUint16(b[:], p)
	return b
}

// Host returns the port in host order.
func (p Port) Host() uint16 { return binary.BigEndian.Uint16(p[:]) }

// String is the port as a decimal number.
func (p Port) String() string { return strconv.Itoa(int(p.Host())) }

// MAC is an Ethernet address. The zero MAC means "none".
type MAC [6]byte

// String is the address in colon-separated hex, "-" when there is none.
func (m MAC) String() string {
	if m == (MAC{}) {
		return "-"
	}
	return net.HardwareAddr(m[:]).String()
}

// MarshalText implements encoding.TextMarshaler.
func (m MAC) MarshalText() ([]byte, error) { return []byte(net.HardwareAddr(m[:]).String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (m *MAC) UnmarshalText(text []byte) error {
	mac, err := net.ParseMAC(string(text))
	if err != nil || len(mac) != len(m) {
		return fmt.Errorf("%q is not an Ethernet address", text)
	}
	*m = MAC(mac)
	return nil
}

// Protocol is an IP protocol number.
type Protocol uint8

// The protocols whose flows can be masqueraded.
const (
	ICMP Protocol = 1
	TCP  Protocol = 6
	UDP  Protocol = 17
)

// String is the lower-case name of the protocol, or its number.
func (p Protocol) String() string {
	switch p {
	case ICMP:
		return "icmp"
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	}
	return strconv.Itoa(int(p))
}

// Tuple is one direction of a flow: struct tuple of wire.h.
type Tuple struct {
	Src   Addr
	Dst   Addr
	Sport Port
	Dport Port
	Proto Protocol
	_     [3]byte
}

// Compare sorts by source, then protocol, then destination.
func (t Tuple) Compare(o Tuple) int {
	return cmp.Or(
		t.Src.Compare(o.Src), cmp.Compare(t.Proto, o.Proto), cmp.Compare(t.Sport.Host(), o.Sport.Host()),
		t.Dst.Compare(o.Dst), cmp.Compare(t.Dport.Host(), o.Dport.Host()),
	)
}

// String is "tcp 10.0.0.1:1 > 192.0.2.1:80".
func (t Tuple) String() string {
	end := func(a Addr, p Port) string { return netip.AddrPortFrom(a.Netip(), p.Host()).String() }
	return t.Proto.String() + " " + end(t.Src, t.Sport) + " > " + end(t.Dst, t.Dport)
}

// Direction says which program saw a packet: enum direction of wire.h.
type Direction uint32

// Bits lists the names of the bits that are set, the lowest first, such as "syn|ack"; "-" when none is.
func Bits(v uint32, names ...string) string {
	var set []string
	for i, n := range names {
		if v&(1<<i) != 0 {
			set = append(set, n)
		}
	}
	if len(set) == 0 {
		return "-"
	}
	return strings.Join(set, "|")
}

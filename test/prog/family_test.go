package prog

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// family is the address family in which a test's story happens. The story is told once, with IPv4's addresses, lengths of
// prefixes and ICMP types as names. On their way into packets and maps they become those of the family, and names again
// when a packet is read: in IPv6 10.244.1.10 stands for fd00:10:244:1::10, a /24 for a /64. An address of IPv6 in a story
// is itself.
type family struct{ wire.Family }

// The families, for what only one of them has.
var (
	inIPv4 = family{wire.IPv4}
	inIPv6 = family{wire.IPv6}
)

// inEachFamily runs a test once for each family.
func inEachFamily(t *testing.T, test func(t *testing.T, f family)) {
	t.Helper()
	for f := range wire.Families {
		t.Run(f.String(), func(t *testing.T) { test(t, family{f}) })
	}
}

// inOneFamily is for what the families share, such as the tables of flows: for IPv4 alone, and for both in the long form.
func inOneFamily(t *testing.T, test func(t *testing.T, f family)) {
	t.Helper()
	if priv.Long() {
		inEachFamily(t, test)
		return
	}
	test(t, inIPv4)
}

// each chooses what the families do not have in common.
func each[T any](f family, values ...T) T { return values[f.Family] }

// The first groups of what a name stands for in IPv6, by where it lies.
var (
	insideIPv6    = []string{"fd00"}
	outsideIPv6   = []string{"2001", "db8"}
	multicastIPv6 = []string{"ff0e"}
)

// fixedIPv6 are names whose counterpart is another than the rule gives.
var fixedIPv6 = map[string]string{
	"0.0.0.0": "::", "127.0.0.1": "::1", "255.255.255.255": "ff02::1", gateway: "fe80::1",
}

// inside are the networks of the cluster.
var inside = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12")}

// startIPv6 is the first groups of a name's counterpart.
func startIPv6(name netip.Addr) []string {
	switch {
	case name.IsMulticast():
		return multicastIPv6
	case slices.ContainsFunc(inside, func(p netip.Prefix) bool { return p.Contains(name) }):
		return insideIPv6
	}
	return outsideIPv6
}

// ip is the address that a name stands for.
func (f family) ip(name string) netip.Addr {
	a := netip.MustParseAddr(name)
	if f.Family == wire.IPv4 || !a.Is4() {
		return a
	}
	if fixed, ok := fixedIPv6[name]; ok {
		return netip.MustParseAddr(fixed)
	}
	digits := strings.Split(name, ".")
	return netip.MustParseAddr(strings.Join(append(slices.Clone(startIPv6(a)), digits[:3]...), ":") + "::" + digits[3])
}

// prefix is what a name such as "10.244.1.0/24" stands for.
func (f family) prefix(name string) netip.Prefix {
	p := netip.MustParsePrefix(name)
	switch bits := p.Bits(); {
	case f.Family == wire.IPv4 || !p.Addr().Is4():
		return p
	case bits == 32:
		return netip.PrefixFrom(f.ip(p.Addr().String()), 128)
	case bits == 0:
		return netip.MustParsePrefix("::/0")
	case bits%8 != 0:
		panic(name + " has no counterpart in IPv6")
	default:
		return netip.PrefixFrom(f.ip(p.Addr().String()), 16*(len(startIPv6(p.Addr()))+bits/8)).Masked()
	}
}

// key is the key of a prefix in destinations.
func (f family) key(name string) destinations.Key { return destinations.KeyFrom(f.prefix(name)) }

// hostKey is the key of a single address there.
func (f family) hostKey(name string) destinations.Key {
	a := f.ip(name)
	return destinations.KeyFrom(netip.PrefixFrom(a, a.BitLen()))
}

// netIP and ipNet are ip and prefix as netlink takes them.
func (f family) netIP(name string) net.IP { return f.ip(name).AsSlice() }

func (f family) ipNet(name string) *net.IPNet {
	p := f.prefix(name)
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// addr is the map form of an address.
func (f family) addr(name string) wire.Addr { return wire.AddrFrom(f.ip(name)) }

// tuple is the map form of one direction of a flow.
func (f family) tuple(proto wire.Protocol, src string, sport uint16, dst string, dport uint16) wire.Tuple {
	return wire.Tuple{
		Src: f.addr(src), Dst: f.addr(dst), Sport: wire.PortFrom(sport), Dport: wire.PortFrom(dport), Proto: f.proto(proto),
	}
}

// icmpv6 is the number of ICMPv6, as a next header.
const icmpv6 = wire.Protocol(58)

// foreignICMP is what a story calls the number of IPv4's ICMP in IPv6, where it means nothing.
const foreignICMP = wire.Protocol(255)

// proto is a protocol's number in the family: only ICMP has two.
func (f family) proto(name wire.Protocol) wire.Protocol {
	switch {
	case f == inIPv6 && name == wire.ICMP:
		return icmpv6
	case f == inIPv6 && name == foreignICMP:
		return wire.ICMP
	}
	return name
}

// protoName is the reverse of proto.
func (f family) protoName(number wire.Protocol) wire.Protocol {
	switch {
	case f == inIPv6 && number == icmpv6:
		return wire.ICMP
	case f == inIPv6 && number == wire.ICMP:
		return foreignICMP
	}
	return number
}

// header is the length of an IP header without options.
func (f family) header() int { return each(f, 20, 40) }

// both is an address of each family.
func both(name string) wire.Addresses { return wire.Addresses{inIPv4.addr(name), inIPv6.addr(name)} }

// opposite is the other family.
func (f family) opposite() family { return each(f, inIPv6, inIPv4) }

// nameOf is what a story calls an address.
func nameOf(a netip.Addr) string {
	if a.Is4() {
		return a.String()
	}
	for name, fixed := range fixedIPv6 {
		if a.String() == fixed {
			return name
		}
	}
	groups := make([]string, 8)
	for i, b := 0, a.As16(); i < len(groups); i++ {
		groups[i] = strconv.FormatUint(uint64(b[2*i])<<8|uint64(b[2*i+1]), 16)
	}
	for _, start := range [][]string{insideIPv6, outsideIPv6, multicastIPv6} {
		if !slices.Equal(groups[:len(start)], start) {
			continue
		}
		digits := append(slices.Clone(groups[len(start):len(start)+3]), groups[7])
		name, err := netip.ParseAddr(strings.Join(digits, "."))
		if err == nil && inIPv6.ip(name.String()) == a {
			return name.String()
		}
	}
	return a.String()
}

// kind is an ICMP type and code.
type kind [2]uint8

// The kinds of an echo flow.
var (
	echoRequest = kind{layers.ICMPv4TypeEchoRequest, 0}
	echoReply   = kind{layers.ICMPv4TypeEchoReply, 0}
)

// kindsIPv6 are ICMPv6's counterparts of the types and codes that stories name (RFC 4443). A request for the time has
// none: one for a node's information (RFC 4620), which nobody translates either, plays it.
var kindsIPv6 = map[kind]kind{
	echoRequest:                            {layers.ICMPv6TypeEchoRequest, 0},
	echoReply:                              {layers.ICMPv6TypeEchoReply, 0},
	{layers.ICMPv4TypeTimestampRequest, 0}: {139, 0},
	{layers.ICMPv4TypeDestinationUnreachable, 1}: {layers.ICMPv6TypeDestinationUnreachable, 3},
	{layers.ICMPv4TypeDestinationUnreachable, 3}: {layers.ICMPv6TypeDestinationUnreachable, 4},
	{layers.ICMPv4TypeDestinationUnreachable, 4}: {layers.ICMPv6TypePacketTooBig, 0},
	{layers.ICMPv4TypeTimeExceeded, 0}:           {layers.ICMPv6TypeTimeExceeded, 0},
	{layers.ICMPv4TypeTimeExceeded, 1}:           {layers.ICMPv6TypeTimeExceeded, 1},
	{layers.ICMPv4TypeParameterProblem, 0}:       {layers.ICMPv6TypeParameterProblem, 0},
	{layers.ICMPv4TypeRedirect, 0}:               {layers.ICMPv6TypeRedirect, 0},
	{layers.ICMPv4TypeRedirect, 1}:               {layers.ICMPv6TypeRedirect, 1},
	{layers.ICMPv4TypeRedirect, 2}:               {layers.ICMPv6TypeRedirect, 2},
	{layers.ICMPv4TypeRedirect, 3}:               {layers.ICMPv6TypeRedirect, 3},
}

// kind is the family's counterpart of an ICMP type and code.
func (f family) kind(k kind) kind {
	if f.Family == wire.IPv4 {
		return k
	}
	if to, ok := kindsIPv6[k]; ok {
		return to
	}
	panic(fmt.Sprintf("ICMP type and code %v have no counterpart in ICMPv6", k))
}

// isError says whether an ICMP type of the family is an error's.
func (f family) isError(icmpType uint8) bool {
	if f.Family == wire.IPv6 {
		return icmpType >= layers.ICMPv6TypeDestinationUnreachable && icmpType <= layers.ICMPv6TypeParameterProblem
	}
	return slices.Contains([]uint8{3, 4, 5, 11, 12}, icmpType)
}

package prog

import (
	"net"
	"net/netip"
	"slices"

	"github.com/gopacket/gopacket/layers"
)

// question is a pod's for the Ethernet address of another address.
func (b *bed) question(pod, target string) []byte {
	l := b.pods[pod]
	if b.family == inIPv4 {
		return arp(layers.ARPRequest, l.peer, pod, target)
	}
	p := solicitation(b.ip(pod).String(), b.ip(target).String(), sourceOption(l.peer)...)
	p.macFrom = l.peer
	return p.bytes(b.family)
}

// sourceOption says with which Ethernet address a message was sent.
func sourceOption(mac net.HardwareAddr) []byte { return append([]byte{1, 1}, mac...) }

// linkMessage is an ICMPv6 message between neighbours (RFC 4861); body is what follows its first eight bytes.
func linkMessage(src, dst string, icmpType uint8, body []byte) packet {
	return packet{proto: icmpv6, src: src, dst: dst, icmpType: icmpType, quote: body, ttl: 255}
}

// solicitation asks for a neighbour's Ethernet address, as a first question does: to the target's solicited-node address.
func solicitation(src, target string, options ...byte) packet {
	a := netip.MustParseAddr(target).As16()
	group := netip.MustParseAddr("ff02::1:ff00:0").As16()
	copy(group[13:], a[13:])
	return linkMessage(src, netip.AddrFrom16(group).String(), layers.ICMPv6TypeNeighborSolicitation, slices.Concat(a[:], options))
}

package e2e

import (
	"net/netip"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// ipLayer is an IP header to serialise, of the family of its addresses.
func ipLayer(from, to netip.Addr, protocol layers.IPProtocol) interface {
	gopacket.NetworkLayer
	gopacket.SerializableLayer
} {
	if from.Is4() {
		return &layers.IPv4{Version: 4, TTL: 64, Protocol: protocol, SrcIP: from.AsSlice(), DstIP: to.AsSlice()}
	}
	return &layers.IPv6{Version: 6, HopLimit: 64, NextHeader: protocol, SrcIP: from.AsSlice(), DstIP: to.AsSlice()}
}

// serialised are the bytes of layers, with lengths and checksums.
func serialised(t *testing.T, all ...gopacket.SerializableLayer) []byte {
	t.Helper()
	buffer := gopacket.NewSerializeBuffer()
	if err := gopacket.SerializeLayers(buffer, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, all...); err != nil {
		t.Fatal(err)
	}
	return buffer.Bytes()
}

// datagram is a UDP packet from and to port 9.
func datagram(t *testing.T, from, to netip.Addr, payload string) []byte {
	t.Helper()
	ip, udp := ipLayer(from, to, layers.IPProtocolUDP), &layers.UDP{SrcPort: 9, DstPort: 9}
	if err := udp.SetNetworkLayerForChecksum(ip); err != nil {
		t.Fatal(err)
	}
	return serialised(t, ip, udp, gopacket.Payload(payload))
}

// segment is a TCP packet without data.
func segment(t *testing.T, from, to netip.AddrPort) []byte {
	t.Helper()
	ip := ipLayer(from.Addr(), to.Addr(), layers.IPProtocolTCP)
	tcp := &layers.TCP{SrcPort: layers.TCPPort(from.Port()), DstPort: layers.TCPPort(to.Port()), ACK: true}
	if err := tcp.SetNetworkLayerForChecksum(ip); err != nil {
		t.Fatal(err)
	}
	return serialised(t, ip, tcp)
}

// icmpError is an ICMP error about a packet.
func icmpError(t *testing.T, from, to netip.Addr, kind lab.ICMPKind, quoted []byte) []byte {
	t.Helper()
	if from.Is4() {
		return serialised(t, ipLayer(from, to, layers.IPProtocolICMPv4),
			&layers.ICMPv4{TypeCode: layers.CreateICMPv4TypeCode(kind.Type, kind.Code)}, gopacket.Payload(quoted))
	}
	ip, message := ipLayer(from, to, layers.IPProtocolICMPv6), &layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(kind.Type, kind.Code)}
	if err := message.SetNetworkLayerForChecksum(ip); err != nil {
		t.Fatal(err)
	}
	return serialised(t, ip, message, gopacket.Payload(append(make([]byte, 4), quoted...)))
}

// onLink is a frame with an ICMPv6 message for the link.
func onLink(t *testing.T, from, to []byte, ip *layers.IPv6, kind uint8, body gopacket.SerializableLayer) []byte {
	t.Helper()
	message := &layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(kind, 0)}
	if err := message.SetNetworkLayerForChecksum(ip); err != nil {
		t.Fatal(err)
	}
	return serialised(t, &layers.Ethernet{SrcMAC: from, DstMAC: to, EthernetType: layers.EthernetTypeIPv6}, ip, message, body)
}

// icmpErrorIn reads an ICMP error of either family and what it quotes; false for another packet.
func icmpErrorIn(packet gopacket.Packet) (kind lab.ICMPKind, quoted gopacket.Packet, ok bool) {
	const rest = 4 // of the header, which this library counts to the payload of ICMPv6
	if l, is := packet.Layer(layers.LayerTypeICMPv4).(*layers.ICMPv4); is {
		kind = lab.ICMPKind{Type: l.TypeCode.Type(), Code: l.TypeCode.Code()}
		return kind, gopacket.NewPacket(l.Payload, layers.LayerTypeIPv4, gopacket.Default), true
	}
	if l, is := packet.Layer(layers.LayerTypeICMPv6).(*layers.ICMPv6); is && l.TypeCode.Type() < 128 && len(l.Payload) > rest {
		kind = lab.ICMPKind{Type: l.TypeCode.Type(), Code: l.TypeCode.Code()}
		return kind, gopacket.NewPacket(l.Payload[rest:], layers.LayerTypeIPv6, gopacket.Default), true
	}
	return kind, nil, false
}

// ipHeader is what tests read of an IP header of either family.
type ipHeader struct {
	source, destination netip.Addr
	hops, class         uint8
	dontFragment        bool // IPv6 has no other way
	payload             []byte
}

// ipHeaderOf reads a layer; false for one of another kind.
func ipHeaderOf(layer gopacket.Layer) (h ipHeader, ok bool) {
	switch l := layer.(type) {
	case *layers.IPv4:
		h = ipHeader{hops: l.TTL, class: l.TOS, dontFragment: l.Flags&layers.IPv4DontFragment != 0, payload: l.Payload}
	case *layers.IPv6:
		h = ipHeader{hops: l.HopLimit, class: l.TrafficClass, dontFragment: true, payload: l.Payload}
	default:
		return h, false
	}
	from, to := layer.(gopacket.NetworkLayer).NetworkFlow().Endpoints()
	h.source, _ = netip.AddrFromSlice(from.Raw())
	h.destination, _ = netip.AddrFromSlice(to.Raw())
	return h, true
}

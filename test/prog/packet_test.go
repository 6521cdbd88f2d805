package prog

import (
	"encoding/binary"
	"net"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// TCP flags, as in the header.
const (
	fin = 0x01
	syn = 0x02
	rst = 0x04
	ack = 0x10
)

// packet is what a test says of a packet; bytes makes it one.
type packet struct {
	proto        wire.Protocol
	src, dst     string
	sport, dport uint16 // of ICMP echo: the identifier, in sport of a request and in dport of a reply

	flags    uint8
	seq, ack uint32

	icmpType, icmpCode uint8
	rest               uint16 // of an ICMP error: the second half of its second word, such as the next hop's MTU
	quote              []byte // of an ICMP error: the packet that it is about, from the IP header on

	tos      uint8
	ttl      uint8 // 0 means 64
	id       uint16
	fragment uint16 // the fragment field: more-fragments flag and offset
	options  bool
	noSum    bool // UDP without a checksum
	payload  []byte
	raw      bool // payload is the whole content of the IP packet

	macTo, macFrom net.HardwareAddr
}

const moreFragments = 0x2000

// replied turns the packet round, as the other end would answer it.
func (p packet) replied() packet {
	p.src, p.dst, p.sport, p.dport = p.dst, p.src, p.dport, p.sport
	if p.proto == wire.ICMP {
		p.icmpType = layers.ICMPv4TypeEchoReply
	}
	p.macTo, p.macFrom = nil, nil
	return p
}

// with returns the packet after a change.
func (p packet) with(change func(*packet)) packet {
	change(&p)
	return p
}

func tcp(src string, sport uint16, dst string, dport uint16, flags uint8) packet {
	return packet{proto: wire.TCP, src: src, dst: dst, sport: sport, dport: dport, flags: flags, seq: 1000, ack: 2000}
}

func udp(src string, sport uint16, dst string, dport uint16) packet {
	return packet{proto: wire.UDP, src: src, dst: dst, sport: sport, dport: dport, payload: []byte("question")}
}

func ping(src string, id uint16, dst string) packet {
	return packet{
		proto: wire.ICMP, src: src, dst: dst, sport: id, icmpType: layers.ICMPv4TypeEchoRequest, payload: []byte("echo"),
	}
}

// icmpError is an error about the packet whose frame is given, quoting that much of it beyond its IP header.
func icmpError(src, dst string, kind, code uint8, frame []byte, beyond int) packet {
	header := int(frame[14]&15) * 4
	quote := append([]byte(nil), frame[14:min(len(frame), 14+header+beyond)]...)
	return packet{proto: wire.ICMP, src: src, dst: dst, icmpType: kind, icmpCode: code, quote: quote}
}

// bytes is the whole frame, with every checksum right.
func (p packet) bytes(tb testing.TB) []byte {
	tb.Helper()
	buffer := gopacket.NewSerializeBuffer()
	options := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
	if err := gopacket.SerializeLayers(buffer, options, p.layers(tb)...); err != nil {
		tb.Fatalf("build packet: %v", err)
	}
	frame := buffer.Bytes()
	if p.noSum {
		l4 := 14 + int(frame[14]&15)*4
		frame[l4+6], frame[l4+7] = 0, 0
	}
	return frame
}

func (p packet) layers(tb testing.TB) []gopacket.SerializableLayer {
	eth := &layers.Ethernet{DstMAC: p.macTo, SrcMAC: p.macFrom, EthernetType: layers.EthernetTypeIPv4}
	if eth.DstMAC == nil {
		eth.DstMAC = net.HardwareAddr{2, 0, 0, 0, 0, 1}
	}
	if eth.SrcMAC == nil {
		eth.SrcMAC = net.HardwareAddr{2, 0, 0, 0, 0, 2}
	}
	ip := &layers.IPv4{
		Version: 4, TOS: p.tos, TTL: p.ttl, Id: p.id, Protocol: layers.IPProtocol(p.proto),
		Flags: layers.IPv4Flag(p.fragment >> 13), FragOffset: p.fragment & 0x1fff,
		SrcIP: net.ParseIP(p.src).To4(), DstIP: net.ParseIP(p.dst).To4(),
	}
	if p.ttl == 0 {
		ip.TTL = 64
	}
	if p.options { // router alert
		ip.Options = []layers.IPv4Option{{OptionType: 148, OptionLength: 4, OptionData: []byte{0, 0}}}
	}
	return append([]gopacket.SerializableLayer{eth, ip}, p.content(tb, ip)...)
}

// content is what the IP header carries.
func (p packet) content(tb testing.TB, ip *layers.IPv4) []gopacket.SerializableLayer {
	payload := gopacket.Payload(p.payload)
	if p.raw || p.fragment&0x1fff != 0 {
		return []gopacket.SerializableLayer{payload}
	}
	switch p.proto {
	case wire.TCP:
		t := &layers.TCP{
			SrcPort: layers.TCPPort(p.sport), DstPort: layers.TCPPort(p.dport), Seq: p.seq, Ack: p.ack, Window: 64000,
			FIN: p.flags&fin != 0, SYN: p.flags&syn != 0, RST: p.flags&rst != 0, ACK: p.flags&ack != 0,
		}
		must(tb, t.SetNetworkLayerForChecksum(ip))
		return []gopacket.SerializableLayer{t, payload}
	case wire.UDP:
		u := &layers.UDP{SrcPort: layers.UDPPort(p.sport), DstPort: layers.UDPPort(p.dport)}
		must(tb, u.SetNetworkLayerForChecksum(ip))
		return []gopacket.SerializableLayer{u, payload}
	case wire.ICMP:
		i := &layers.ICMPv4{TypeCode: layers.CreateICMPv4TypeCode(p.icmpType, p.icmpCode), Id: p.sport + p.dport, Seq: 1}
		if p.quote != nil {
			i.Id, i.Seq, payload = 0, p.rest, p.quote
		}
		return []gopacket.SerializableLayer{i, payload}
	}
	return []gopacket.SerializableLayer{payload}
}

// arp is a question or an answer for an address.
func arp(tb testing.TB, operation uint16, sender net.HardwareAddr, from, target string) []byte {
	tb.Helper()
	buffer := gopacket.NewSerializeBuffer()
	broadcast := net.HardwareAddr{255, 255, 255, 255, 255, 255}
	err := gopacket.SerializeLayers(buffer, gopacket.SerializeOptions{},
		&layers.Ethernet{DstMAC: broadcast, SrcMAC: sender, EthernetType: layers.EthernetTypeARP},
		&layers.ARP{
			AddrType: layers.LinkTypeEthernet, Protocol: layers.EthernetTypeIPv4, HwAddressSize: 6, ProtAddressSize: 4,
			Operation: operation, SourceHwAddress: sender, SourceProtAddress: net.ParseIP(from).To4(),
			DstHwAddress: make([]byte, 6), DstProtAddress: net.ParseIP(target).To4(),
		})
	must(tb, err)
	return buffer.Bytes()
}

// setIPSum writes the right IPv4 header checksum into a frame that a test has changed by hand.
func setIPSum(frame []byte) {
	header := frame[14 : 14+int(frame[14]&15)*4]
	header[10], header[11] = 0, 0
	binary.BigEndian.PutUint16(header[10:], ^fold(sum(0, header)))
}

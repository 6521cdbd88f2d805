package prog

import (
	"encoding/binary"
	"fmt"
	"net"
	"slices"
	"strings"

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
	id       uint32
	fragment uint16 // the fragment field: more-fragments flag and offset; in IPv6 a fragment header has it
	options  bool   // a router alert: in IPv6 in a hop-by-hop header
	noSum    bool   // UDP without a checksum
	payload  []byte
	raw      bool // payload is the whole content of the IP packet

	label    uint32      // IPv6: the flow label
	chain    []extension // IPv6: the headers between the first and the content
	atomic   bool        // IPv6: a fragment header though the packet is whole
	noLength bool        // IPv6: the header says that it is 0

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
	header := ethernet
	if v, err := read(frame); err == nil {
		header += v.header
	}
	quote := append([]byte(nil), frame[ethernet:min(len(frame), header+beyond)]...)
	return packet{proto: wire.ICMP, src: src, dst: dst, icmpType: kind, icmpCode: code, quote: quote}
}

// ethernet is the length of an Ethernet header.
const ethernet = 14

// extension is an extension header of IPv6 (RFC 8200, section 4) with what follows its first two bytes, a multiple of
// eight long with them.
type extension struct {
	next wire.Protocol // its number
	body []byte
}

// The numbers of extension headers.
const (
	hopByHop      = wire.Protocol(0)
	routing       = wire.Protocol(43)
	fragmentation = wire.Protocol(44)
	noNext        = wire.Protocol(59)
	toDest        = wire.Protocol(60)
	mobility      = wire.Protocol(135)
)

// padded is an extension header of eight bytes that says nothing.
func padded(next wire.Protocol) extension { return extension{next, []byte{1, 4, 0, 0, 0, 0}} }

// jumbo is the option that says how long the packet is behind its header (RFC 2675).
func jumbo(size uint32) extension {
	return extension{hopByHop, binary.BigEndian.AppendUint32([]byte{194, 4}, size)}
}

// extensions are all headers between the first and the content.
func (p packet) extensions() []extension {
	var all []extension
	if p.options {
		all = append(all, extension{hopByHop, []byte{5, 2, 0, 0, 1, 0}}) // RFC 2711
	}
	all = append(all, p.chain...)
	if p.fragment != 0 || p.atomic {
		field := p.fragment << 3
		if p.fragment&moreFragments != 0 {
			field |= 1
		}
		body := binary.BigEndian.AppendUint16(nil, field)
		all = append(all, extension{fragmentation, binary.BigEndian.AppendUint32(body, p.id)})
	}
	return all
}

// inFamily is the packet with what its names stand for.
func (p packet) inFamily(f family) packet {
	p.src, p.dst = f.ip(p.src).String(), f.ip(p.dst).String()
	if p.proto == wire.ICMP && !p.raw {
		k := f.kind(kind{p.icmpType, p.icmpCode})
		p.icmpType, p.icmpCode = k[0], k[1]
	}
	p.proto = f.proto(p.proto)
	return p
}

// bytes is the whole frame in a family, with every checksum right.
func (p packet) bytes(f family) []byte {
	p = p.inFamily(f)
	eth := &layers.Ethernet{DstMAC: p.macTo, SrcMAC: p.macFrom, EthernetType: layers.EthernetTypeIPv4}
	if eth.DstMAC == nil {
		eth.DstMAC = net.HardwareAddr{2, 0, 0, 0, 0, 1}
	}
	if eth.SrcMAC == nil {
		eth.SrcMAC = net.HardwareAddr{2, 0, 0, 0, 0, 2}
	}
	if p.ttl == 0 {
		p.ttl = 64
	}
	if strings.Contains(p.dst, ":") {
		eth.EthernetType = layers.EthernetTypeIPv6
		return serialised(eth, gopacket.Payload(p.bytesIPv6()))
	}
	ip := &layers.IPv4{
		Version: 4, TOS: p.tos, TTL: p.ttl, Id: uint16(p.id), Protocol: layers.IPProtocol(p.proto),
		Flags: layers.IPv4Flag(p.fragment >> 13), FragOffset: p.fragment & 0x1fff,
		SrcIP: net.ParseIP(p.src).To4(), DstIP: net.ParseIP(p.dst).To4(),
	}
	if p.options { // router alert
		ip.Options = []layers.IPv4Option{{OptionType: 148, OptionLength: 4, OptionData: []byte{0, 0}}}
	}
	return serialised(eth, ip, gopacket.Payload(p.content(ip)))
}

// bytesIPv6 is the IP packet: the header, its extensions, the content.
func (p packet) bytesIPv6() []byte {
	ip := &layers.IPv6{SrcIP: net.ParseIP(p.src), DstIP: net.ParseIP(p.dst)}
	content := p.content(ip)
	next := p.proto
	for _, e := range slices.Backward(p.extensions()) {
		size := byte((len(e.body)+2)/8 - 1)
		if e.next == fragmentation {
			size = 0 // reserved
		}
		content = slices.Concat([]byte{byte(next), size}, e.body, content)
		next = e.next
	}
	header := binary.BigEndian.AppendUint32(nil, 6<<28|uint32(p.tos)<<20|p.label)
	length := len(content)
	if p.noLength {
		length = 0
	}
	header = binary.BigEndian.AppendUint16(header, uint16(length))
	return slices.Concat(header, []byte{byte(next), p.ttl}, ip.SrcIP, ip.DstIP, content)
}

func serialised(all ...gopacket.SerializableLayer) []byte {
	buffer := gopacket.NewSerializeBuffer()
	if err := gopacket.SerializeLayers(buffer, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, all...); err != nil {
		panic(fmt.Sprintf("build packet: %v", err))
	}
	return buffer.Bytes()
}

// content is what the IP header and its extensions carry.
func (p packet) content(ip gopacket.NetworkLayer) []byte {
	payload := gopacket.Payload(p.payload)
	if p.raw || p.fragment&0x1fff != 0 {
		return p.payload
	}
	switch p.proto {
	case wire.TCP:
		t := &layers.TCP{
			SrcPort: layers.TCPPort(p.sport), DstPort: layers.TCPPort(p.dport), Seq: p.seq, Ack: p.ack, Window: 64000,
			FIN: p.flags&fin != 0, SYN: p.flags&syn != 0, RST: p.flags&rst != 0, ACK: p.flags&ack != 0,
		}
		_ = t.SetNetworkLayerForChecksum(ip)
		return serialised(t, payload)
	case wire.UDP:
		u := &layers.UDP{SrcPort: layers.UDPPort(p.sport), DstPort: layers.UDPPort(p.dport)}
		_ = u.SetNetworkLayerForChecksum(ip)
		datagram := serialised(u, payload)
		if p.noSum {
			datagram[6], datagram[7] = 0, 0
		}
		return datagram
	case wire.ICMP:
		i := &layers.ICMPv4{TypeCode: layers.CreateICMPv4TypeCode(p.icmpType, p.icmpCode), Id: p.sport + p.dport, Seq: 1}
		if p.quote != nil {
			i.Id, i.Seq, payload = 0, p.rest, p.quote
		}
		return serialised(i, payload)
	case icmpv6:
		i := &layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(p.icmpType, p.icmpCode)}
		_ = i.SetNetworkLayerForChecksum(ip)
		word := [4]byte{byte((p.sport + p.dport) >> 8), byte(p.sport + p.dport), 0, 1}
		if p.quote != nil {
			word, payload = [4]byte{2: byte(p.rest >> 8), 3: byte(p.rest)}, p.quote
		}
		return serialised(i, slices.Concat(word[:], payload))
	}
	return p.payload
}

// arp is a question or an answer for an address of IPv4.
func arp(operation uint16, sender net.HardwareAddr, from, target string) []byte {
	broadcast := net.HardwareAddr{255, 255, 255, 255, 255, 255}
	return serialised(
		&layers.Ethernet{DstMAC: broadcast, SrcMAC: sender, EthernetType: layers.EthernetTypeARP},
		&layers.ARP{
			AddrType: layers.LinkTypeEthernet, Protocol: layers.EthernetTypeIPv4, HwAddressSize: 6, ProtAddressSize: 4,
			Operation: operation, SourceHwAddress: sender, SourceProtAddress: net.ParseIP(from).To4(),
			DstHwAddress: make([]byte, 6), DstProtAddress: net.ParseIP(target).To4(),
		})
}

// setIPSum writes the right header checksum into a frame that a test has changed by hand; IPv6 has none.
func setIPSum(frame []byte) {
	if frame[14]>>4 == 6 {
		return
	}
	header := frame[14 : 14+int(frame[14]&15)*4]
	header[10], header[11] = 0, 0
	binary.BigEndian.PutUint16(header[10:], ^fold(sum(0, header)))
}

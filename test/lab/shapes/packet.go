package shapes

import (
	"encoding/binary"
	"hash/crc32"
	"net/netip"

	"golang.org/x/sys/unix"
)

// packet is an IP packet that is written by hand.
type packet struct {
	from, to netip.Addr
	protocol uint8
	hops     uint8 // 64 if it is 0
	// options are those of IPv4's header, or the extension headers of IPv6 with the number of the first one.
	options []byte
	first   uint8
	body    []byte
	// pieces are where the body is cut, in the order in which the pieces are sent; nil for one that is whole.
	pieces [][2]int
	id     uint16 // of the pieces
}

// bytes are what is sent, a packet or its pieces.
func (p packet) bytes() (all [][]byte) {
	if p.pieces == nil {
		return [][]byte{p.header(p.body, nil)}
	}
	for _, piece := range p.pieces {
		more := 0
		if piece[1] < len(p.body) {
			more = 1
		}
		all = append(all, p.header(p.body[piece[0]:piece[1]], &[2]int{piece[0], more}))
	}
	return all
}

func (p packet) header(body []byte, fragment *[2]int) []byte {
	hops := p.hops
	if hops == 0 {
		hops = 64
	}
	if p.to.Is4() {
		h := make([]byte, 20, 20+len(p.options)+len(body))
		h[0], h[8], h[9] = 0x45+byte(len(p.options)/4), hops, p.protocol
		if fragment != nil {
			binary.BigEndian.PutUint16(h[4:], p.id)
			binary.BigEndian.PutUint16(h[6:], uint16(fragment[0]/8|fragment[1]<<13))
		}
		copy(h[12:], p.from.AsSlice())
		copy(h[16:], p.to.AsSlice())
		return append(append(h, p.options...), body...) // the kernel writes length and checksum
	}
	next, extensions := p.protocol, p.options
	if len(p.options) > 0 {
		next = p.first
	}
	if fragment != nil {
		next, extensions = unix.IPPROTO_FRAGMENT, make([]byte, 8)
		extensions[0] = p.protocol
		binary.BigEndian.PutUint16(extensions[2:], uint16(fragment[0]|fragment[1]))
		binary.BigEndian.PutUint32(extensions[4:], uint32(p.id))
	}
	h := make([]byte, 40, 40+len(extensions)+len(body))
	h[0], h[6], h[7] = 0x60, next, hops
	binary.BigEndian.PutUint16(h[4:], uint16(len(extensions)+len(body)))
	copy(h[8:], p.from.AsSlice())
	copy(h[24:], p.to.AsSlice())
	return append(append(h, extensions...), body...)
}

// udpHeader is the length of UDP's header, udpSum where its checksum is.
const udpHeader, udpSum = 8, 6

// datagram is the body of a UDP packet.
func datagram(from, to netip.AddrPort, payload []byte) []byte {
	d := binary.BigEndian.AppendUint16(nil, from.Port())
	d = binary.BigEndian.AppendUint16(d, to.Port())
	d = binary.BigEndian.AppendUint16(d, uint16(udpHeader+len(payload)))
	d = append(append(d, 0, 0), payload...)
	binary.BigEndian.PutUint16(d[udpSum:], ^sum(from.Addr(), to.Addr(), unix.IPPROTO_UDP, d))
	return d
}

// sum is the ones' complement sum of a transport packet and its pseudo header; all ones where its checksum is right.
func sum(from, to netip.Addr, protocol uint8, body []byte) uint16 {
	all := append(from.AsSlice(), to.AsSlice()...)
	all = binary.BigEndian.AppendUint32(all, uint32(len(body)))
	return onesSum(append(append(all, 0, 0, 0, protocol), body...))
}

func onesSum(all []byte) uint16 {
	total := uint32(0)
	for i, b := range all {
		total += uint32(b) << (8 * (1 - i%2))
		total = total>>16 + total&0xffff
	}
	return uint16(total)
}

// The bodies of other protocols' packets, well formed enough for connection tracking.

// sctpInit asks for an association: an INIT with one parameter that nobody knows.
func sctpInit(from, to uint16, payload []byte) []byte {
	for len(payload)%4 != 0 {
		payload = append(payload, 0)
	}
	s := binary.BigEndian.AppendUint16(nil, from)
	s = append(binary.BigEndian.AppendUint16(s, to), 0, 0, 0, 0, 0, 0, 0, 0)
	s = append(s, 1, 0, 0, byte(24+len(payload)), 1, 1, 1, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1)
	s = append(append(s, 0xc0, 1, 0, byte(4+len(payload))), payload...)
	binary.LittleEndian.PutUint32(s[sctpSum:], crc(s))
	return s
}

// sctpSum is where the checksum is, crc what it is where there is none yet.
const sctpSum = 8

func crc(packet []byte) uint32 { return crc32.Checksum(packet, crc32.MakeTable(crc32.Castagnoli)) }

// gre carries what its header says is of an experimental EtherType.
func gre(payload []byte) []byte { return append([]byte{0, 0, 0x88, 0xb5}, payload...) }

// esp has an SPI of nobody's and the first sequence number.
func esp(payload []byte) []byte { return append([]byte{0, 0, 0x77, 0x77, 0, 0, 0, 1}, payload...) }

// within carries the payload in a packet between addresses of documentation.
func within(from, to string) func([]byte) []byte {
	return func(payload []byte) []byte {
		p := packet{from: netip.MustParseAddr(from), to: netip.MustParseAddr(to), protocol: experimental, body: payload}
		inner := p.bytes()[0]
		if p.to.Is4() {
			binary.BigEndian.PutUint16(inner[2:], uint16(len(inner)))
			binary.BigEndian.PutUint16(inner[10:], ^onesSum(inner[:20]))
		}
		return inner
	}
}

// experimental is a protocol for experiments (RFC 3692).
const experimental = 253

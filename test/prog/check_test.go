package prog

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// view is a frame read back: what the checks compare. Addresses and protocol are the story's names for them.
type view struct {
	family
	ip           []byte // the IP packet, as long as its header says
	header       int    // in IPv6 with the extension headers
	l4           []byte
	proto        wire.Protocol
	src, dst     string
	sport, dport uint16 // ICMP echo: as in packet
	later        bool   // a fragment without transport header
	fragment     bool
	at           uint16 // where the fragment belongs, in bytes
	id           uint32 // of the fragments of one packet
	ttl          uint8
	extensions   int // how many extension headers there are
}

// read looks into a frame without trusting anything in it.
func read(frame []byte) (view, error) {
	if len(frame) < 34 || !slices.Contains([]uint16{0x0800, 0x86dd}, binary.BigEndian.Uint16(frame[12:])) {
		return view{}, fmt.Errorf("no IP packet: % x", frame)
	}
	f := inIPv4
	if frame[12] != 8 {
		f = inIPv6
	}
	return readIP(f, frame[ethernet:], false)
}

// readIP reads an IP packet; a quoted one may be cut off.
func readIP(f family, ip []byte, cut bool) (view, error) {
	v := view{family: f}
	readHeader := v.readIPv4
	if f == inIPv6 {
		readHeader = v.readIPv6
	}
	if err := readHeader(ip, cut); err != nil {
		return view{}, err
	}
	v.l4 = v.ip[v.header:]
	if v.later || len(v.l4) < 8 {
		return v, nil
	}
	switch {
	case v.proto == wire.TCP || v.proto == wire.UDP:
		v.sport, v.dport = binary.BigEndian.Uint16(v.l4), binary.BigEndian.Uint16(v.l4[2:])
	case v.proto == wire.ICMP && v.l4[0] == f.kind(echoRequest)[0]:
		v.sport = binary.BigEndian.Uint16(v.l4[4:])
	case v.proto == wire.ICMP && v.l4[0] == f.kind(echoReply)[0]:
		v.dport = binary.BigEndian.Uint16(v.l4[4:])
	}
	return v, nil
}

func (v *view) readIPv4(ip []byte, cut bool) error {
	total := int(binary.BigEndian.Uint16(ip[2:]))
	if cut {
		total = min(total, len(ip))
	}
	v.header = int(ip[0]&15) * 4
	if ip[0]>>4 != 4 || v.header < 20 || total < v.header || total > len(ip) {
		return fmt.Errorf("malformed IPv4 packet: % x", ip)
	}
	v.ip, v.proto, v.ttl = ip[:total], wire.Protocol(ip[9]), ip[8]
	v.src, v.dst = nameOf(netip.AddrFrom4([4]byte(ip[12:16]))), nameOf(netip.AddrFrom4([4]byte(ip[16:20])))
	field := binary.BigEndian.Uint16(ip[6:])
	v.at, v.id = field<<3, uint32(binary.BigEndian.Uint16(ip[4:]))
	v.later, v.fragment = field&0x1fff != 0, field&0x3fff != 0
	return nil
}

func (v *view) readIPv6(ip []byte, cut bool) error {
	if len(ip) < 40 || ip[0]>>4 != 6 {
		return fmt.Errorf("malformed IPv6 packet: % x", ip)
	}
	total := 40 + int(binary.BigEndian.Uint16(ip[4:]))
	if cut {
		total = min(total, len(ip))
	}
	if total > len(ip) || mapped(ip[8:]) || mapped(ip[24:]) {
		return fmt.Errorf("malformed IPv6 packet: % x", ip)
	}
	v.ip, v.ttl, v.header = ip[:total], ip[7], 40
	v.src, v.dst = nameOf(netip.AddrFrom16([16]byte(ip[8:24]))), nameOf(netip.AddrFrom16([16]byte(ip[24:40])))
	return v.readExtensions(wire.Protocol(ip[6]))
}

// mapped says whether an address is one of IPv4's, which no packet of IPv6 has.
func mapped(address []byte) bool { return netip.AddrFrom16([16]byte(address)).Is4In6() }

// readExtensions goes along the chain of headers of IPv6.
func (v *view) readExtensions(next wire.Protocol) error {
	for ; isExtension(next) && !v.later; v.extensions++ {
		rest := v.ip[v.header:]
		if next == hopByHop && v.extensions > 0 || next == fragmentation && v.fragment {
			return fmt.Errorf("IPv6 extension headers in a wrong order: % x", v.ip)
		}
		if len(rest) < 8 {
			return fmt.Errorf("IPv6 packet ends in its extension headers: % x", v.ip)
		}
		size := 8 + int(rest[1])*8
		if next == fragmentation {
			size = 8
			field := binary.BigEndian.Uint16(rest[2:])
			v.at, v.id = field&^7, binary.BigEndian.Uint32(rest[4:])
			v.later, v.fragment = field&^7 != 0, field&^6 != 0
		}
		if len(rest) < size {
			return fmt.Errorf("IPv6 packet ends in its extension headers: % x", v.ip)
		}
		v.header += size
		next = wire.Protocol(rest[0])
	}
	v.proto = v.protoName(next)
	return nil
}

// isExtension says whether a packet goes on behind a header of this number.
func isExtension(next wire.Protocol) bool {
	return slices.Contains([]wire.Protocol{hopByHop, routing, fragmentation, toDest, mobility}, next)
}

// total is how long the packet is by its header, of which a quoted one may lack the end.
func (v view) total() int {
	return each(v.family, 0, 40) + int(binary.BigEndian.Uint16(v.ip[each(v.family, 2, 4):]))
}

// String is the flow, such as "tcp 10.244.1.10:50000 > 198.51.100.7:80".
func (v view) String() string {
	return fmt.Sprintf("%v %s:%d > %s:%d", v.proto, v.src, v.sport, v.dst, v.dport)
}

// quoted is the packet inside an ICMP error.
func (v view) quoted() (view, error) {
	if v.proto != wire.ICMP || v.later || len(v.l4) < 8+v.family.header()+8 || !v.isError(v.l4[0]) {
		return view{}, fmt.Errorf("no ICMP error: % x", v.ip)
	}
	inner, err := readIP(v.family, v.l4[8:], true)
	if err == nil && len(inner.l4) < 8 && !inner.later {
		return view{}, fmt.Errorf("the error quotes too little: % x", v.ip)
	}
	return inner, err
}

func sum(s uint32, b []byte) uint32 {
	for i := 0; i+1 < len(b); i += 2 {
		s += uint32(b[i])<<8 | uint32(b[i+1])
	}
	if len(b)%2 == 1 {
		s += uint32(b[len(b)-1]) << 8
	}
	return s
}

func fold(s uint32) uint16 {
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}

// residue is what a ones' complement sum over covered bytes and their checksum comes to, with the two forms of zero as
// one. It is zero when the checksum is right, and a rewriting that keeps checksums right leaves it as it was, right or wrong.
func residue(s uint32) uint16 {
	return fold(s) % 0xffff
}

// residues of a packet: of its IP header, of its transport with the pseudo header, and of both of a quoted packet. A
// transport checksum that is not there, or that the packet does not wholly hold, is nil.
type residues struct {
	Family             wire.Family
	IP, InnerIP        uint16
	Transport, InnerL4 any
}

func (v view) residues() residues {
	r := residues{Family: v.Family, IP: v.headerResidue()}
	if v.later {
		return r
	}
	r.Transport = v.transportResidue()
	inner, err := v.quoted()
	if err != nil {
		return r
	}
	r.InnerIP = inner.headerResidue()
	if !inner.later {
		r.InnerL4 = inner.transportResidue()
	}
	return r
}

// headerResidue is 0 in IPv6, whose header has no checksum.
func (v view) headerResidue() uint16 {
	if v.family == inIPv6 {
		return 0
	}
	return residue(sum(0, v.ip[:v.header]))
}

func (v view) transportResidue() any {
	from, to := each(v.family, 12, 8), each(v.family, 20, 40)
	pseudo := sum(uint32(v.family.proto(v.proto))+uint32(len(v.l4)), v.ip[from:to])
	switch {
	case v.proto == wire.TCP && len(v.l4) >= 18:
		return residue(sum(pseudo, v.l4))
	case v.proto == wire.UDP && len(v.l4) >= 8:
		if v.l4[6] == 0 && v.l4[7] == 0 {
			return "no checksum"
		}
		return residue(sum(pseudo, v.l4))
	case v.proto == wire.ICMP && len(v.l4) >= 8:
		return residue(sum(each(v.family, 0, pseudo), v.l4))
	}
	return nil
}

// sumsKept says how a run has broken a checksum.
func sumsKept(in, out []byte) error {
	before, err := read(in)
	if err != nil {
		return nil // nothing of ours to keep
	}
	after, err := read(out)
	if err != nil {
		return err
	}
	if b, a := before.residues(), after.residues(); b != a {
		return fmt.Errorf("checksums: residues were %v, are %v", b, a)
	}
	return nil
}

// sumsValid has gopacket look at every checksum of a whole packet.
func sumsValid(frame []byte) error {
	p := gopacket.NewPacket(frame, layers.LayerTypeEthernet, gopacket.Default)
	for _, l := range p.Layers() {
		if l4, ok := l.(interface {
			SetNetworkLayerForChecksum(gopacket.NetworkLayer) error
		}); ok {
			if err := l4.SetNetworkLayerForChecksum(p.NetworkLayer()); err != nil {
				return err
			}
		}
	}
	err, wrong := p.VerifyChecksums()
	if err != nil {
		return err
	}
	if len(wrong) > 0 {
		return fmt.Errorf("wrong checksums: %v", wrong)
	}
	return nil
}

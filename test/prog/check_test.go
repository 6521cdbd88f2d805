package prog

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// view is a frame read back: what the checks compare.
type view struct {
	ip           []byte // the IP packet, as long as its header says
	header       int
	l4           []byte
	proto        wire.Protocol
	src, dst     string
	sport, dport uint16 // ICMP echo: as in packet
	later        bool   // a fragment without transport header
	fragment     bool
	ttl          uint8
}

// read looks into a frame without trusting anything in it.
func read(frame []byte) (view, error) {
	if len(frame) < 34 || binary.BigEndian.Uint16(frame[12:]) != 0x0800 {
		return view{}, fmt.Errorf("no IPv4 packet: % x", frame)
	}
	return readIP(frame[14:], false)
}

// readIP reads an IP packet; a quoted one may be cut off.
func readIP(ip []byte, cut bool) (view, error) {
	v := view{header: int(ip[0]&15) * 4, proto: wire.Protocol(ip[9]), ttl: ip[8]}
	total := int(binary.BigEndian.Uint16(ip[2:]))
	if cut {
		total = min(total, len(ip))
	}
	if ip[0]>>4 != 4 || v.header < 20 || total < v.header || total > len(ip) {
		return view{}, fmt.Errorf("malformed IPv4 packet: % x", ip)
	}
	v.ip, v.l4 = ip[:total], ip[v.header:total]
	v.src, v.dst = netip.AddrFrom4([4]byte(ip[12:16])).String(), netip.AddrFrom4([4]byte(ip[16:20])).String()
	field := binary.BigEndian.Uint16(ip[6:])
	v.later, v.fragment = field&0x1fff != 0, field&0x3fff != 0
	if v.later || len(v.l4) < 8 {
		return v, nil
	}
	switch {
	case v.proto == wire.TCP || v.proto == wire.UDP:
		v.sport, v.dport = binary.BigEndian.Uint16(v.l4), binary.BigEndian.Uint16(v.l4[2:])
	case v.proto == wire.ICMP && v.l4[0] == layers.ICMPv4TypeEchoRequest:
		v.sport = binary.BigEndian.Uint16(v.l4[4:])
	case v.proto == wire.ICMP && v.l4[0] == layers.ICMPv4TypeEchoReply:
		v.dport = binary.BigEndian.Uint16(v.l4[4:])
	}
	return v, nil
}

// String is the flow, such as "tcp 10.244.1.10:50000 > 198.51.100.7:80".
func (v view) String() string {
	return fmt.Sprintf("%v %s:%d > %s:%d", v.proto, v.src, v.sport, v.dst, v.dport)
}

// isError says whether it is an ICMP error, with a quoted packet of that much beyond its header.
func (v view) isError(beyond int) bool {
	if v.proto != wire.ICMP || v.later || len(v.l4) < 8+20+beyond {
		return false
	}
	switch v.l4[0] {
	case 3, 4, 5, 11, 12:
		return v.l4[8]>>4 == 4 && len(v.l4) >= 8+int(v.l4[8]&15)*4+beyond
	}
	return false
}

// quoted is the packet inside an ICMP error.
func (v view) quoted() (view, error) {
	if !v.isError(8) {
		return view{}, fmt.Errorf("no ICMP error: % x", v.ip)
	}
	return readIP(v.l4[8:], true)
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
	IP, InnerIP        uint16
	Transport, InnerL4 any
}

func (v view) residues() residues {
	r := residues{IP: residue(sum(0, v.ip[:v.header]))}
	if v.later {
		return r
	}
	r.Transport = v.transportResidue()
	inner, err := v.quoted()
	if err != nil {
		return r
	}
	r.InnerIP = residue(sum(0, inner.ip[:inner.header]))
	if !inner.later {
		r.InnerL4 = inner.transportResidue()
	}
	return r
}

func (v view) transportResidue() any {
	pseudo := sum(uint32(v.proto)+uint32(len(v.l4)), v.ip[12:20])
	switch {
	case v.proto == wire.TCP && len(v.l4) >= 18:
		return residue(sum(pseudo, v.l4))
	case v.proto == wire.UDP && len(v.l4) >= 8:
		if v.l4[6] == 0 && v.l4[7] == 0 {
			return "no checksum"
		}
		return residue(sum(pseudo, v.l4))
	case v.proto == wire.ICMP && len(v.l4) >= 8:
		return residue(sum(0, v.l4))
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
	if l4, ok := p.TransportLayer().(interface {
		SetNetworkLayerForChecksum(gopacket.NetworkLayer) error
	}); ok {
		if err := l4.SetNetworkLayerForChecksum(p.NetworkLayer()); err != nil {
			return err
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

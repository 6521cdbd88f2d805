package lab

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// ICMPKind is the type and the code of an ICMP error.
type ICMPKind struct {
	Type, Code uint8
}

// What errors there are, as each family says it.
var (
	TooBig          = [wire.Families]ICMPKind{wire.IPv4: {3, 4}, wire.IPv6: {2, 0}}
	TimeExceeded    = [wire.Families]ICMPKind{wire.IPv4: {11, 0}, wire.IPv6: {3, 0}}
	HostUnreachable = [wire.Families]ICMPKind{wire.IPv4: {3, 1}, wire.IPv6: {1, 3}}
	// RouteUnreachable is how a route of that type answers: in IPv6 that there is no route.
	RouteUnreachable = [wire.Families]ICMPKind{wire.IPv4: {3, 1}, wire.IPv6: {1, 0}}
	PortUnreachable  = [wire.Families]ICMPKind{wire.IPv4: {3, 3}, wire.IPv6: {1, 4}}
)

const icmpHeader = 8

// icmp is how a family has the messages of ICMP, and its raw sockets.
type icmp struct {
	network, anyAddr string
	number           uint8 // in the IP header
	echo, reply      uint8
	errors           []uint8
	mtu              func(header []byte) int    // of an error
	message          func(packet []byte) []byte // of what a raw socket receives; nil where there is none
	checksum         bool                       // whether it is ours to compute; IPv6's covers addresses, and is the kernel's

	level, sendTTL, wantTTL, receivedTTL int
	dontFragment                         [][2]int // socket options with their values
}

var icmps = [wire.Families]icmp{
	wire.IPv4: {
		network: "ip4:icmp", anyAddr: "0.0.0.0", number: unix.IPPROTO_ICMP, echo: 8, reply: 0, errors: []uint8{3, 11},
		mtu:      func(header []byte) int { return int(binary.BigEndian.Uint16(header[6:])) },
		message:  func(packet []byte) []byte { ip, _ := parseIP(packet); return ip.payload },
		checksum: true,
		level:    unix.IPPROTO_IP, sendTTL: unix.IP_TTL, wantTTL: unix.IP_RECVTTL, receivedTTL: unix.IP_TTL,
		dontFragment: [][2]int{{unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE}},
	},
	wire.IPv6: {
		network: "ip6:ipv6-icmp", anyAddr: "::", number: unix.IPPROTO_ICMPV6, echo: 128, reply: 129, errors: []uint8{1, 2, 3},
		mtu:     func(header []byte) int { return int(binary.BigEndian.Uint32(header[4:])) },
		message: func(packet []byte) []byte { return packet },
		level:   unix.IPPROTO_IPV6, sendTTL: unix.IPV6_UNICAST_HOPS, wantTTL: unix.IPV6_RECVHOPLIMIT, receivedTTL: unix.IPV6_HOPLIMIT,
		dontFragment: [][2]int{{unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE}, {unix.IPV6_DONTFRAG, 1}},
	},
}

// set prepares a raw socket.
func (p *icmp) set(raw syscall.RawConn, o PingOptions) error {
	options := [][2]int{{p.wantTTL, 1}}
	if o.TTL != 0 {
		options = append(options, [2]int{p.sendTTL, o.TTL})
	}
	if o.DontFragment {
		options = append(options, p.dontFragment...)
	}
	var optErr error
	err := raw.Control(func(fd uintptr) {
		for _, option := range options {
			optErr = errors.Join(optErr, unix.SetsockoptInt(int(fd), p.level, option[0], option[1]))
		}
	})
	return errors.Join(err, optErr)
}

// ttlOf finds in what was received beside a packet how many hops it had left; 0 where that is not said.
func (p *icmp) ttlOf(control []byte) int {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return 0
	}
	for _, m := range messages {
		if int(m.Header.Level) == p.level && int(m.Header.Type) == p.receivedTTL && len(m.Data) >= 4 {
			return int(binary.NativeEndian.Uint32(m.Data))
		}
	}
	return 0
}

// request is an ICMP echo request with an id, and a payload, that no other has.
func (p *icmp) request(size int) []byte {
	if size == 0 {
		size = 56
	}
	packet := make([]byte, icmpHeader+size)
	_, _ = rand.Read(packet[4:]) // never fails
	packet[0] = p.echo
	if p.checksum {
		binary.BigEndian.PutUint16(packet[2:], checksum(packet))
	}
	return packet
}

// judge says whether a received ICMP message answers the request. Every raw socket sees every message of its namespace.
func (p *icmp) judge(request, got []byte, from netip.Addr) (bool, error) {
	if len(got) < icmpHeader {
		return false, nil
	}
	if p.checksum && checksum(got) != 0 {
		return false, fmt.Errorf("ICMP type %d from %s has a wrong checksum", got[0], from)
	}
	switch {
	case got[0] == p.reply:
		if !bytes.Equal(got[4:icmpHeader], request[4:icmpHeader]) {
			return false, nil
		}
		if !bytes.Equal(got[icmpHeader:], request[icmpHeader:]) {
			return false, errors.New("other bytes came back than were sent")
		}
		return true, nil
	case slices.Contains(p.errors, got[0]):
		return false, p.complaint(request, got, from)
	}
	return false, nil
}

// complaint is the error for an ICMP error message about the request, nil for one about something else.
func (p *icmp) complaint(request, got []byte, from netip.Addr) error {
	quoted, ok := parseIP(got[icmpHeader:])
	if !ok || quoted.protocol != p.number || len(quoted.payload) < icmpHeader || !bytes.Equal(quoted.payload[4:icmpHeader], request[4:icmpHeader]) {
		return nil
	}
	return &ICMPError{
		From: from, ICMPKind: ICMPKind{got[0], got[1]}, MTU: p.mtu(got),
		InnerSource: quoted.source, InnerDestination: quoted.destination,
	}
}

// ipPacket is what the lab reads of a packet.
type ipPacket struct {
	source, destination netip.Addr
	protocol            uint8
	payload             []byte
}

// parseIP reads a packet of either family; false where there is no whole header. Of IPv6's extension headers it knows
// the one that the kernel writes by itself, a fragment's.
func parseIP(packet []byte) (p ipPacket, ok bool) {
	const shortest, fixed, fragment = 20, 40, 8
	if len(packet) < shortest {
		return p, false
	}
	switch length := int(packet[0]&0xf) * 4; {
	case packet[0]>>4 == 4 && length >= shortest && length <= len(packet):
		return ipPacket{
			source: netip.AddrFrom4([4]byte(packet[12:16])), destination: netip.AddrFrom4([4]byte(packet[16:20])),
			protocol: packet[9], payload: packet[length:],
		}, true
	case packet[0]>>4 == 6 && len(packet) >= fixed:
		p = ipPacket{
			source: netip.AddrFrom16([16]byte(packet[8:24])), destination: netip.AddrFrom16([16]byte(packet[24:40])),
			protocol: packet[6], payload: packet[fixed:],
		}
		if p.protocol == unix.IPPROTO_FRAGMENT && len(p.payload) >= fragment {
			p.protocol, p.payload = p.payload[0], p.payload[fragment:]
		}
		return p, true
	}
	return p, false
}

// checksum is the internet checksum; 0 over a message that contains a right one.
func checksum(message []byte) uint16 {
	var sum uint32
	for ; len(message) > 1; message = message[2:] {
		sum += uint32(binary.BigEndian.Uint16(message))
	}
	if len(message) == 1 {
		sum += uint32(message[0]) << 8
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

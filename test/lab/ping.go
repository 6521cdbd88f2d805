package lab

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	icmpEchoReply   = 0
	icmpUnreachable = 3
	icmpEcho        = 8
	icmpTimeOver    = 11
	icmpHeader      = 8
)

// PingOptions vary an echo request. The zero value is an ordinary one.
type PingOptions struct {
	// Size of the payload in bytes; default 56.
	Size int
	// TTL; default the system's.
	TTL int
	// DontFragment sends with DF set whatever the size, and ignores what path MTU discovery has found.
	DontFragment bool
}

// PingReply is what came back.
type PingReply struct {
	From netip.Addr
	RTT  time.Duration
	// TTL of the reply, or of the error, when it arrived.
	TTL int
}

// ICMPError is an ICMP error that came back in place of an echo.
type ICMPError struct {
	From       netip.Addr
	Type, Code uint8
	// MTU is the next hop's, in "fragmentation needed".
	MTU int
	// InnerSource and InnerDestination are the addresses of the packet that it complains about, as quoted.
	InnerSource, InnerDestination netip.Addr
}

// Error implements error.
func (e *ICMPError) Error() string {
	return fmt.Sprintf("ICMP type %d code %d from %s (MTU %d, about %s > %s)", e.Type, e.Code, e.From, e.MTU, e.InnerSource, e.InnerDestination)
}

// Ping sends one ICMP echo request and waits for the reply, whose payload is compared. An ICMP error that answers it
// is returned as *ICMPError.
func (ns *Namespace) Ping(ctx context.Context, to netip.Addr, opts PingOptions) (reply PingReply, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("ping from %s to %s: %w", ns.name, to, err)
		}
	}()
	conn, err := ns.openICMP(opts)
	if err != nil {
		return reply, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(deadlineOf(ctx)); err != nil {
		return reply, err
	}
	request := echoRequest(opts.Size)
	started := time.Now()
	if _, err := conn.WriteTo(request, &net.IPAddr{IP: to.AsSlice()}); err != nil {
		return reply, err
	}
	packet := make([]byte, 1<<16)
	for {
		n, err := conn.Read(packet)
		if err != nil {
			return reply, err
		}
		ip, message := splitIPv4(packet[:n])
		if message == nil {
			continue
		}
		from := netip.AddrFrom4([4]byte(ip[12:16]))
		done, err := judge(request, message, from)
		if err != nil {
			return reply, err
		}
		if done {
			return PingReply{From: from, RTT: time.Since(started), TTL: int(ip[8])}, nil
		}
	}
}

// splitIPv4 separates header and payload; the payload is nil where there is no whole header.
func splitIPv4(packet []byte) (header, payload []byte) {
	const shortest = 20
	if len(packet) < shortest || packet[0]>>4 != 4 {
		return nil, nil
	}
	length := int(packet[0]&0xf) * 4
	if length < shortest || length > len(packet) {
		return nil, nil
	}
	return packet[:length], packet[length:]
}

// openICMP opens a raw socket: those see ICMP errors as well, and do not depend on who may use ping sockets.
func (ns *Namespace) openICMP(opts PingOptions) (*net.IPConn, error) {
	var conn *net.IPConn
	err := ns.Do(func() (err error) {
		config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
			return opts.apply(raw)
		}}
		packets, err := config.ListenPacket(context.Background(), "ip4:icmp", "0.0.0.0")
		if err != nil {
			return err
		}
		conn = packets.(*net.IPConn)
		return nil
	})
	return conn, err
}

func (o PingOptions) apply(raw syscall.RawConn) error {
	var optErr error
	err := raw.Control(func(fd uintptr) {
		set := func(option, value int) {
			optErr = errors.Join(optErr, unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, option, value))
		}
		if o.TTL != 0 {
			set(unix.IP_TTL, o.TTL)
		}
		if o.DontFragment {
			set(unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE)
		}
	})
	return errors.Join(err, optErr)
}

// echoRequest is an ICMP echo request with an id, and a payload, that no other has.
func echoRequest(size int) []byte {
	if size == 0 {
		size = 56
	}
	packet := make([]byte, icmpHeader+size)
	_, _ = rand.Read(packet[4:]) // never fails
	packet[0] = icmpEcho
	binary.BigEndian.PutUint16(packet[2:], checksum(packet))
	return packet
}

// judge says whether a received ICMP message answers the request. Every raw socket sees every message of its namespace.
func judge(request, got []byte, from netip.Addr) (bool, error) {
	if len(got) < icmpHeader {
		return false, nil
	}
	if checksum(got) != 0 {
		return false, fmt.Errorf("ICMP type %d from %s has a wrong checksum", got[0], from)
	}
	switch got[0] {
	case icmpEchoReply:
		if !bytes.Equal(got[4:icmpHeader], request[4:icmpHeader]) {
			return false, nil
		}
		if !bytes.Equal(got[icmpHeader:], request[icmpHeader:]) {
			return false, errors.New("other bytes came back than were sent")
		}
		return true, nil
	case icmpUnreachable, icmpTimeOver:
		return false, complaint(request, got, from)
	}
	return false, nil
}

// complaint is the error for an ICMP error message about the request, nil for one about something else.
func complaint(request, got []byte, from netip.Addr) error {
	ip, quoted := splitIPv4(got[icmpHeader:])
	if ip == nil || ip[9] != unix.IPPROTO_ICMP || len(quoted) < icmpHeader || !bytes.Equal(quoted[4:icmpHeader], request[4:icmpHeader]) {
		return nil
	}
	return &ICMPError{
		From: from, Type: got[0], Code: got[1], MTU: int(binary.BigEndian.Uint16(got[6:])),
		InnerSource: netip.AddrFrom4([4]byte(ip[12:16])), InnerDestination: netip.AddrFrom4([4]byte(ip[16:20])),
	}
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

package lab

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// PingOptions vary an echo request. The zero value is an ordinary one.
type PingOptions struct {
	// Size of the payload in bytes; default 56.
	Size int
	// TTL, in IPv6 the hop limit; default the system's.
	TTL int
	// DontFragment sends one packet whatever the size, in IPv4 with DF set, and ignores what path MTU discovery has found.
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
	From netip.Addr
	ICMPKind
	// MTU is the next hop's, in TooBig.
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
	if !to.IsValid() {
		return reply, errNoAddress
	}
	protocol := &icmps[wire.FamilyOf(to)]
	conn, err := ns.openICMP(protocol, opts)
	if err != nil {
		return reply, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(deadlineOf(ctx)); err != nil {
		return reply, err
	}
	request := protocol.request(opts.Size)
	started := time.Now()
	if _, err := conn.WriteTo(request, &net.IPAddr{IP: to.AsSlice(), Zone: to.Zone()}); err != nil {
		return reply, err
	}
	packet, control := make([]byte, 1<<16), make([]byte, 128)
	for {
		n, controlLen, _, sender, err := conn.ReadMsgIP(packet, control)
		if err != nil {
			return reply, err
		}
		from, _ := netip.AddrFromSlice(sender.IP)
		done, err := protocol.judge(request, protocol.message(packet[:n]), from.Unmap())
		if err != nil {
			return reply, err
		}
		if done {
			return PingReply{From: from.Unmap(), RTT: time.Since(started), TTL: protocol.ttlOf(control[:controlLen])}, nil
		}
	}
}

// openICMP opens a raw socket: those see ICMP errors as well, and do not depend on who may use ping sockets.
func (ns *Namespace) openICMP(protocol *icmp, opts PingOptions) (*net.IPConn, error) {
	var conn *net.IPConn
	err := ns.Do(func() (err error) {
		config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
			return protocol.set(raw, opts)
		}}
		packets, err := config.ListenPacket(context.Background(), protocol.network, protocol.anyAddr)
		if err != nil {
			return err
		}
		conn = packets.(*net.IPConn)
		return nil
	})
	return conn, err
}

package lab

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// What a client of the server asks for with the first byte of a TCP connection. Either way the server's answer begins
// with a line that says whom it sees at the other end, and at which of its addresses.
const (
	askEcho     = 'e' // every byte comes back
	askTransfer = 't' // a length of 8 bytes and that many bytes; the answer is their SHA-256
	askPushes   = 'p' // nothing; each Push sends a byte
)

// Server answers TCP and UDP on one port in one namespace, and tells each client which address it sees it under.
type Server struct {
	// Port that it listens on.
	Port uint16

	tcp []net.Listener
	udp []*net.UDPConn

	mu     sync.Mutex
	conns  map[net.Conn]struct{}
	pushed map[net.Conn]struct{} // those of conns that have asked for pushes
	all    sync.WaitGroup
}

// Serve answers TCP and UDP on a port of every address of the namespace until Close; 0 lets the kernel choose the port.
// It ends with the namespace at the latest.
func (ns *Namespace) Serve(port uint16) (*Server, error) {
	var all []netip.Addr
	for _, family := range ns.families {
		all = append(all, everywhere[family].Addr())
	}
	return ns.ServeAt(port, all...)
}

// ServeAt is Serve on some addresses alone.
func (ns *Namespace) ServeAt(port uint16, addrs ...netip.Addr) (*Server, error) {
	s := &Server{Port: port, conns: map[net.Conn]struct{}{}, pushed: map[net.Conn]struct{}{}}
	listen := func() error { return s.listen(addrs) }
	err := ns.Do(listen)
	// A child that has just been forked has the sockets of a server that has ended until it executes its program; and the
	// kernel's choice for one family may be taken in the other.
	for end := time.Now().Add(time.Second); errors.Is(err, unix.EADDRINUSE) && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		s.Port = port
		err = ns.Do(listen)
	}
	if err != nil {
		return nil, fmt.Errorf("serve port %d in %s: %w", port, ns.name, err)
	}
	for _, tcp := range s.tcp {
		s.all.Go(func() { s.acceptTCP(tcp) })
	}
	for _, udp := range s.udp {
		s.all.Go(func() { answerUDP(udp) })
	}
	ns.mu.Lock()
	defer ns.mu.Unlock()
	ns.servers = append(ns.servers, s)
	return s, nil
}

// listen opens the sockets of every address, on the port that the first one gets.
func (s *Server) listen(addrs []netip.Addr) (err error) {
	defer func() {
		if err != nil {
			s.closeSockets()
			s.tcp, s.udp = nil, nil
		}
	}()
	for _, addr := range addrs {
		kind := sockets[wire.FamilyOf(addr)]
		tcp, err := net.Listen(kind.tcp, s.at(addr))
		if err != nil {
			return err
		}
		s.tcp = append(s.tcp, tcp)
		s.Port = tcp.Addr().(*net.TCPAddr).AddrPort().Port()
		config := net.ListenConfig{Control: kind.wantPacketInfo}
		udp, err := config.ListenPacket(context.Background(), kind.udp, s.at(addr))
		if err != nil {
			return err
		}
		s.udp = append(s.udp, udp.(*net.UDPConn))
	}
	return nil
}

// at is an address with the server's port.
func (s *Server) at(addr netip.Addr) string { return netip.AddrPortFrom(addr, s.Port).String() }

// sockets are what the families' sockets are called, and how they are asked to which address a datagram was sent.
var sockets = [wire.Families]socketKind{
	wire.IPv4: {"tcp4", "udp4", unix.IPPROTO_IP, unix.IP_PKTINFO},
	wire.IPv6: {"tcp6", "udp6", unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO},
}

type socketKind struct {
	tcp, udp          string
	level, packetInfo int
}

// wantPacketInfo has the kernel say to which of its addresses a datagram was sent, so that the answer comes from there,
// and makes room for thousands of datagrams at once: what does not fit would look like a loss on the way.
func (k socketKind) wantPacketInfo(_, _ string, raw syscall.RawConn) error {
	var optErr error
	err := raw.Control(func(fd uintptr) {
		optErr = errors.Join(
			unix.SetsockoptInt(int(fd), k.level, k.packetInfo, 1),
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20),
		)
	})
	return errors.Join(err, optErr)
}

// Close ends the server and its connections, and waits for them. It may be called more than once.
func (s *Server) Close() {
	s.closeSockets()
	s.mu.Lock()
	for conn := range s.conns {
		conn.Close()
	}
	s.mu.Unlock()
	s.all.Wait()
}

func (s *Server) closeSockets() {
	for _, tcp := range s.tcp {
		tcp.Close()
	}
	for _, udp := range s.udp {
		udp.Close()
	}
}

func (s *Server) acceptTCP(tcp net.Listener) {
	for {
		conn, err := tcp.Accept()
		if err != nil {
			return // closed
		}
		s.mu.Lock()
		s.conns[conn] = struct{}{}
		s.mu.Unlock()
		s.all.Go(func() {
			// What goes wrong here is seen, and reported, at the client's end.
			_ = s.answerTCP(conn)
			conn.Close()
			s.mu.Lock()
			delete(s.conns, conn)
			delete(s.pushed, conn)
			s.mu.Unlock()
		})
	}
}

// Push sends a byte to each client that waits for pushes: a server speaks first, of its own accord.
func (s *Server) Push() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for conn := range s.pushed {
		_, _ = conn.Write([]byte{askPushes}) // what goes wrong is seen at the client's end
	}
}

func (s *Server) answerTCP(conn net.Conn) error {
	in := bufio.NewReaderSize(conn, 1<<18)
	ask, err := in.ReadByte()
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(conn, "%s %s\n", conn.RemoteAddr(), conn.LocalAddr()); err != nil {
		return err
	}
	switch ask {
	case askEcho:
		_, err = io.Copy(conn, in)
		return err
	case askTransfer:
		var length uint64
		if err := binary.Read(in, binary.BigEndian, &length); err != nil {
			return err
		}
		hash := sha256.New()
		if _, err := io.CopyN(hash, in, int64(length)); err != nil {
			return err
		}
		_, err = conn.Write(hash.Sum(nil))
		return err
	case askPushes:
		s.mu.Lock()
		s.pushed[conn] = struct{}{}
		s.mu.Unlock()
		_, err = io.Copy(io.Discard, in)
		return err
	default:
		return fmt.Errorf("asked for %q", ask)
	}
}

// seenLength is how much of an echoed datagram is overwritten by whom the server saw: address, port, newline, zeros.
const seenLength = 48

// askWho begins a datagram to whose echo the server adds the address and port that it was sent to.
var askWho = []byte("who?")

func answerUDP(udp *net.UDPConn) {
	packet := make([]byte, 1<<16)
	control := make([]byte, 128)
	port := udp.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	for {
		n, controlLen, _, from, err := udp.ReadMsgUDPAddrPort(packet, control)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || n < seenLength {
			continue // an ICMP error about an earlier answer, or not from our client
		}
		asked := bytes.HasPrefix(packet[:n], askWho)
		clear(packet[:seenLength])
		copy(packet, unmapped(from).String()+"\n")
		at := sentTo(control[:controlLen])
		answer := packet[:n]
		if asked {
			answer = append(answer, netip.AddrPortFrom(at, port).String()...)
		}
		// An answer that cannot be sent is missed by the client.
		_, _, _ = udp.WriteMsgUDPAddrPort(answer, answerFrom(at), from)
	}
}

// sentTo is the address that a datagram was sent to, as the control message beside it says.
func sentTo(control []byte) (at netip.Addr) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return at
	}
	for _, message := range messages {
		switch {
		case message.Header.Level == unix.IPPROTO_IP && message.Header.Type == unix.IP_PKTINFO && len(message.Data) >= unix.SizeofInet4Pktinfo:
			// struct in_pktinfo: the interface's index, the local address, the destination in the header.
			at = netip.AddrFrom4([4]byte(message.Data[4:8]))
		case message.Header.Level == unix.IPPROTO_IPV6 && message.Header.Type == unix.IPV6_PKTINFO && len(message.Data) >= unix.SizeofInet6Pktinfo:
			// struct in6_pktinfo: the destination in the header, the interface's index.
			at = netip.AddrFrom16([16]byte(message.Data[:16]))
		}
	}
	return at
}

// answerFrom is the control message by which a datagram is sent from an address.
func answerFrom(at netip.Addr) []byte {
	switch {
	case at.Is4():
		return unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: at.As4()})
	case at.Is6():
		return unix.PktInfo6(&unix.Inet6Pktinfo{Addr: at.As16()})
	default:
		return nil
	}
}

func unmapped(ap netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

package lab

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// defaultTimeout bounds an exchange whose context has no deadline. Nothing in a lab takes long but waiting for a
// packet that was dropped.
const defaultTimeout = 3 * time.Second

// errNoAddress refuses an invalid address, such as that of a family that somebody lacks: the kernel would take it for
// the sender's own.
var errNoAddress = errors.New("there is no address to send to")

func deadlineOf(ctx context.Context) time.Time {
	if deadline, ok := ctx.Deadline(); ok {
		return deadline
	}
	return time.Now().Add(priv.Patience(defaultTimeout))
}

// TCPConn is a connection to the echo service of a Server.
type TCPConn struct {
	net.Conn
	// Seen is the client's address and port as the server sees them.
	Seen netip.AddrPort
	// By is the server's address and port as itself sees them: behind a Service, whose backend it is.
	By netip.AddrPort

	in *bufio.Reader
}

// DialTCP opens a connection to a Server. A local port of 0 lets the kernel choose.
func (ns *Namespace) DialTCP(ctx context.Context, to netip.AddrPort, localPort uint16) (*TCPConn, error) {
	return ns.dial(ctx, to, localPort, askEcho)
}

// DialPushed opens a connection to a Server on which the client never speaks again: see Pushed.
func (ns *Namespace) DialPushed(ctx context.Context, to netip.AddrPort) (*TCPConn, error) {
	return ns.dial(ctx, to, 0, askPushes)
}

// Pushed waits for what the server's Push sends.
func (c *TCPConn) Pushed(ctx context.Context) error {
	if err := c.SetDeadline(deadlineOf(ctx)); err != nil {
		return err
	}
	if _, err := c.in.ReadByte(); err != nil {
		return fmt.Errorf("TCP from %s to %s, waiting for the server: %w", c.LocalAddr(), c.RemoteAddr(), err)
	}
	return nil
}

func (ns *Namespace) dial(ctx context.Context, to netip.AddrPort, localPort uint16, ask byte) (c *TCPConn, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("TCP from %s to %s: %w", ns.name, to, err)
		}
	}()
	if !to.IsValid() {
		return nil, errNoAddress
	}
	dialer := net.Dialer{Deadline: deadlineOf(ctx), Control: reuseAddress}
	if localPort != 0 {
		dialer.LocalAddr = &net.TCPAddr{Port: int(localPort)}
	}
	var conn net.Conn
	err = ns.Do(func() (err error) {
		conn, err = dialer.DialContext(ctx, "tcp", to.String())
		return err
	})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			conn.Close()
		}
	}()
	c = &TCPConn{Conn: conn, in: bufio.NewReader(conn)}
	return c, c.greet(ctx, ask)
}

// greet asks the server for what it is to do, and reads whom it sees.
func (c *TCPConn) greet(ctx context.Context, ask byte) (err error) {
	if err := c.SetDeadline(deadlineOf(ctx)); err != nil {
		return err
	}
	if _, err := c.Write([]byte{ask}); err != nil {
		return err
	}
	if c.Seen, c.By, err = readEnds(c.in); err != nil {
		return fmt.Errorf("read whom the server sees: %w", err)
	}
	return nil
}

// readEnds reads the line with which a server's answer begins.
func readEnds(in *bufio.Reader) (client, server netip.AddrPort, err error) {
	line, err := in.ReadString('\n')
	if err != nil {
		return client, server, err
	}
	first, second, _ := strings.Cut(strings.TrimSpace(line), " ")
	client, clientErr := netip.ParseAddrPort(first)
	server, serverErr := netip.ParseAddrPort(second)
	return unmapped(client), unmapped(server), errors.Join(clientErr, serverErr)
}

// reuseAddress lets tests take a fixed local port again while the kernel remembers its last connection.
func reuseAddress(_, _ string, raw syscall.RawConn) error {
	var optErr error
	err := raw.Control(func(fd uintptr) {
		optErr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	})
	return errors.Join(err, optErr)
}

// Echo sends random bytes and checks that the same come back.
func (c *TCPConn) Echo(ctx context.Context, size int) error {
	if err := c.SetDeadline(deadlineOf(ctx)); err != nil {
		return err
	}
	sent := make([]byte, size)
	_, _ = rand.Read(sent) // never fails
	written := make(chan error, 1)
	go func() { // beside the reading: both buffers may be smaller than size
		_, err := c.Write(sent)
		written <- err
	}()
	got := make([]byte, size)
	_, readErr := io.ReadFull(c.in, got)
	if readErr != nil {
		_ = c.SetDeadline(time.Now()) // ends the writer
	}
	if err := errors.Join(readErr, <-written); err != nil {
		return fmt.Errorf("TCP echo %s to %s: %w", c.LocalAddr(), c.RemoteAddr(), err)
	}
	if !bytes.Equal(sent, got) {
		return fmt.Errorf("TCP echo %s to %s: other bytes came back than were sent", c.LocalAddr(), c.RemoteAddr())
	}
	return nil
}

// TCP connects to a Server, has some bytes echoed and closes; it returns the address that the server saw.
func (ns *Namespace) TCP(ctx context.Context, to netip.AddrPort) (seen netip.AddrPort, err error) {
	conn, err := ns.DialTCP(ctx, to, 0)
	if err != nil {
		return netip.AddrPort{}, err
	}
	defer conn.Close()
	return conn.Seen, conn.Echo(ctx, 1000)
}

// Transferred is the outcome of a bulk transfer.
type Transferred struct {
	Bytes    int64
	Sent     [sha256.Size]byte // of what was sent
	Received [sha256.Size]byte // of what the server says it received
	Seen     netip.AddrPort
	Took     time.Duration
}

// Transfer sends so many random bytes over one TCP connection to a Server. Checksums that differ are an error.
func (ns *Namespace) Transfer(ctx context.Context, to netip.AddrPort, size int64) (t Transferred, err error) {
	started := time.Now()
	conn, err := ns.dial(ctx, to, 0, askTransfer)
	if err != nil {
		return t, err
	}
	defer conn.Close()
	if err := binary.Write(conn, binary.BigEndian, uint64(size)); err != nil {
		return t, fmt.Errorf("transfer from %s to %s: %w", ns.name, to, err)
	}
	var seed [32]byte
	_, _ = rand.Read(seed[:]) // never fails
	hash := sha256.New()
	data := io.TeeReader(io.LimitReader(mathrand.NewChaCha8(seed), size), hash)
	// Only io.Writer is left of the connection, or it would read in small pieces by itself.
	_, err = io.CopyBuffer(struct{ io.Writer }{conn}, data, make([]byte, 1<<18))
	if err == nil {
		_, err = io.ReadFull(conn.in, t.Received[:])
	}
	if err != nil {
		return t, fmt.Errorf("transfer from %s to %s: %w", ns.name, to, err)
	}
	t.Bytes, t.Seen, t.Took = size, conn.Seen, time.Since(started)
	t.Sent = [sha256.Size]byte(hash.Sum(nil))
	if t.Sent != t.Received {
		return t, fmt.Errorf("transfer from %s to %s: sent %x, the other end received %x", ns.name, to, t.Sent, t.Received)
	}
	return t, nil
}

// UDPConn is a UDP socket connected to a Server; ICMP errors about what it sends come back as errors of Echo.
type UDPConn struct {
	*net.UDPConn
}

// DialUDP makes a UDP socket that talks to one Server. A local port of 0 lets the kernel choose.
func (ns *Namespace) DialUDP(to netip.AddrPort, localPort uint16) (*UDPConn, error) {
	if !to.IsValid() {
		return nil, fmt.Errorf("UDP from %s: %w", ns.name, errNoAddress)
	}
	var conn *net.UDPConn
	err := ns.Do(func() (err error) {
		conn, err = dialUDP(to, localPort)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("UDP from %s to %s: %w", ns.name, to, err)
	}
	return &UDPConn{conn}, nil
}

// dialUDP lets several sockets, of different servers, have one port if it was asked for.
func dialUDP(to netip.AddrPort, localPort uint16) (*net.UDPConn, error) {
	var dialer net.Dialer
	if localPort != 0 {
		dialer.LocalAddr, dialer.Control = &net.UDPAddr{Port: int(localPort)}, reuseAddress
	}
	conn, err := dialer.Dial("udp", to.String())
	if err != nil {
		return nil, err
	}
	return conn.(*net.UDPConn), nil
}

// Echo sends one datagram of the given size, at least 64 bytes, waits for its echo, compares, and returns the address
// that the server saw. Echoes of other datagrams are an error: each flow must get its own answers only.
func (c *UDPConn) Echo(ctx context.Context, size int) (seen netip.AddrPort, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("UDP echo of %d bytes %s to %s: %w", size, c.LocalAddr(), c.RemoteAddr(), err)
		}
	}()
	sent := make([]byte, max(size, 64))
	_, _ = rand.Read(sent) // never fails
	if err := c.SetDeadline(deadlineOf(ctx)); err != nil {
		return seen, err
	}
	if _, err := c.Write(sent); err != nil {
		return seen, err
	}
	got := make([]byte, 1<<16)
	n, err := c.Read(got)
	if err != nil {
		return seen, err
	}
	if n != len(sent) || !bytes.Equal(got[seenLength:n], sent[seenLength:]) {
		return seen, fmt.Errorf("the answer of %d bytes is not the echo of what was sent", n)
	}
	line, _, _ := bytes.Cut(got[:seenLength], []byte{'\n'})
	return netip.ParseAddrPort(string(line))
}

// Drain discards answers that have come too late for their Echo.
func (c *UDPConn) Drain() {
	late := make([]byte, 1<<16)
	for err := c.SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err == nil; {
		_, err = c.Read(late)
	}
}

// UDP has one datagram of the given size echoed by a Server and returns the address that the server saw.
func (ns *Namespace) UDP(ctx context.Context, to netip.AddrPort, size int) (seen netip.AddrPort, err error) {
	conn, err := ns.DialUDP(to, 0)
	if err != nil {
		return seen, err
	}
	defer conn.Close()
	return conn.Echo(ctx, size)
}

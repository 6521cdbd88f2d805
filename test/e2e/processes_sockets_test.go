package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// What the node's own processes do with their sockets.

// startProcess starts one of a node's own, in a network namespace.
func startProcess(t *testing.T, node *lab.Node, in *lab.Namespace) *lab.Process {
	t.Helper()
	p, err := node.StartProcess(in)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// asTCP connects and returns who has answered. The process is told that its peer is the Service.
func asTCP(t *testing.T, p *lab.Process, to netip.AddrPort) (by netip.AddrPort) {
	t.Helper()
	conn, err := p.DialTCP(t.Context(), to)
	if err != nil {
		t.Error(err)
		return by
	}
	defer conn.Close()
	assertPeer(t, conn, to)
	if err := conn.Echo(t.Context(), 10_000); err != nil {
		t.Error(err)
	}
	return conn.By
}

func assertPeer(t *testing.T, conn net.Conn, want netip.AddrPort) {
	t.Helper()
	got, err := netip.ParseAddrPort(conn.RemoteAddr().String())
	if err != nil || got.Port() != want.Port() || got.Addr().Unmap() != want.Addr().Unmap() {
		t.Errorf("the peer is %v, want %v; %v", got, want, err)
	}
}

// who is a question of which a server adds to the echo at which of its addresses it was asked.
var who = append([]byte("who?"), make([]byte, 60)...)

// asUDP asks by a datagram of a connected socket.
func asUDP(t *testing.T, p *lab.Process, to netip.AddrPort) (by netip.AddrPort) {
	t.Helper()
	conn, err := p.Dial(unix.SOCK_DGRAM, to)
	if err != nil {
		t.Error(err)
		return by
	}
	defer conn.Close()
	assertPeer(t, conn, to)
	return ask(t, conn, to)
}

// ask asks by a datagram of a connected socket. It is told that the Service has answered.
func ask(t *testing.T, conn net.Conn, to netip.AddrPort) (by netip.AddrPort) {
	t.Helper()
	answer := make([]byte, 200)
	err := conn.SetDeadline(time.Now().Add(3 * time.Second))
	if err == nil {
		_, err = conn.Write(who)
	}
	if err != nil {
		t.Error(err)
		return by
	}
	n, from, err := conn.(*net.UDPConn).ReadFromUDPAddrPort(answer)
	if err != nil || from.Addr().Unmap() != to.Addr().Unmap() || from.Port() != to.Port() {
		t.Errorf("the answer is from %v, want %v; %v", from, to, err)
		return by
	}
	return answeredBy(t, answer[:n])
}

func answeredBy(t *testing.T, answer []byte) netip.AddrPort {
	t.Helper()
	by, err := netip.ParseAddrPort(string(answer[min(len(who), len(answer)):]))
	if err != nil {
		t.Error(err)
	}
	return by
}

// looseSocket is a socket that is connected to nobody.
type looseSocket struct{ fd int }

func openLoose(t *testing.T, p *lab.Process, to netip.Addr) looseSocket {
	t.Helper()
	fd, err := p.Socket(!to.Is4(), unix.SOCK_DGRAM)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	limit := unix.NsecToTimeval((3 * time.Second).Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		t.Fatal(err)
	}
	return looseSocket{fd}
}

// send sends a datagram.
func (d looseSocket) send(t *testing.T, to netip.AddrPort) {
	t.Helper()
	if err := unix.Sendto(d.fd, who, 0, lab.Sockaddr(to)); err != nil {
		t.Errorf("send to %s: %v", to, err)
	}
}

// ask asks by a datagram. It is told that the Service has answered.
func (d looseSocket) ask(t *testing.T, to netip.AddrPort) (by netip.AddrPort) {
	t.Helper()
	d.send(t, to)
	answer, from := d.receive(t)
	if want := fmt.Sprint(lab.Sockaddr(to)); from != want {
		t.Errorf("the answer is from %s, want %s", from, want)
	}
	return answeredBy(t, answer)
}

// sender is who has answered.
func (d looseSocket) sender(t *testing.T) string {
	t.Helper()
	_, from := d.receive(t)
	return from
}

func (d looseSocket) receive(t *testing.T) (answer []byte, from string) {
	t.Helper()
	answer = make([]byte, 200)
	n, by, err := unix.Recvfrom(d.fd, answer, 0)
	for errors.Is(err, unix.EINTR) { // by a signal of the runtime's
		n, by, err = unix.Recvfrom(d.fd, answer, 0)
	}
	if err != nil {
		t.Errorf("no answer: %v", err)
		return nil, ""
	}
	return answer[:n], fmt.Sprint(by)
}

// connect connects it after all. It is told that its peer is who it has named.
func (d looseSocket) connect(t *testing.T, to netip.AddrPort) {
	t.Helper()
	if err := unix.Connect(d.fd, lab.Sockaddr(to)); err != nil {
		t.Errorf("connect to %s: %v", to, err)
	}
	d.connected(t, to)
}

// connected asserts what it is told of its peer.
func (d looseSocket) connected(t *testing.T, told netip.AddrPort) {
	t.Helper()
	peer, err := unix.Getpeername(d.fd)
	if want := fmt.Sprint(lab.Sockaddr(told)); err != nil || fmt.Sprint(peer) != want {
		t.Errorf("its peer is %v, want %s; %v", peer, want, err)
	}
}

// cookies are the sockets that a node's programs know.
func cookies(t *testing.T, node *lab.Node) (all []uint64) {
	t.Helper()
	for _, row := range dump(t, node, "sockets") {
		all = append(all, uint64(row["cookie"].(float64)))
	}
	return all
}

func cookieOf(t *testing.T, fd int) uint64 {
	t.Helper()
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		t.Fatal(err)
	}
	return cookie
}

// mapped is an address of IPv4 as a socket of IPv6 has it.
func mapped(to netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(to.Addr().As16()), to.Port())
}

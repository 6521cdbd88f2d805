package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// Services that the node's own processes reach, by the programs on its cgroup.

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

// ask asks by a datagram. It is told that the Service has answered.
func (d looseSocket) ask(t *testing.T, to netip.AddrPort) (by netip.AddrPort) {
	t.Helper()
	if err := unix.Sendto(d.fd, who, 0, lab.Sockaddr(to)); err != nil {
		t.Errorf("send to %s: %v", to, err)
		return by
	}
	answer := make([]byte, 200)
	n, from, err := unix.Recvfrom(d.fd, answer, 0)
	if err != nil {
		t.Errorf("no answer from %s: %v", to, err)
		return by
	}
	if got, want := fmt.Sprint(from), fmt.Sprint(lab.Sockaddr(to)); got != want {
		t.Errorf("the answer is from %s, want %s", got, want)
	}
	return answeredBy(t, answer[:n])
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

// TestProcessesReachServices of every kind of backend, by every kind of socket.
func TestProcessesReachServices(t *testing.T) {
	t.Parallel()
	s := startServed(t, lab.Options{Families: families})
	p := startProcess(t, s.Nodes[0], s.Nodes[0].Namespace)
	backers := map[string]backer{"near": s.near, "far": s.far, "own": s.Nodes[0], "node": s.Nodes[1], "outside": outside{s.Outside}}
	var specs []lab.ServiceSpec
	for name, b := range backers {
		specs = append(specs, s.spec(name, b))
	}
	s.set(t, specs...)
	overEachFamily(t, s.Lab, func(t *testing.T, family wire.Family) {
		for name, b := range backers {
			to, want := s.at(name, family), b.Endpoint(family, backendPort).At
			targets := []netip.AddrPort{to}
			if family == wire.IPv4 {
				targets = append(targets, mapped(to))
			}
			for _, to := range targets {
				for how, by := range map[string]netip.AddrPort{
					"TCP": asTCP(t, p, to), "UDP": asUDP(t, p, to), "datagram": openLoose(t, p, to.Addr()).ask(t, to),
				} {
					if by != want {
						t.Errorf("%s to %s, %s: answered by %v, want %v", how, name, to, by, want)
					}
				}
			}
		}
	})
	// Of those that were connected to nobody it is not known where they have sent: both entries stay.
	if left, want := cookies(t, s.Nodes[0]), 2*3*len(backers); len(left) != want {
		t.Errorf("%d entries are left of sockets, want %d: %v", len(left), want, left)
	}
}

// TestProcessesOfOthers are untouched: of the machine, beside the node's cgroup; and in it, but in another network namespace.
func TestProcessesOfOthers(t *testing.T) {
	t.Parallel()
	s := startServed(t, lab.Options{})
	node, family := s.Nodes[0], firstFamily(s.Lab)
	s.set(t, s.spec("near", s.near))
	to := s.at("near", family)
	connected := func(dial func() (net.Conn, error)) uint64 {
		t.Helper()
		conn, err := dial()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		raw, err := conn.(*net.UDPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var cookie uint64
		if err := raw.Control(func(fd uintptr) { cookie = cookieOf(t, int(fd)) }); err != nil {
			t.Fatal(err)
		}
		return cookie
	}
	inside, elsewhere := startProcess(t, node, node.Namespace), startProcess(t, node, s.client.Namespace)
	ours := connected(func() (net.Conn, error) { return inside.Dial(unix.SOCK_DGRAM, to) })
	others := map[string]uint64{
		"a process beside the cgroup":      connected(func() (net.Conn, error) { c, err := node.DialUDP(to, 0); return c.UDPConn, err }),
		"one in another network namespace": connected(func() (net.Conn, error) { return elsewhere.Dial(unix.SOCK_DGRAM, to) }),
		"one of another node":              connected(func() (net.Conn, error) { return startProcess(t, s.Nodes[1], node.Namespace).Dial(unix.SOCK_DGRAM, to) }),
	}
	known := cookies(t, node)
	if !slices.Contains(known, ours) {
		t.Errorf("the node's own process is not among those known: %v", known)
	}
	for what, cookie := range others {
		if slices.Contains(known, cookie) {
			t.Errorf("%s is among those known", what)
		}
	}
	// A pod's is translated by its packets all the same.
	if by := asUDP(t, elsewhere, to); by.Addr() != s.near.AddrOf(family) {
		t.Errorf("a pod's process is served by %v", by)
	}
}

// TestProcessesAreRefused at once, and are told why.
func TestProcessesAreRefused(t *testing.T) {
	t.Parallel()
	s := startServed(t, lab.Options{Families: families}, drops.NoBackend, drops.NoServicePort, drops.NoLocalBackend)
	node := s.Nodes[0]
	p := startProcess(t, node, node.Namespace)
	local := s.spec("local", s.far)
	local.InternalLocal = true
	s.set(t, s.spec("empty"), local)
	overEachFamily(t, s.Lab, func(t *testing.T, family wire.Family) {
		empty, away := s.at("empty", family), s.at("local", family)
		other := netip.AddrPortFrom(empty.Addr(), closedPort)
		for _, c := range []struct {
			what   string
			to     netip.AddrPort
			kind   int
			want   error
			reason drops.Reason
		}{
			{"no endpoints", empty, unix.SOCK_STREAM, unix.ECONNREFUSED, drops.NoBackend},
			{"no endpoints", empty, unix.SOCK_DGRAM, unix.ECONNREFUSED, drops.NoBackend},
			{"no such port", other, unix.SOCK_STREAM, unix.ECONNREFUSED, drops.NoServicePort},
			{"no such port", other, unix.SOCK_DGRAM, nil, drops.NoServicePort},
			{"no local endpoint", away, unix.SOCK_STREAM, unix.EPERM, drops.NoLocalBackend},
			{"no local endpoint", away, unix.SOCK_DGRAM, unix.EPERM, drops.NoLocalBackend},
		} {
			before, began := dropped(t, node, c.reason), time.Now()
			conn, err := p.Dial(c.kind, c.to)
			if conn != nil {
				conn.Close()
			}
			if !errors.Is(err, c.want) || time.Since(began) > time.Second {
				t.Errorf("%s, socket of type %d: %v after %v, want %v", c.what, c.kind, err, time.Since(began), c.want)
			}
			if counted := dropped(t, node, c.reason) - before; (counted == 1) != (c.want != nil) {
				t.Errorf("%s, socket of type %d: %d counted as %s", c.what, c.kind, counted, c.reason)
			}
		}
		for to, want := range map[netip.AddrPort]error{empty: unix.ECONNREFUSED, other: unix.ECONNREFUSED, away: unix.EPERM} {
			if err := unix.Sendto(openLoose(t, p, to.Addr()).fd, who, 0, lab.Sockaddr(to)); !errors.Is(err, want) {
				t.Errorf("a datagram to %s: %v, want %v", to, err, want)
			}
		}
	})
}

// TestProcessesKeepTheirBackend by sessionAffinity, and each socket that is connected to nobody.
func TestProcessesKeepTheirBackend(t *testing.T) {
	t.Parallel()
	s := startServed(t, lab.Options{})
	family := firstFamily(s.Lab)
	p := startProcess(t, s.Nodes[0], s.Nodes[0].Namespace)
	keeps := s.spec("keeps", s.near, s.far, s.Nodes[0], s.Nodes[1])
	keeps.Affinity = 600
	s.set(t, keeps, s.spec("any", s.near, s.far, s.Nodes[0], s.Nodes[1]))
	answers := func(do func() netip.AddrPort) int {
		by := map[netip.AddrPort]bool{}
		for range 40 {
			by[do()] = true
		}
		return len(by)
	}
	if n := answers(func() netip.AddrPort { return asTCP(t, p, s.at("keeps", family)) }); n != 1 {
		t.Errorf("%d backends with sessionAffinity", n)
	}
	if n := answers(func() netip.AddrPort { return asTCP(t, p, s.at("any", family)) }); n != 4 {
		t.Errorf("%d backends without sessionAffinity, want 4", n)
	}
	socket := openLoose(t, p, s.at("any", family).Addr())
	if n := answers(func() netip.AddrPort { return socket.ask(t, s.at("any", family)) }); n != 1 {
		t.Errorf("%d backends of one socket", n)
	}
}

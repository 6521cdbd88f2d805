package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// backendOf is a Service's only backend: who answers, and whom it sees.
type backendOf struct {
	name     string
	endpoint backer
	seen     func(wire.Family) netip.Addr
}

func (s *served) backends() []backendOf {
	client := s.client.AddrOf
	return []backendOf{
		{"near", s.near, client},
		{"far", s.far, client},
		{"itself", s.client, func(family wire.Family) netip.Addr { return s.at("itself", family).Addr() }},
		{"host", s.Nodes[0], client},
		{"otherhost", s.Nodes[1], client},
		{"world", outside{s.Outside}, s.Nodes[0].AddrOf},
	}
}

// A Service of one backend each, wherever a backend can be.
func everyBackend(t *testing.T, s *served) func(*testing.T, wire.Family) {
	var specs []lab.ServiceSpec
	for _, b := range s.backends() {
		specs = append(specs, s.spec(b.name, b.endpoint))
	}
	s.set(t, specs...)
	return func(t *testing.T, family wire.Family) {
		for _, b := range s.backends() {
			t.Run(b.name, func(t *testing.T) {
				s.assertServed(t, s.at(b.name, family), b.endpoint.Endpoint(family, backendPort).At, b.seen(family))
			})
		}
	}
}

// assertServed exchanges TCP and UDP, fragments among it, with a Service, and echo requests; bulk data too.
func (s *served) assertServed(t *testing.T, to, backend netip.AddrPort, seenAs netip.Addr) {
	t.Helper()
	assertServedTo(t, s.client.Namespace, to, backend, seenAs)
}

// assertServedTo does so for anybody.
func assertServedTo(t *testing.T, client *lab.Namespace, to, backend netip.AddrPort, seenAs netip.Addr) {
	t.Helper()
	conn, err := client.DialTCP(t.Context(), to, 0)
	if err != nil {
		t.Error(err)
		return
	}
	defer conn.Close()
	if conn.By != backend || conn.Seen.Addr() != seenAs {
		t.Errorf("TCP to %s is answered by %s, which saw %s; want %s and %s", to, conn.By, conn.Seen, backend, seenAs)
	}
	if err := conn.Echo(t.Context(), 100_000); err != nil {
		t.Error(err)
	}
	for _, size := range []int{64, 1400, 9000} {
		// Either side may have to learn what fits.
		assertSeen(t, fmt.Sprintf("UDP of %d bytes to %s", size, to), assertUDP(t, client, to, size), nil, seenAs)
	}
	if _, err := client.Transfer(t.Context(), to, 4<<20); err != nil {
		t.Error(err)
	}
	if reply, err := client.Ping(t.Context(), to.Addr(), lab.PingOptions{}); err != nil || reply.From != to.Addr() {
		t.Errorf("echo from %s: %v", reply.From, err)
	}
}

// External addresses, of which a node may hold one itself, answer on the Service's port; the node's other ports are the node's.
func otherAddresses(t *testing.T, s *served) func(*testing.T, wire.Family) {
	external := [wire.Families]netip.Addr{wire.IPv4: netip.MustParseAddr("198.51.100.7"), wire.IPv6: netip.MustParseAddr("2001:db8:100::7")}
	spec := s.spec("external", s.far)
	for _, family := range families {
		spec.ExternalIPs = append(spec.ExternalIPs, external[family], s.Nodes[0].AddrOf(family))
		spec.LoadBalancerIPs = append(spec.LoadBalancerIPs, external[family].Next())
	}
	s.set(t, spec)
	return func(t *testing.T, family wire.Family) {
		backend, client := s.far.Endpoint(family, backendPort).At, s.client.AddrOf(family)
		for _, addr := range []netip.Addr{external[family], external[family].Next()} {
			s.assertServed(t, netip.AddrPortFrom(addr, servicePort), backend, client)
		}
		own := s.Nodes[0].AddrOf(family)
		conn, err := s.client.DialTCP(t.Context(), netip.AddrPortFrom(own, servicePort), 0)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if conn.By != backend {
			t.Errorf("the node's address, on the Service's port, is answered by %s", conn.By)
		}
		if conn, err = s.client.DialTCP(t.Context(), netip.AddrPortFrom(own, backendPort), 0); err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if want := netip.AddrPortFrom(own, backendPort); conn.By != want {
			t.Errorf("the node's address, on its own port, is answered by %s", conn.By)
		}
	}
}

// A ClusterIP that the node itself holds is the node's, as that of DNS is where a cache listens on it, and the Service's again later. So is
// any other address of the node's.
func heldAddresses(t *testing.T, s *served) func(*testing.T, wire.Family) {
	s.set(t, s.spec("held", s.far))
	local := [wire.Families]netip.Addr{wire.IPv4: netip.MustParseAddr("169.254.20.10"), wire.IPv6: netip.MustParseAddr("fd00:169:254:20::10")}
	return func(t *testing.T, family wire.Family) {
		to := s.at("held", family)
		far := s.far.Endpoint(family, backendPort).At
		answers := func(at, by netip.AddrPort) {
			t.Helper()
			eventually(t, changeLimit, fmt.Sprintf("%s is answered by %s", at, by), func() bool {
				conn, err := s.client.DialTCP(within(t, refusedAtOnce), at, 0)
				if err != nil {
					return false
				}
				_ = conn.Conn.(*net.TCPConn).SetLinger(0) // nothing is left to say when the address has gone
				conn.Close()
				return conn.By == by
			})
		}
		answers(to, far)
		for _, addr := range []netip.Addr{to.Addr(), local[family]} {
			release := hold(t, s.Nodes[0], addr)
			own := netip.AddrPortFrom(addr, backendPort)
			answers(own, own)
			if seen, err := s.client.UDP(t.Context(), own, 64); err != nil || seen.Addr() != s.client.AddrOf(family) {
				t.Errorf("UDP to %s: seen as %s, %v", own, seen, err)
			}
			release()
		}
		answers(to, far)
		s.assertRefused(t, netip.AddrPortFrom(to.Addr(), backendPort))
	}
}

// hold gives a node an address, until release is called.
func hold(t *testing.T, node *lab.Node, addr netip.Addr) (release func()) {
	t.Helper()
	lo, err := node.Netlink().LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	address := &netlink.Addr{IPNet: prefix(single(addr).String()), Flags: unix.IFA_F_NODAD}
	if err := node.Netlink().AddrAdd(lo, address); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := node.Netlink().AddrDel(lo, address); err != nil {
			t.Fatal(err)
		}
	}
}

// refusedAtOnce is how soon a program answers, and far from any timeout.
const refusedAtOnce = 300 * time.Millisecond

// Who can't be served is told, at once, unless nobody is there to tell.
func refusals(t *testing.T, s *served) func(*testing.T, wire.Family) {
	s.set(t, s.spec("empty"), s.spec("serves", s.near), s.spec("closednear", closed{s.near}), s.spec("closedfar", closed{s.far}),
		s.spec("closedhost", closed{s.Nodes[0]}), s.spec("closedworld", closed{outside{s.Outside}}))
	return func(t *testing.T, family wire.Family) {
		unknown := netip.AddrPortFrom(s.at("serves", family).Addr(), servicePort+1)
		all := []netip.AddrPort{s.at("empty", family), unknown}
		for _, name := range []string{"closednear", "closedfar", "closedhost", "closedworld"} {
			all = append(all, s.at(name, family))
		}
		for _, to := range all {
			s.assertRefused(t, to)
		}
		nobody, before := netip.AddrPortFrom(s.last[family].Next().Next(), servicePort), dropped(t, s.Nodes[0], drops.NoService)
		if _, err := s.client.UDP(within(t, refusedAtOnce), nobody, 64); err == nil || errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("UDP to an address that no Service has: %v", err)
		}
		if got := dropped(t, s.Nodes[0], drops.NoService); got != before+1 {
			t.Errorf("%d packets counted as NO_SERVICE, want 1", got-before)
		}
	}
}

// assertRefused wants an answer at once, from the address that was asked: an error of anybody else's finds no socket.
func (s *served) assertRefused(t *testing.T, to netip.AddrPort) {
	t.Helper()
	assertRefusedTo(t, s.client.Namespace, to)
}

// assertRefusedTo is for anybody.
func assertRefusedTo(t *testing.T, client *lab.Namespace, to netip.AddrPort) {
	t.Helper()
	if _, err := client.TCP(within(t, refusedAtOnce), to); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("TCP from %s to %s: %v, want connection refused", client.Netns(), to, err)
	}
	if _, err := client.UDP(within(t, refusedAtOnce), to, 64); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("UDP from %s to %s: %v, want connection refused", client.Netns(), to, err)
	}
}

// Errors from the way to a backend are about the Service.
func errorsOfTheWay(t *testing.T, s *served) func(*testing.T, wire.Family) {
	return func(t *testing.T, family wire.Family) {
		near, far := s.Nodes[0].AddrOf(family), s.Nodes[1].AddrOf(family)
		at := func(name string) netip.AddrPort { return s.at(name, family) }
		for _, tc := range []struct {
			to   netip.AddrPort
			ttl  int
			from netip.Addr
		}{
			{at("near"), 1, near},
			{at("far"), 1, near},
			{at("far"), 2, far},
			{at("world"), 2, lab.GatewayAddr[family]},
			// Its source is the Service's, so it is not the stack's to answer.
			{at("itself"), 1, at("itself").Addr()},
		} {
			assertTimeExceeded(t, s.client, tc.to, tc.ttl, tc.from)
		}
		for name, hops := range map[string][]netip.Addr{"near": {near, at("near").Addr()}, "far": {near, far, at("far").Addr()}} {
			s.assertHops(t, at(name), hops)
		}
		narrow(t, s.Router, single(s.Outside.AddrOf(family)), netip.Addr{}, "eth1", narrowed)
		conn := dontFragment(t, s.client.Namespace, at("world"))
		if _, err := conn.Write(make([]byte, 1400)); err != nil {
			t.Error(err)
		}
		if _, err := conn.Read(make([]byte, 1400)); !errors.Is(err, unix.EMSGSIZE) {
			t.Errorf("a datagram that is too big for a router: %v", err)
		}
	}
}

// assertTimeExceeded sends a datagram so many hops far, and wants its end told by somebody, as of a packet to the Service.
func assertTimeExceeded(t *testing.T, pod *lab.Pod, to netip.AddrPort, ttl int, from netip.Addr) {
	t.Helper()
	family := wire.FamilyOf(to.Addr())
	conn, set := dialUDP(t, pod.Namespace, 0, to), socketOptions[family]
	set.on(t, conn, set.hops, ttl)
	capture, err := pod.Capture(pod.IfName)
	if err != nil {
		t.Fatal(err)
	}
	send(t, conn, "no further")
	time.Sleep(priv.Patience(100 * time.Millisecond))
	assertQuotes(t, fmt.Sprintf("TTL %d to %s", ttl, to), capture, lab.TimeExceeded[family], from, to)
}

// assertQuotes wants exactly one kind of ICMP error in a capture, from somebody, about a packet to a port.
func assertQuotes(t *testing.T, what string, capture *lab.Capture, kind lab.ICMPKind, from netip.Addr, to netip.AddrPort) {
	t.Helper()
	var errs []string
	for _, packet := range capture.Close() {
		got, quoted, ok := icmpErrorIn(packet)
		if !ok {
			continue
		}
		outer, _ := ipHeaderOf(packet.NetworkLayer())
		inner, _ := ipHeaderOf(quoted.NetworkLayer())
		text := fmt.Sprintf("%v from %s about nothing", got, outer.source)
		if len(inner.payload) >= 4 {
			text = fmt.Sprintf("%v from %s about %s", got, outer.source, netip.AddrPortFrom(inner.destination, binary.BigEndian.Uint16(inner.payload[2:])))
		}
		errs = append(errs, text)
	}
	if want := fmt.Sprintf("%v from %s about %s", kind, from, to); !slices.Equal(errs, []string{want}) {
		t.Errorf("%s: %q, want %q", what, errs, want)
	}
}

// assertHops has traceroute print the way to a Service's port.
func (s *served) assertHops(t *testing.T, to netip.AddrPort, want []netip.Addr) {
	t.Helper()
	var hops []string
	for i, hop := range want {
		hops = append(hops, fmt.Sprintf("%d %s", i+1, hop))
	}
	for _, how := range []string{"-T", "-U"} {
		out := run(t, s.client.Namespace, "traceroute", how, "-p", strconv.Itoa(int(to.Port())), "-n", "-q", "1", "-N", "1", "-w", "1", "-m", strconv.Itoa(len(hops)), to.Addr().String())
		got := found(out, `(?m)^ *(\d+)  (\S+)  [\d.]+ ms`)
		if how == "-U" { // the backend answers, if at all, what is no datagram for it
			got, hops = got[:min(len(got), len(hops)-1)], hops[:len(hops)-1]
		}
		if !slices.Equal(got, hops) {
			t.Errorf("traceroute %s: the hops %q, want %q:\n%s", how, got, hops, out)
		}
	}
}

// A datagram that is too big for the tunnel to the backend's node: the Service says so.
func TestServiceTooBig(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		s := startServed(t, lab.Options{Families: families, AgentFlags: []string{attach, "--routing-mode=vxlan", "--mtu=1500"}}, drops.TooBig)
		s.set(t, s.spec("far", s.far))
		overEachFamily(t, s.Lab, func(t *testing.T, family wire.Family) {
			to := s.at("far", family)
			capture, err := s.client.Capture(s.client.IfName)
			if err != nil {
				t.Fatal(err)
			}
			conn := dontFragment(t, s.client.Namespace, to)
			if _, err := conn.Write(make([]byte, widest-headers[family])); err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, unix.EMSGSIZE) {
				t.Errorf("what no tunnel carries: %v", err)
			}
			assertQuotes(t, "too big", capture, lab.TooBig[family], to.Addr(), to)
			assertUDP(t, s.client.Namespace, to, 1400, 9000)
			if _, err := s.client.Transfer(t.Context(), to, 4<<20); err != nil {
				t.Error(err)
			}
		})
	})
}

package e2e

import (
	"errors"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// askNodePorts asks on the node's addresses and on those of the loopback interface that --nodeport-addresses names. No
// externalTrafficPolicy binds them.
func askNodePorts(t *testing.T, s *served, p *lab.Process, family wire.Family) {
	const nodePort = 30080
	node := s.Nodes[0]
	web := s.spec("web", s.far)
	web.NodePort, web.ExternalLocal = nodePort, true
	s.set(t, web)
	loopbacks := [wire.Families][]string{wire.IPv4: {"127.0.0.1", "127.8.9.10", "0.0.0.0", "::ffff:127.0.0.1"}, wire.IPv6: {"::1", "::"}}
	own := []netip.Addr{node.AddrOf(family)}
	for _, text := range loopbacks[family] {
		own = append(own, netip.MustParseAddr(text))
	}
	for _, at := range own {
		if family == wire.IPv6 && at != node.AddrOf(family) {
			assertClosed(t, p, at, nodePort)
			continue
		}
		to := netip.AddrPortFrom(at, nodePort)
		for how, by := range map[string]netip.AddrPort{"TCP": asTCP(t, p, to), "UDP": asUDP(t, p, to), "datagram": openLoose(t, p, at).ask(t, to)} {
			if by.Addr() != s.far.AddrOf(family) {
				t.Errorf("the NodePort at %s is answered by %v, %s", at, by, how)
			}
		}
	}
	// Other ports are whose they were.
	for _, at := range own[:2] {
		conn, err := p.DialTCP(t.Context(), netip.AddrPortFrom(at, backendPort))
		if err != nil || conn.By.Addr() != at {
			t.Fatalf("another port of %s: %+v, %v", at, conn, err)
		}
		conn.Close()
		assertClosed(t, p, at, closedPort)
	}
}

// assertClosed asserts that nobody listens on a port, as a process sees it.
func assertClosed(t *testing.T, p *lab.Process, at netip.Addr, port uint16) {
	t.Helper()
	if conn, err := p.Dial(unix.SOCK_STREAM, netip.AddrPortFrom(at, port)); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("port %d of %s: %v, %v", port, at, conn, err)
	}
}

// askLoadBalancers asks some that are not for everybody: the node's InternalIP counts.
func askLoadBalancers(t *testing.T, s *served, p *lab.Process, family wire.Family) {
	node := s.Nodes[0]
	balancers := [wire.Families]netip.Addr{wire.IPv4: netip.MustParseAddr("192.0.2.77"), wire.IPv6: netip.MustParseAddr("2001:db8:77::1")}
	web := s.spec("web", s.far)
	web.LoadBalancerIPs = balancers[:]
	for _, c := range []struct {
		who  string
		of   func(wire.Family) netip.Addr
		want error
	}{
		{"others", func(f wire.Family) netip.Addr { return s.Nodes[1].AddrOf(f) }, unix.EPERM},
		{"the node", node.AddrOf, nil},
	} {
		web.SourceRanges = nil
		for family := range wire.Families {
			web.SourceRanges = append(web.SourceRanges, netip.PrefixFrom(c.of(family), c.of(family).BitLen()))
		}
		s.set(t, web)
		conn, err := p.Dial(unix.SOCK_STREAM, netip.AddrPortFrom(balancers[family], servicePort))
		if !errors.Is(err, c.want) {
			t.Errorf("for %s alone: %v, want %v", c.who, err, c.want)
		}
		if conn != nil {
			conn.Close()
		}
		if by := asTCP(t, p, s.at("web", family)); by.Addr() != s.far.AddrOf(family) {
			t.Errorf("the ClusterIP is answered by %v", by)
		}
	}
}

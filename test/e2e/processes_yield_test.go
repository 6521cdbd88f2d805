package e2e

import (
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// TestProcessesOfKubeProxy: while kube-proxy has a family's Services, sockets that know a Service keep their backend, whatever others
// ask for goes out as it is, and nothing is refused. No agent is there to tell the programs otherwise.
func TestProcessesOfKubeProxy(t *testing.T) {
	t.Parallel()
	s := startServed(t, lab.Options{Families: families}, drops.NoService, drops.NoServicePort)
	node := s.Nodes[0]
	s.set(t, s.spec("web", s.near), s.spec("fresh", s.far))
	if err := node.KillAgent(); err != nil {
		t.Fatal(err)
	}
	overEachFamily(t, s.Lab, func(t *testing.T, family wire.Family) {
		p, to, fresh := startProcess(t, node, node.Namespace), s.at("web", family), s.at("fresh", family)
		loose := openLoose(t, p, to.Addr())
		loose.ask(t, to)
		stream, err := p.DialTCP(t.Context(), to)
		if err != nil {
			t.Fatal(err)
		}
		defer stream.Close()

		setFlags(t, node, [wire.Families]config.Flags{config.YieldsIPv4, config.YieldsIPv6}[family], 0)
		defer setFlags(t, node, 0, config.YieldsIPv4|config.YieldsIPv6)
		if by := loose.ask(t, to); by.Addr() != s.near.AddrOf(family) {
			t.Errorf("a known datagram is answered by %v", by)
		}
		if err := stream.Echo(t.Context(), 1000); err != nil {
			t.Errorf("a connection: %v", err)
		}
		loose.send(t, fresh)
		closed := netip.AddrPortFrom(fresh.Addr(), 9)
		loose.send(t, closed)
		other := openLoose(t, p, to.Addr())
		other.connect(t, fresh)
		if known := cookies(t, node); slices.Contains(known, cookieOf(t, other.fd)) || !slices.Contains(known, cookieOf(t, loose.fd)) {
			t.Errorf("known are %v; of %d and %d the latter alone should be", known, cookieOf(t, other.fd), cookieOf(t, loose.fd))
		}

		setFlags(t, node, 0, config.YieldsIPv4|config.YieldsIPv6)
		if by := loose.ask(t, fresh); by.Addr() != s.far.AddrOf(family) {
			t.Errorf("afterwards: answered by %v", by)
		}
		if err := unix.Sendto(loose.fd, who, 0, lab.Sockaddr(closed)); err == nil {
			t.Error("afterwards a port that no Service has is not refused")
		}
	})
}

// setFlags changes what the node's programs are told.
func setFlags(t *testing.T, node *lab.Node, set, unset config.Flags) {
	t.Helper()
	m, err := config.Open(bpffs.Dir(node.BPFFS()).Map(config.Name))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	v, err := m.Get(config.Key{})
	if err != nil {
		t.Fatal(err)
	}
	v.Flags = v.Flags&^unset | set
	if err := m.Put(config.Key{}, v); err != nil {
		t.Fatal(err)
	}
}

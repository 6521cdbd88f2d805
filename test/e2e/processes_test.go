package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// Services that the node's own processes reach, by the programs on its cgroup.

// TestProcessesReachServices tells each story in one cluster, in each family.
func TestProcessesReachServices(t *testing.T) {
	t.Parallel()
	s := startServed(t, lab.Options{Families: families, AgentFlags: []string{"--nodeport-addresses=0.0.0.0/0,fd00::/8"}},
		drops.NoBackend, drops.NoServicePort, drops.NoLocalBackend, drops.SourceRange)
	for _, story := range processStories {
		t.Run(story.name, func(t *testing.T) {
			overEachFamily(t, s.Lab, func(t *testing.T, family wire.Family) {
				s.specs = nil
				story.tell(t, s, startProcess(t, s.Nodes[0], s.Nodes[0].Namespace), family)
			})
		})
	}
}

// processStories are of a process of the first node's.
var processStories = []struct {
	name string
	tell func(*testing.T, *served, *lab.Process, wire.Family)
}{
	{"every backend", askEveryBackend},
	{"many Services", askManyServices},
	{"straight", goStraight},
	{"others", processesOfOthers},
	{"refused", areRefused},
	{"one backend", keepTheirBackend},
	{"node ports", askNodePorts},
	{"load balancers", askLoadBalancers},
	{"backends that go", leaveABackend},
}

// askEveryBackend of a Service, of every kind, by every kind of socket.
func askEveryBackend(t *testing.T, s *served, p *lab.Process, family wire.Family) {
	backers := map[string]backer{"near": s.near, "far": s.far, "own": s.Nodes[0], "node": s.Nodes[1], "outside": outside{s.Outside}}
	var specs []lab.ServiceSpec
	for name, b := range backers {
		specs = append(specs, s.spec(name, b))
	}
	s.set(t, specs...)
	t.Run("sockets", func(t *testing.T) { // which are closed at its end
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
	if left := cookies(t, s.Nodes[0]); len(left) > 0 {
		t.Errorf("sockets that are closed are known: %v", left)
	}
}

// askManyServices asks them by one socket, as resolvers do: each answer is the Service's that was asked, and one socket takes
// the room of few.
func askManyServices(t *testing.T, s *served, p *lab.Process, family wire.Family) {
	node := s.Nodes[0]
	backers := []backer{s.near, s.far, node, s.Nodes[1]}
	var specs []lab.ServiceSpec
	for i := range 12 {
		specs = append(specs, s.spec(fmt.Sprintf("s%d", i), backers[i%len(backers)]))
	}
	s.set(t, specs...)
	at := func(i int) netip.AddrPort { return s.at(fmt.Sprintf("s%d", i), family) }
	socket := openLoose(t, p, at(0).Addr())
	var asked, answered []string
	for i := range backers {
		asked = append(asked, fmt.Sprint(lab.Sockaddr(at(i))))
		socket.send(t, at(i))
	}
	for range backers {
		answered = append(answered, socket.sender(t))
	}
	slices.Sort(asked)
	slices.Sort(answered)
	if !slices.Equal(asked, answered) {
		t.Errorf("of %v have answered %v", asked, answered)
	}
	for i := range specs {
		socket.send(t, at(i))
	}
	if known := cookies(t, node); len(known) != len(backers) {
		t.Errorf("one socket has %d entries: %v", len(known), known)
	}
}

// goStraight goes to a backend by a socket that has talked to its Service: then nothing stands for the backend.
func goStraight(t *testing.T, s *served, p *lab.Process, family wire.Family) {
	node := s.Nodes[0]
	s.set(t, s.spec("near", s.near))
	to, straight := s.at("near", family), s.near.Endpoint(family, backendPort).At
	for how, begin := range map[string]func(looseSocket){
		"connected": func(d looseSocket) { d.connect(t, to) },
		"asked":     func(d looseSocket) { d.ask(t, to) },
	} {
		socket := openLoose(t, p, to.Addr())
		begin(socket)
		socket.connect(t, straight)
		if cookie := cookieOf(t, socket.fd); slices.Contains(cookies(t, node), cookie) {
			t.Errorf("a socket that has %s a Service is known still", how)
		}
		// And one that is connected straight may ask the Service by a datagram.
		socket.send(t, to)
		socket.connected(t, straight)
		socket.connect(t, to)
	}
}

// processesOfOthers are untouched: of the machine, beside the node's cgroup; and in it, but in another network namespace. Those
// of pods in the host's network are the node's own.
func processesOfOthers(t *testing.T, s *served, p *lab.Process, family wire.Family) {
	node := s.Nodes[0]
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
	pod := filepath.Join(node.Cgroup(), "pod")
	if err := os.Mkdir(pod, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := priv.RemoveCgroup(pod); err != nil {
			t.Error(err)
		}
	})
	below := startProcess(t, node, node.Namespace)
	if err := below.Join(pod); err != nil {
		t.Fatal(err)
	}
	elsewhere := startProcess(t, node, s.client.Namespace)
	ours := map[string]uint64{
		"a process of the node's":            connected(func() (net.Conn, error) { return p.Dial(unix.SOCK_DGRAM, to) }),
		"one of a pod in the host's network": connected(func() (net.Conn, error) { return below.Dial(unix.SOCK_DGRAM, to) }),
	}
	others := map[string]uint64{
		"a process beside the cgroup":      connected(func() (net.Conn, error) { c, err := node.DialUDP(to, 0); return c.UDPConn, err }),
		"one in another network namespace": connected(func() (net.Conn, error) { return elsewhere.Dial(unix.SOCK_DGRAM, to) }),
		"one of another node":              connected(func() (net.Conn, error) { return startProcess(t, s.Nodes[1], node.Namespace).Dial(unix.SOCK_DGRAM, to) }),
	}
	known := cookies(t, node)
	for what, cookie := range ours {
		if !slices.Contains(known, cookie) {
			t.Errorf("%s is not among those known: %v", what, known)
		}
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

// areRefused: who cannot be served is told so at once, and why.
func areRefused(t *testing.T, s *served, p *lab.Process, family wire.Family) {
	node := s.Nodes[0]
	local := s.spec("local", s.far)
	local.InternalLocal = true
	s.set(t, s.spec("empty"), local)
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
}

// keepTheirBackend: by sessionAffinity, and by each socket that is connected to nobody.
func keepTheirBackend(t *testing.T, s *served, p *lab.Process, family wire.Family) {
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

package e2e

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// leaveABackend: sockets leave one that answers no more, and not before: one that waits on a connected socket is freed, the next datagram of another
// goes elsewhere, and a connection goes on.
func leaveABackend(t *testing.T, s *served, p *lab.Process, family wire.Family) {
	s.set(t, s.spec("web", s.near), s.spec("other", s.near))
	to, other := s.at("web", family), s.at("other", family)
	open := func(to netip.AddrPort) net.Conn {
		t.Helper()
		conn, err := p.Dial(unix.SOCK_DGRAM, to)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	waits, stays, straight := open(to), open(other), open(s.near.Endpoint(family, backendPort).At)
	loose, turned := openLoose(t, p, to.Addr()), openLoose(t, p, to.Addr())
	loose.ask(t, to)
	turned.connect(t, to)
	turned.connect(t, s.near.Endpoint(family, backendPort).At)
	stream, err := p.DialTCP(t.Context(), to)
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()

	moved := changed(s.named("web"), func(e *lab.EndpointSpec) { e.Terminating = true })
	moved.Endpoints = append(moved.Endpoints, s.inEachFamily(s.far)...)
	s.set(t, moved)
	for what, by := range map[string]netip.AddrPort{"connected": ask(t, waits, to), "loose": loose.ask(t, to)} {
		if by.Addr() != s.near.AddrOf(family) {
			t.Errorf("while its backend terminates, a %s socket is answered by %v", what, by)
		}
	}
	moved.Endpoints = s.inEachFamily(s.far)
	s.set(t, moved)
	if err := waits.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := waits.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNABORTED) {
		t.Errorf("who waits for the backend that is gone is told: %v", err)
	}
	for what, by := range map[string]netip.AddrPort{"another Service of the backend": ask(t, stays, other), "the backend itself": ask(t, straight, s.near.Endpoint(family, backendPort).At)} {
		if by.Addr() != s.near.AddrOf(family) {
			t.Errorf("a socket connected to %s is answered by %v", what, by)
		}
	}
	turned.connected(t, s.near.Endpoint(family, backendPort).At)
	if by := loose.ask(t, to); by.Addr() != s.far.AddrOf(family) {
		t.Errorf("a socket connected to nobody is answered by %v", by)
	}
	if err := stream.Echo(t.Context(), 1000); err != nil {
		t.Error(err)
	}
}

// socketPins are the pinned links of programs on a node's cgroup.
func socketPins(t *testing.T, node *lab.Node) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(node.BPFFS(), "links", "cgroup_*"))
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestProcessesOutliveTheAgent, its upgrades, and whoever removes the programs, until cleanup.
func TestProcessesOutliveTheAgent(t *testing.T) {
	t.Parallel()
	s := startServed(t, lab.Options{})
	node, family := s.Nodes[0], firstFamily(s.Lab)
	p := startProcess(t, node, node.Namespace)
	s.set(t, s.spec("near", s.near))
	to := s.at("near", family)
	stop, ended := make(chan struct{}), make(chan int)
	go func() {
		n := 0
		defer func() { ended <- n }()
		for ; ; n++ {
			select {
			case <-stop:
				return
			default:
				asTCP(t, p, to)
				time.Sleep(10 * time.Millisecond) // and leaves the processors to the verifier
			}
		}
	}()
	for range 2 { // to other programs in other maps, then with nothing changed
		if err := node.KillAgent(); err != nil {
			t.Fatal(err)
		}
		if by := asUDP(t, startProcess(t, node, node.Namespace), to); by.Addr() != s.near.AddrOf(family) {
			t.Errorf("without an agent: answered by %v", by)
		}
		if err := errors.Join(node.StartAgent("--attach=clsact", "--snat-entries=100000"), node.WaitReady(within(t, readyLimit))); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	if n := <-ended; n < 20 {
		t.Errorf("only %d connections meanwhile", n)
	}

	pins := socketPins(t, node)
	if len(pins) != len(attach.SocketHooks()) {
		t.Fatalf("pinned are %v", pins)
	}
	for _, pin := range pins {
		if err := os.Remove(pin); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, 5*time.Second, "the programs are back", func() bool { return cmp.Equal(socketPins(t, node), pins) })
	asTCP(t, p, to)

	if _, err := node.StopAgent(); err != nil {
		t.Fatal(err)
	}
	if err := cleanup(t, node); err != nil {
		t.Fatal(err)
	}
	conn, err := p.Dial(unix.SOCK_DGRAM, to)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write(bytes.Clone(who)); err == nil {
		_ = conn.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
		if _, err = conn.Read(make([]byte, 200)); err == nil {
			t.Error("a Service is served after cleanup")
		}
	}
	if status, err := os.ReadFile(node.AgentLog()); err != nil || strings.Contains(string(status), "level=ERROR") {
		t.Errorf("the log has errors, %v", err)
	}
}

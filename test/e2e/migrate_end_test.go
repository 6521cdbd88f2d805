package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// forsaken are flows that kube-proxy has led to a backend that is to end when the programs serve.
type forsaken struct {
	streams   map[string]*lab.TCPConn
	datagrams map[string]*lab.UDPConn
}

// forsake opens them: of a pod, and of a client outside by either node.
func (m *migration) forsake(t *testing.T) *forsaken {
	t.Helper()
	f := &forsaken{streams: map[string]*lab.TCPConn{}, datagrams: map[string]*lab.UDPConn{}}
	for _, family := range families {
		s := m.service(family, "mortal")
		for name, w := range map[string]trip{
			"a pod":                   {from: callerIn(m.client.Namespace), to: s.cluster},
			"outside, by node 1":      {from: callerIn(m.Outside), to: netip.AddrPortFrom(m.Nodes[0].AddrOf(family), s.nodePort)},
			"outside, by the backend": {from: callerIn(m.Outside), to: netip.AddrPortFrom(m.Nodes[1].AddrOf(family), s.nodePort)},
		} {
			name = family.String() + ", " + name
			stream, err := w.from.tcp(t.Context(), w.to)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			datagram, err := w.from.udp(w.to)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			t.Cleanup(func() { stream.Close(); datagram.Close() })
			f.streams[name], f.datagrams[name] = stream, datagram
		}
	}
	f.assertAlive(t)
	return f
}

func (f *forsaken) assertAlive(t *testing.T) {
	t.Helper()
	for name, stream := range f.streams {
		if err := stream.Echo(t.Context(), 100); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, datagram := range f.datagrams {
		if _, err := datagram.Echo(t.Context(), 100); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// assertNoticed ends the backend, whose flows the programs have taken over: connections are reset, datagrams go to the next backend.
func (f *forsaken) assertNoticed(t *testing.T, m *migration) {
	t.Helper()
	f.assertAlive(t)
	mortal := slices.Index(migrated, "mortal")
	heir := func(family wire.Family) netip.AddrPort { return m.heir.Endpoint(family, migratedPort(mortal+1)).At }
	for _, family := range families {
		m.services[family][mortal].endpoint = heir(family)
	}
	m.tell(t)
	for _, family := range families {
		to, heir := m.service(family, "mortal").cluster, heir(family)
		eventually(t, changeLimit, "the heir serves", func() bool {
			by, err := m.client.AskUDP(within(t, answerLimit), to)
			return err == nil && by == heir
		})
	}
	if err := m.Nodes[1].DelPod(t.Context(), m.mortal); err != nil {
		t.Fatal(err)
	}
	for name, stream := range f.streams {
		if err := stream.Echo(within(t, answerLimit), 100); !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
			t.Errorf("%s: a connection whose backend is gone is told %v, want that it is reset", name, err)
		}
	}
	for name, datagram := range f.datagrams {
		if _, err := datagram.Echo(within(t, answerLimit), 100); err != nil {
			t.Errorf("%s: datagrams go to a backend that is gone: %v", name, err)
		}
	}
}

// assertNothingDead looks for connections that are closed, and that a table takes for open.
func (m *migration) assertNothingDead(t *testing.T) {
	t.Helper()
	for _, node := range m.Nodes {
		eventually(t, answerLimit, "no table of "+node.Name+" has an open connection", func() bool { return len(openConnections(t, node)) == 0 })
		if left := openConnections(t, node); len(left) > 0 {
			t.Errorf("%s: %d connections are open, the first:\n%s", node.Name, len(left), strings.Join(left[:min(len(left), 10)], "\n"))
		}
	}
}

// toService is what conntrack says of a packet to a Service's address or a node port, and not of one to a backend.
var toService = regexp.MustCompile(fmt.Sprintf(`^.*?dport=(%d|3001\d) `, servicePort))

// openConnections are those to Services that the programs, or netfilter, take for open.
func openConnections(t *testing.T, node *lab.Node) (all []string) {
	t.Helper()
	for key, value := range content[snat.Key, snat.Value](t, node, snat.Name) {
		if key.Proto == wire.TCP && value.Flags&flow.Service != 0 && value.State&(flow.FIN|flow.Reset) == 0 {
			all = append(all, fmt.Sprintf("ours: %v %+v", key, value))
		}
	}
	for _, family := range []string{"ipv4", "ipv6"} {
		out, err := node.Exec(context.WithoutCancel(t.Context()), "conntrack", "-L", "-f", family, "-p", "tcp", "--state", "ESTABLISHED")
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(out)) {
			if toService.MatchString(line) {
				all = append(all, "netfilter's: "+strings.TrimSpace(line))
			}
		}
	}
	return all
}

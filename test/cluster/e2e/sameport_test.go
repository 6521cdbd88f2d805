package e2e

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// From one port a pod talks to a Service, then to the same backend directly: netfilter, which has the first, moves the second
// to another port, and neither disturbs the other.
func testSamePort(t *testing.T, s *stage) {
	for _, backend := range []*cluster.Pod{s.near, s.far} {
		to := addService(t, s.standing, "same-port-"+backend.Name, behind(backend.Name)).byAddr(t)
		for _, from := range []*cluster.Pod{s.client, s.far} {
			if from == backend {
				continue
			}
			what := from.Name + " to " + backend.Name
			if err := answers(t, what, from, to); err != nil {
				t.Error(err)
				continue
			}
			port := newPort()
			samePortTCP(t, what, from, port, to.tcp, podPorts(backend.Addr).tcp)
			samePortUDP(t, what, from, port, to.udp, podPorts(backend.Addr).udp)
		}
	}
}

func samePortTCP(t *testing.T, what string, from *cluster.Pod, port uint16, ways ...string) {
	t.Helper()
	type stream struct {
		net.Conn
		reader *bufio.Reader
	}
	var streams []stream
	for i, to := range ways {
		conn, err := from.DialFrom(within(t, answerLimit), port, "tcp", to)
		if err != nil {
			t.Errorf("%s: connect to %s: %v", what, to, err)
			return
		}
		t.Cleanup(func() { conn.Close() })
		streams = append(streams, stream{conn, bufio.NewReader(conn)})
		got, err := get(conn, streams[i].reader, "/clientip")
		isClient(t, what+" over TCP", got, err, from.Addr)
		if seen, err := netip.ParseAddrPort(got); err == nil && (seen.Port() == port) != (i == 0) {
			t.Errorf("%s: %s sees port %d of %d, want another one only for the second connection", what, to, seen.Port(), port)
		}
	}
	for i := range 10 {
		for _, each := range streams {
			if err := request(each, each.reader, fmt.Sprint("m", i)); err != nil {
				t.Errorf("%s over TCP: %v", what, err)
			}
		}
	}
}

func samePortUDP(t *testing.T, what string, from *cluster.Pod, port uint16, ways ...string) {
	t.Helper()
	var flows []net.Conn
	for _, to := range ways {
		// Connected: it takes answers from nobody else.
		conn, err := from.DialFrom(t.Context(), port, "udp", to)
		if err != nil {
			t.Errorf("%s: %v", what, err)
			return
		}
		t.Cleanup(func() { conn.Close() })
		flows = append(flows, conn)
	}
	for i := range 10 {
		for _, flow := range flows {
			if err := echo(flow, fmt.Sprint("m", i)); err != nil {
				t.Errorf("%s over UDP to %s: %v", what, flow.RemoteAddr(), err)
			}
		}
	}
}

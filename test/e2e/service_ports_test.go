package e2e

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// One port of a client to three Services of one backend, and to the backend itself, opened in any order: four connections live.
func onePort(t *testing.T, s *served) func(*testing.T, wire.Family) {
	for _, of := range []struct {
		name string
		pod  *lab.Pod
	}{{"near", s.near}, {"far", s.far}} {
		for i := range 3 {
			s.set(t, s.spec(fmt.Sprintf("%s%d", of.name, i), of.pod))
		}
	}
	port := uint16(20000)
	return func(t *testing.T, family wire.Family) {
		for name, pod := range map[string]*lab.Pod{"near": s.near, "far": s.far} {
			all := []netip.AddrPort{pod.Endpoint(family, backendPort).At}
			for i := range 3 {
				all = append(all, s.at(fmt.Sprintf("%s%d", name, i), family))
			}
			for _, order := range permutations(all) {
				port++
				s.assertOnePort(t, order, port)
			}
		}
	}
}

// assertOnePort opens TCP connections and UDP sockets of one port to some addresses, in their order, and has all live.
func (s *served) assertOnePort(t *testing.T, order []netip.AddrPort, port uint16) {
	t.Helper()
	var streams []*lab.TCPConn
	var packets []*lab.UDPConn
	defer func() {
		closeAll(streams)
		for _, conn := range packets {
			conn.Close()
		}
	}()
	for _, to := range order {
		stream, err := s.client.DialTCP(within(t, answerLimit), to, port)
		if err != nil {
			t.Errorf("one port in the order %v: %v", order, err)
			return
		}
		streams = append(streams, stream)
		conn, err := s.client.DialUDP(to, port)
		if err != nil {
			t.Fatal(err)
		}
		packets = append(packets, conn)
		// Each time, all that are there: a newer flow must not have taken an older one's answers.
		for i := range streams {
			if err := streams[i].Echo(within(t, answerLimit), 1000); err != nil {
				t.Errorf("one port in the order %v: %v", order, err)
			}
			if _, err := packets[i].Echo(within(t, answerLimit), 100); err != nil {
				t.Errorf("one port in the order %v: %v", order, err)
			}
		}
	}
}

// permutations are all orders.
func permutations[T any](all []T) (orders [][]T) {
	if len(all) == 0 {
		return [][]T{nil}
	}
	for i, first := range all {
		rest := append(append([]T(nil), all[:i]...), all[i+1:]...)
		for _, order := range permutations(rest) {
			orders = append(orders, append([]T{first}, order...))
		}
	}
	return orders
}

// A Service whose internal policy is Local has the node's own backends, and where there is none nobody answers.
func localPolicy(t *testing.T, s *served) func(*testing.T, wire.Family) {
	here, away := s.spec("here", s.near, s.far), s.spec("away", s.far)
	here.InternalLocal, away.InternalLocal = true, true
	s.set(t, here, away)
	return func(t *testing.T, family wire.Family) {
		for range 20 { // by chance, far would be meant by one of them
			conn, err := s.client.DialTCP(t.Context(), s.at("here", family), 0)
			if err != nil {
				t.Fatal(err)
			}
			conn.Close()
			if want := s.near.Endpoint(family, backendPort).At; conn.By != want {
				t.Errorf("a Service whose policy is Local is served by %s", conn.By)
			}
		}
		before := dropped(t, s.Nodes[0], drops.NoLocalBackend)
		prober := s.client.ProbeTCP(s.at("away", family), 10, refusedAtOnce)
		eventually(t, answerLimit, "the drop is counted", func() bool { return dropped(t, s.Nodes[0], drops.NoLocalBackend) > before })
		if probes := prober.Stop(); probes.Lost() != len(probes) {
			t.Errorf("a Service whose policy is Local without a backend here: %v", probes)
		}
	}
}

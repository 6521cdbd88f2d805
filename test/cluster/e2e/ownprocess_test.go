package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"

	core "k8s.io/api/core/v1"
)

// loopbacks are what a node's processes may call their node.
var loopbacks = map[core.IPFamily]netip.Addr{
	core.IPv4Protocol: netip.MustParseAddr("127.0.0.1"), core.IPv6Protocol: netip.IPv6Loopback(),
}

// onLoopback are a Service's ports of the node that asks itself.
func (v service) onLoopback(family core.IPFamily) target {
	addr := loopbacks[family]
	return target{at(addr, uint16(v.Spec.Ports[0].NodePort)), at(addr, uint16(v.Spec.Ports[1].NodePort))}
}

// A node's own processes reach its ports also as those of the loopback interface. kube-proxy does that in one of its modes, for one family.
func testNodePortsOnLoopback(t *testing.T, s *stage) {
	var visits []visit
	for _, backend := range s.backends() {
		to := addService(t, s.standing, "loopback-"+backend.Name, behind(backend.Name)).onLoopback(s.Family())
		for _, node := range s.Nodes {
			from := client{node.Name, node, node.Addr, node}
			visits = append(visits, visit{fmt.Sprintf("%s to %s by its loopback address", node.Name, backend.Name), from, to, s.seen(from, backend, to)})
		}
	}
	makeVisits(t, visits)
}

// The programs for a node's own processes are on its cgroup, which is below the machine's: who is outside of that, be it in the node's
// network, is none of theirs.
func ownProcessesOnly(t *testing.T, s *standing) {
	t.Helper()
	for _, node := range s.Nodes {
		to := s.behind.onLoopback.tcp
		if _, err := ask(t.Context(), node, to, "/hostname"); err != nil {
			t.Errorf("a process of %s: %v", node.Name, err)
		}
		err := node.Do(func() error {
			conn, err := new(net.Dialer).DialContext(within(t, answerLimit), "tcp", to)
			if err == nil {
				err = conn.Close()
			}
			return err
		})
		if !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("a process outside of the cgroup of %s: error %v, want it refused", node.Name, err)
		}
	}
}

package e2e

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// Connections go on to a backend that is not ready, terminating, or in no slice, and are reset when it is known to be gone.
func leavingBackends(t *testing.T, s *served) func(*testing.T, wire.Family) {
	return func(t *testing.T, family wire.Family) {
		for i, node := range s.Nodes {
			s.assertLeaves(t, node, fmt.Sprintf("leaving%d%d", i, family), family)
		}
		s.assertLostNode(t, family)
	}
}

func (s *served) assertLeaves(t *testing.T, node *lab.Node, name string, family wire.Family) {
	t.Helper()
	pod := addPod(t, node, fmt.Sprintf("leaving%d", family))
	serveBackend(t, pod.Namespace)
	spec := s.spec(name, pod)
	s.set(t, spec)
	conn, err := s.client.DialTCP(t.Context(), s.at(name, family), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	alive := func(when string) {
		t.Helper()
		if err := conn.Echo(within(t, answerLimit), 1000); err != nil {
			t.Errorf("%s: %v", when, err)
		}
	}
	s.set(t, changed(spec, func(e *lab.EndpointSpec) { e.NotReady = true }))
	alive("not ready")
	s.assertRefused(t, s.at(name, family))
	s.set(t, changed(spec, func(e *lab.EndpointSpec) { e.Terminating = true }))
	alive("terminating")
	if _, err := s.client.TCP(t.Context(), s.at(name, family)); err != nil {
		t.Errorf("all that serve are terminating: %v", err)
	}
	spec.Endpoints = nil
	s.set(t, spec)
	alive("in no slice")
	s.assertRefused(t, s.at(name, family))
	if err := node.DelPod(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	if err := conn.Echo(within(t, time.Second), 1000); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("its pod is gone from %s: %v, want connection reset", node.Name, err)
	}
}

// changed is a Service whose endpoints are all changed.
func changed(spec lab.ServiceSpec, change func(*lab.EndpointSpec)) lab.ServiceSpec {
	spec.Endpoints = slices.Clone(spec.Endpoints)
	for i := range spec.Endpoints {
		change(&spec.Endpoints[i])
	}
	return spec
}

// assertLostNode: of a node that has vanished, new flows and datagrams go elsewhere as soon as no EndpointSlice has its pods, and
// connections end when the cluster has it no more.
func (s *served) assertLostNode(t *testing.T, family wire.Family) {
	t.Helper()
	lost, both := s.spec("lost", s.far), s.spec("both", s.near, s.far)
	s.set(t, lost, both)
	conn, err := s.client.DialTCP(t.Context(), s.at("lost", family), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	datagrams, err := s.client.ProbeUDP(s.at("both", family), 7200, 1000)
	if err != nil {
		t.Fatal(err)
	}
	connect := s.connects(t, s.at("both", family))
	time.Sleep(moment)
	plug, err := s.Nodes[1].Unplug()
	if err != nil {
		t.Fatal(err)
	}
	lost.Endpoints, both.Endpoints = nil, s.inEachFamily(s.near)
	var turns changes
	turns.make(s.stage(t, lost, both))
	time.Sleep(moment)
	for _, probes := range append(connect(), datagrams.Stop()) {
		turns.assertFollowed(t, "a node is lost", probes, func(_ int, after lab.Probes) int {
			for i, p := range slices.Backward(after) {
				if p.By != s.near.Endpoint(family, backendPort).At || p.Ended.Sub(p.Sent) > moment { // asked twice
					return i + 1
				}
			}
			return 0
		})
	}
	nodes := s.NodeSpecs()
	if err := s.WriteNodes(nodes[0]); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(plug(), s.WriteNodes(nodes...)); err != nil {
			t.Fatal(err)
		}
		eventually(t, changeLimit, "the node is back", func() bool {
			_, err := s.client.Ping(within(t, 100*time.Millisecond), s.far.AddrOf(family), lab.PingOptions{})
			return err == nil
		})
	}()
	eventually(t, changeLimit, "the connection is reset", func() bool {
		return errors.Is(conn.Echo(within(t, 100*time.Millisecond), 100), unix.ECONNRESET)
	})
}

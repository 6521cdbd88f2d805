package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// assertRefusedPort has a pod ask for host ports that it must not get, and reads why.
func (h *hosted) assertRefusedPort(t *testing.T, why string, asked ...lab.HostPort) {
	t.Helper()
	pod, err := h.node.AddPod(t.Context(), "refused", lab.PodOptions{HostPorts: asked})
	if err == nil {
		t.Errorf("a pod has got %v", asked)
		err = h.node.DelPod(t.Context(), pod)
	} else if strings.Contains(err.Error(), why) {
		return
	}
	t.Errorf("%v: %v, want an error that says %q", asked, err, why)
}

// setHere sets Services where the node alone serves them.
func (h *hosted) setHere(t *testing.T, s *served, specs ...lab.ServiceSpec) {
	t.Helper()
	s.stage(t, specs...)()
	eventually(t, changeLimit, "the node has the Services", func() bool { return hasFrontends(t, h.node, append(s.specs, s.marker())) })
}

// assertGuarded: the ports of the node's own processes are no pod's, at any address, but for those of an API server at its own.
func (h *hosted) assertGuarded(t *testing.T) {
	const later = 32105
	s := newServed(h.Lab)
	api, checks := s.spec("kubernetes", h.node), s.spec("checks", h.beside) // this node's process is an API server
	checks.ExternalLocal, checks.HealthCheckPort, checks.LoadBalancerIPs = true, healthCheckPort, balancer[:]
	h.setHere(t, s, api, checks)
	for _, family := range families {
		own := h.node.AddrOf(family)
		for _, at := range [][]netip.Addr{nil, {own}, {loopback[family]}, {everywhere[family].Addr()}} {
			h.assertRefusedPort(t, "is taken by the kubelet", ports(10250, tcp, at...)...)
			h.assertRefusedPort(t, "is taken by the health checks of Service default/checks", ports(healthCheckPort, tcp, at...)...)
		}
		h.assertRefusedPort(t, "is taken by the API server at "+netip.AddrPortFrom(own, backendPort).String(), ports(backendPort, tcp, own)...)
	}
	h.assertRefusedPort(t, "is taken by the API server", ports(backendPort, tcp)...)
	for _, port := range []uint16{10256, 10249, 9965} {
		h.assertRefusedPort(t, "is taken by", append(ports(7001, both), ports(port, tcp)...)...)
	}
	beside := addHosted(t, h.node, "unguarded", append(ports(10250, udp), ports(backendPort, tcp, loopback[:]...)...)...)

	checks.HealthCheckPort = later
	first := addHosted(t, h.node, "first", ports(later, tcp)...)
	h.setHere(t, s, checks)
	told := func(want bool) {
		t.Helper()
		eventually(t, changeLimit, fmt.Sprintf("the status tells of the health checks whose port a pod has: %v", want), func() bool {
			out, _ := h.node.Ebpfctl(t.Context(), "status")
			return strings.Contains(string(out), fmt.Sprintf("healthCheckNodePort %d: it is host port", later)) == want
		})
	}
	told(true)
	for _, pod := range []*lab.Pod{first, beside} {
		if err := errors.Join(pod.Check(t.Context()), h.node.DelPod(t.Context(), pod)); err != nil {
			t.Error(err)
		}
	}
	told(false)
	p := startProcess(t, h.node, h.node.Namespace)
	process := func(_ context.Context, _, to string) (net.Conn, error) {
		return p.Dial(unix.SOCK_STREAM, netip.MustParseAddrPort(to))
	}
	for _, family := range families {
		if got := get(t, process, h.node.AddrOf(family), later, "/"); !strings.Contains(got.body, "checks") {
			t.Errorf("health checks are answered with %s, %q", got.Status, got.body)
		}
	}
}

// assertSocketsHave: a port that a socket of the node has is no pod's, until that is closed.
func (h *hosted) assertSocketsHave(t *testing.T) {
	const port = 8095
	for what, at := range map[string][]netip.Addr{"all addresses": nil, "its own addresses": h.node.Addrs()} {
		open := func() (*lab.Server, error) { return h.node.ServeAt(port, at...) }
		if at == nil {
			open = func() (*lab.Server, error) { return h.node.Serve(port) }
		}
		s, err := open()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		for _, protocol := range both {
			if at == nil { // else the pod has the other addresses
				h.assertRefusedPort(t, "socket of the node", ports(port, []string{protocol})...)
			}
			for _, family := range families {
				h.assertRefusedPort(t, "socket of the node", ports(port, []string{protocol}, h.node.AddrOf(family))...)
			}
		}
		s.Close()
	}
	s, err := h.node.ServeAt(port, loopback[:]...)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	pod := addHosted(t, h.node, "after-sockets", ports(port, both)...)
	for _, family := range families {
		answering{port: {pod, pod}}.assertFrom(t, h.Outside, h.node.AddrOf(family), h.Outside.AddrOf(family))
	}
	if err := h.node.DelPod(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
}

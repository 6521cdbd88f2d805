package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// addForeign makes a Service whose endpoint is no pod: an address outside of the cluster.
func addForeign(t *testing.T, s *stage, name string, endpoint netip.Addr) service {
	t.Helper()
	made := addService(t, s.standing, name, func(spec *core.ServiceSpec) { spec.Selector = nil })
	api, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	slice := &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: map[string]string{discovery.LabelServiceName: name}},
		AddressType: discovery.AddressType(s.Family()),
		Endpoints:   []discovery.Endpoint{{Addresses: []string{endpoint.String()}}},
	}
	for _, port := range made.Spec.Ports {
		slice.Ports = append(slice.Ports, discovery.EndpointPort{
			Name: new(port.Name), Port: new(port.TargetPort.IntVal), Protocol: new(port.Protocol),
		})
	}
	slices := api.DiscoveryV1().EndpointSlices(made.Namespace)
	if _, err := slices.Create(t.Context(), slice, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := slices.Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	return made
}

// An endpoint outside of the cluster sees the node that the client is on, or whose port it has used.
func testForeignEndpoints(t *testing.T, s *stage) {
	foreign := addForeign(t, s, "foreign", s.World())
	var visits []visit
	for _, from := range clients(s.standing) {
		what := from.name + " to an endpoint outside by its Service"
		visits = append(visits, visit{what, from, foreign.byAddr(t), from.node.Addr})
	}
	for _, from := range append(clients(s.standing), outside(s.standing)) {
		for _, node := range s.Nodes {
			what := fmt.Sprintf("%s to an endpoint outside by the ports of %s", from.name, node.Name)
			visits = append(visits, visit{what, from, foreign.byPorts(node), node.Addr})
		}
	}
	makeVisits(t, visits)
}

// What a backend refuses, the client is told: the ICMP error about a translated datagram comes back translated.
func testRefusals(t *testing.T, s *stage) {
	var visits []visit
	for _, backend := range []*cluster.Pod{s.near, s.far} {
		closed := addService(t, s.standing, "closed-"+backend.Name, func(spec *core.ServiceSpec) {
			behind(backend.Name)(spec)
			// The first port answers, and tells when somebody serves the Service.
			spec.Ports[1].TargetPort = intstr.FromInt32(9)
		})
		for _, from := range clients(s.standing) {
			visits = append(visits, visit{what: from.name + " to a closed port of " + backend.Name, from: from, to: closed.byAddr(t)})
		}
		for _, node := range s.Nodes {
			visits = append(visits, visit{
				what: fmt.Sprintf("the world to a closed port of %s by %s", backend.Name, node.Name), from: s.Fabric, to: closed.byPorts(node),
			})
		}
	}
	concurrently(visits, func(v visit) {
		if err := answers(t, v.what, v.from, v.to); err != nil {
			t.Error(err)
			return
		}
		isRefused(t, v)
	})
}

// isRefused sends datagrams until it is told. Kernels send few such errors at a time.
func isRefused(t *testing.T, v visit) {
	t.Helper()
	conn, err := v.from.Dial(t.Context(), "udp", v.to.udp)
	if err != nil {
		t.Errorf("%s: %v", v.what, err)
		return
	}
	defer conn.Close()
	for range 10 {
		if err = conn.SetDeadline(time.Now().Add(500 * time.Millisecond)); err != nil {
			t.Error(err)
			return
		}
		if _, err = conn.Write([]byte("?")); err == nil {
			_, err = conn.Read(make([]byte, 100))
		}
		if errors.Is(err, syscall.ECONNREFUSED) {
			return
		}
	}
	t.Errorf("%s: %v, want that the connection is refused", v.what, err)
}

// The way to an endpoint carries less than the client's link: the one who finds that out tells the client, whose packets
// were to the Service.
func testPathMTU(t *testing.T, s *stage) {
	narrow := netip.MustParseAddr("203.0.113.9")
	configure := func(ctx context.Context, what string) error {
		_, err := s.Fabric.Run(ctx, "ip", "address", what, narrow.String()+"/32", "dev", "lo")
		for _, node := range s.Nodes {
			_, err2 := node.Run(ctx, "ip", "route", what, narrow.String()+"/32", "via", s.Fabric.Addr.String(), "mtu", "lock", "1300")
			err = errors.Join(err, err2)
		}
		return err
	}
	if err := configure(t.Context(), "add"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := configure(context.Background(), "del"); err != nil {
			t.Error(err)
		}
	})
	if err := s.Fabric.Start(t.Context(), "narrow", s.Program("agnhost"), "netexec", "--http-port=8083", "--udp-port=8084",
		"--udp-listen-addresses="+narrow.String()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Fabric.Stop(context.Background(), "narrow", syscall.SIGKILL); err != nil {
			t.Error(err)
		}
	})
	foreign := addForeign(t, s, "narrow", narrow)
	long := strings.Repeat("long ", 2000)
	for _, from := range []*cluster.Pod{s.client, s.far} {
		if err := answers(t, from.Name, from, foreign.byAddr(t)); err != nil {
			t.Error(err)
			continue
		}
		if got, err := ask(t.Context(), from, foreign.byAddr(t).tcp, "/echo?msg="+strings.ReplaceAll(long, " ", "+")); err != nil || got != long {
			t.Errorf("%s: an echo of %d bytes has %d, error %v", from.Name, len(long), len(got), err)
		}
		if out, err := from.Run(t.Context(), "ip", "route", "get", foreign.Spec.ClusterIP); err != nil || !strings.Contains(out, " mtu 1300") {
			t.Errorf("%s was not told what fits on the way to the Service: %v\n%s", from.Name, err, out)
		}
	}
}

package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// service is a Service of the cluster.
type service struct{ *core.Service }

// addService makes a Service of the type NodePort in front of the pods that are labelled app=NAME, with what change says.
func addService(t *testing.T, s *standing, name string, change func(*core.ServiceSpec)) service {
	t.Helper()
	client, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	wanted := &core.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: core.ServiceSpec{
			Type: core.ServiceTypeNodePort, Selector: map[string]string{"app": name},
			Ports: []core.ServicePort{
				{Name: "http", Port: 80, TargetPort: intstr.FromInt32(cluster.HTTPPort)},
				{Name: "udp", Port: 81, TargetPort: intstr.FromInt32(cluster.UDPPort), Protocol: core.ProtocolUDP},
			},
		},
	}
	if change != nil {
		change(&wanted.Spec)
	}
	services := client.CoreV1().Services(metav1.NamespaceDefault)
	made, err := services.Create(t.Context(), wanted, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := services.Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	return service{made}
}

// target is where a client finds a Service.
type target struct{ tcp, udp string }

func (v service) byAddr(t *testing.T) target {
	t.Helper()
	addr, err := netip.ParseAddr(v.Spec.ClusterIP)
	if err != nil {
		t.Fatal(err)
	}
	return target{at(addr, 80), at(addr, 81)}
}

func (v service) byPorts(node *cluster.Machine) target {
	return target{at(node.Addr, uint16(v.Spec.Ports[0].NodePort)), at(node.Addr, uint16(v.Spec.Ports[1].NodePort))}
}

// reaches waits until a Service answers, since kube-proxy takes a moment, then asks it over TCP and UDP several times. It
// has to see the client as want.
func reaches(t *testing.T, what string, from dialer, to target, want netip.Addr) {
	t.Helper()
	err := cluster.Poll(within(t, 20*time.Second), what+": an answer", func(ctx context.Context) error {
		_, err := ask(ctx, from, to.tcp, "/hostname")
		return err
	})
	if err != nil {
		t.Error(err)
		return
	}
	for i := range 4 {
		seesTCP(t, what, from, to.tcp, want)
		seesUDP(t, what, from, to.udp, want)
		message := fmt.Sprint("m", i)
		if got, err := ask(t.Context(), from, to.tcp, "/echo?msg="+message); err != nil || got != message {
			t.Errorf("%s over TCP: %q, error %v", what, got, err)
		}
	}
}

// client is somebody who asks: the address that a Service sees when nothing is masqueraded, and the node where it is.
type client struct {
	name string
	dialer
	addr netip.Addr
	node *cluster.Machine
}

func clients(s *standing) []client {
	one, two := s.Nodes[0], s.Nodes[1]
	return []client{
		{"a pod of node-1", s.client, s.client.Addr, one}, {"a pod of node-2", s.far, s.far.Addr, two},
		{"node-1", one, one.Addr, one}, {"node-2", two, two.Addr, two},
	}
}

// outside is a client that is no part of the cluster.
func outside(s *standing) client { return client{"the world", s.Fabric, cluster.FabricAddr, nil} }

// backends are pods of all kinds on both nodes, each the only one with its name as label.
func backends(t *testing.T, s *standing) []*cluster.Pod {
	t.Helper()
	all := []*cluster.Pod{s.near, s.far}
	for i, node := range s.Nodes {
		name := fmt.Sprint("host-", i+1)
		pod, err := s.AddHostPod(t.Context(), name, node, map[string]string{"app": name})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, pod)
	}
	t.Cleanup(func() {
		if err := s.DeletePods(context.Background(), all[2:]...); err != nil {
			t.Error(err)
		}
	})
	return all
}

// The address of a Service is translated where the client is, and only a pod that is asked by itself sees another's address.
func TestClusterIPs(t *testing.T) {
	s := running(t)
	for _, backend := range backends(t, s) {
		to := addService(t, s, backend.Name, nil).byAddr(t)
		for _, from := range clients(s) {
			want := from.addr
			if from.dialer == dialer(backend) {
				want = backend.Node.Addr
			}
			reaches(t, fmt.Sprintf("%s to %s by its Service", from.name, backend.Name), from, to, want)
		}
	}
}

// The node whose port is used translates, and masquerades what it sends on as its own. What stays there it does not send.
func TestNodePorts(t *testing.T) {
	s := running(t)
	for _, backend := range backends(t, s) {
		ports := addService(t, s, backend.Name, nil)
		for _, from := range append(clients(s), outside(s)) {
			for _, node := range s.Nodes {
				want := node.Addr
				if backend.HostNetwork && backend.Node == node {
					want = from.addr
				}
				what := fmt.Sprintf("%s to %s by the ports of %s", from.name, backend.Name, node.Name)
				reaches(t, what, from, ports.byPorts(node), want)
			}
		}
	}
}

// With the policy Local clients are seen as they are, and a node without a pod of the Service has nothing for the world.
func TestNodePortsOfLocalPods(t *testing.T) {
	s := running(t)
	for i, backend := range []*cluster.Pod{s.near, s.far} {
		ports := addService(t, s, backend.Name, func(spec *core.ServiceSpec) {
			spec.ExternalTrafficPolicy = core.ServiceExternalTrafficPolicyLocal
		})
		for _, from := range append(clients(s), outside(s)) {
			want := from.addr
			if from.dialer == dialer(backend) {
				want = backend.Node.Addr
			}
			what := fmt.Sprintf("%s to %s by the ports of its node", from.name, backend.Name)
			reaches(t, what, from, ports.byPorts(backend.Node), want)
		}
		elsewhere := ports.byPorts(s.Nodes[1-i]).tcp
		if got, err := ask(within(t, time.Second), s.Fabric, elsewhere, "/hostname"); err == nil {
			t.Errorf("%s answers %q for a pod of another node", elsewhere, got)
		}
	}
}

// An address from outside is translated as a node's port is, on the node where the client is.
func TestExternalIPs(t *testing.T) {
	s := running(t)
	external := netip.MustParseAddr("198.51.100.7")
	for _, backend := range []*cluster.Pod{s.near, s.far} {
		addService(t, s, backend.Name, func(spec *core.ServiceSpec) { spec.ExternalIPs = []string{external.String()} })
		for _, from := range clients(s) {
			what := fmt.Sprintf("%s to %s by an external address", from.name, backend.Name)
			reaches(t, what, from, target{at(external, 80), at(external, 81)}, from.node.Addr)
		}
	}
}

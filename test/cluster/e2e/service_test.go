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

// addService makes a Service of the type NodePort in front of the pods that are labelled app=NAME.
func addService(t *testing.T, s *standing, name string) *core.Service {
	t.Helper()
	client, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	services := client.CoreV1().Services(metav1.NamespaceDefault)
	service, err := services.Create(t.Context(), &core.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: core.ServiceSpec{
			Type: core.ServiceTypeNodePort, Selector: map[string]string{"app": name},
			Ports: []core.ServicePort{
				{Name: "http", Port: 80, TargetPort: intstr.FromInt32(cluster.HTTPPort)},
				{Name: "udp", Port: 81, TargetPort: intstr.FromInt32(cluster.UDPPort), Protocol: core.ProtocolUDP},
			},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := services.Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	return service
}

// reaches waits until a Service answers, since kube-proxy takes a moment, then asks it over TCP and UDP several times.
func reaches(t *testing.T, what string, from dialer, tcp, udp string) {
	t.Helper()
	err := cluster.Poll(within(t, 20*time.Second), what+" answers", func(ctx context.Context) error {
		_, err := ask(ctx, from, tcp, "/hostname")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		message := fmt.Sprint("m", i)
		if got, err := ask(t.Context(), from, tcp, "/echo?msg="+message); err != nil || got != message {
			t.Errorf("%s over TCP: %q, error %v", what, got, err)
		}
		conn, err := from.Dial(within(t, answerLimit), "udp", udp)
		if err != nil {
			t.Error(err)
			continue
		}
		if err := echo(conn, message); err != nil {
			t.Errorf("%s over UDP: %v", what, err)
		}
		conn.Close()
	}
}

// kube-proxy translates what nodes, the world and pods send to a node's port, and masquerades it as that node's own.
func TestNodePorts(t *testing.T) {
	s := running(t)
	clients := map[string]dialer{"node-1": s.Nodes[0], "node-2": s.Nodes[1], "the world": s.Fabric, "a pod": s.client}
	for _, name := range []string{"near", "far"} {
		ports := addService(t, s, name).Spec.Ports
		for who, from := range clients {
			for _, node := range s.Nodes {
				reaches(t, fmt.Sprintf("%s to pod %s by the ports of %s", who, name, node.Name), from,
					at(node.Addr, uint16(ports[0].NodePort)), at(node.Addr, uint16(ports[1].NodePort)))
			}
		}
	}
}

func TestClusterIPsFromNodes(t *testing.T) {
	s := running(t)
	for _, name := range []string{"near", "far"} {
		addr := netip.MustParseAddr(addService(t, s, name).Spec.ClusterIP)
		for _, node := range s.Nodes {
			reaches(t, node.Name+" to pod "+name+" by its Service", node, at(addr, 80), at(addr, 81))
		}
	}
}

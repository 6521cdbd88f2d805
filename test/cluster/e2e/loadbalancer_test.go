package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// routedByNodes are addresses of no machine from the first one on, one by each node in their order: the world sends there
// what goes to that address.
func routedByNodes(t *testing.T, s *stage, first netip.Addr) (addrs []netip.Addr) {
	t.Helper()
	for _, node := range s.Nodes {
		route := []string{first.String() + "/32", "via", node.Addr.String()}
		if out, err := s.Fabric.Run(t.Context(), append([]string{"ip", "route", "add"}, route...)...); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		t.Cleanup(func() {
			if out, err := s.Fabric.Run(context.Background(), append([]string{"ip", "route", "del"}, route...)...); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
		addrs = append(addrs, first)
		first = first.Next()
	}
	return addrs
}

// addLoadBalancer makes a Service of that type in front of a pod. What a cloud would do is done here: the Service gets an
// address by each node.
func addLoadBalancer(t *testing.T, s *stage, name string, first netip.Addr, change func(*core.ServiceSpec)) (addrs []netip.Addr) {
	t.Helper()
	made := addService(t, s.standing, name, func(spec *core.ServiceSpec) {
		spec.Type = core.ServiceTypeLoadBalancer
		change(spec)
	})
	addrs = routedByNodes(t, s, first)
	for _, addr := range addrs {
		made.Status.LoadBalancer.Ingress = append(made.Status.LoadBalancer.Ingress, core.LoadBalancerIngress{IP: addr.String()})
	}
	api, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := api.CoreV1().Services(made.Namespace).UpdateStatus(t.Context(), made.Service, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	return addrs
}

// The address of a load balancer is translated where the client is, and for the world at the node that it comes by. Each
// masquerades as itself.
func testLoadBalancers(t *testing.T, s *stage) {
	var visits []visit
	for i, backend := range []*cluster.Pod{s.near, s.far} {
		first := netip.AddrFrom4([4]byte{198, 51, 100, byte(16 + 2*i)})
		addrs := addLoadBalancer(t, s, "balanced-"+backend.Name, first, behind(backend.Name))
		for _, from := range clients(s.standing) {
			what := fmt.Sprintf("%s to %s by its load balancer", from.name, backend.Name)
			to := servicePorts(addrs[0])
			visits = append(visits, visit{what, from, to, s.seenOutside(from, backend, to)})
		}
		for j, node := range s.entrances() {
			what := fmt.Sprintf("the world to %s by its load balancer and %s", backend.Name, node.Name)
			visits = append(visits, visit{what, s.Fabric, servicePorts(addrs[j]), s.masqueraded(node, backend)})
		}
	}
	makeVisits(t, visits)
}

// With the policy Local clients are seen as they are, and a load balancer's node without a pod of the Service drops.
func testLoadBalancersOfLocalPods(t *testing.T, s *stage) {
	var visits, vain []visit
	for i, backend := range []*cluster.Pod{s.near, s.far} {
		first := netip.AddrFrom4([4]byte{198, 51, 100, byte(24 + 2*i)})
		addrs := addLoadBalancer(t, s, "balanced-local-"+backend.Name, first, func(spec *core.ServiceSpec) {
			behind(backend.Name)(spec)
			spec.ExternalTrafficPolicy = core.ServiceExternalTrafficPolicyLocal
		})
		for _, from := range clients(s.standing) {
			what := fmt.Sprintf("%s to %s by its load balancer, policy Local", from.name, backend.Name)
			to := servicePorts(addrs[0])
			visits = append(visits, visit{what, from, to, s.seen(from, backend, to)})
		}
		world := outside(s.standing)
		for j, node := range s.entrances() {
			v := visit{fmt.Sprintf("the world to %s by its load balancer and %s, policy Local", backend.Name, node.Name), world, servicePorts(addrs[j]), world.addr}
			if node == backend.Node {
				visits = append(visits, v)
			} else {
				vain = append(vain, v)
			}
		}
	}
	makeVisits(t, visits)
	mustBeVain(t, vain)
}

// Only those whom the Service lists come in.
func testLoadBalancerForSome(t *testing.T, s *stage) {
	all := clients(s.standing)
	welcome, others := []client{all[0], all[3]}, []client{all[1], outside(s.standing)}
	addrs := addLoadBalancer(t, s, "balanced-for-some", netip.AddrFrom4([4]byte{198, 51, 100, 32}), func(spec *core.ServiceSpec) {
		behind(s.near.Name)(spec)
		for _, from := range welcome {
			spec.LoadBalancerSourceRanges = append(spec.LoadBalancerSourceRanges, from.addr.String()+"/32")
		}
	})
	var visits, vain []visit
	for _, from := range welcome {
		visits = append(visits, visit{from.name + ", who is welcome", from, servicePorts(addrs[0]), s.masqueraded(from.node, s.near)})
	}
	for _, from := range others {
		vain = append(vain, visit{what: from.name + ", who is not welcome", from: from, to: servicePorts(addrs[0])})
	}
	makeVisits(t, visits)
	mustBeVain(t, vain)
}

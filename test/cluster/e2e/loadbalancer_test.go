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

// nobodys are addresses that no machine has: these, and as many as a last byte tells after them.
var nobodys = map[core.IPFamily]netip.Addr{
	core.IPv4Protocol: netip.MustParseAddr("198.51.100.0"), core.IPv6Protocol: netip.MustParseAddr("2001:db8:198:51::"),
}

// routedByNodes are addresses of no machine from the one with that last byte on, one by each node in their order: the world sends there
// what goes to that address.
func routedByNodes(t *testing.T, s *stage, first byte) (addrs []netip.Addr) {
	t.Helper()
	for i, node := range s.Nodes {
		raw := nobodys[s.Family()].AsSlice()
		raw[len(raw)-1] = first + byte(i)
		addr, _ := netip.AddrFromSlice(raw) // as long as it was
		route := []string{addr.String(), "via", node.Addr.String()}
		if out, err := s.Fabric.Run(t.Context(), append([]string{"ip", "route", "add"}, route...)...); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		t.Cleanup(func() {
			if out, err := s.Fabric.Run(context.Background(), append([]string{"ip", "route", "del"}, route...)...); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
		addrs = append(addrs, addr)
	}
	return addrs
}

// addLoadBalancer makes a Service of that type in front of a pod. What a cloud would do is done here: the Service gets an
// address by each node.
func addLoadBalancer(t *testing.T, s *stage, name string, first byte, change func(*core.ServiceSpec)) (addrs []netip.Addr) {
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
		addrs := addLoadBalancer(t, s, "balanced-"+backend.Name, byte(16+2*i), behind(backend.Name))
		for _, from := range clients(s.standing) {
			what := fmt.Sprintf("%s to %s by its load balancer", from.name, backend.Name)
			to := servicePorts(addrs[0])
			visits = append(visits, visit{what, from, to, s.seenOutside(from, backend, to)})
		}
		for j, node := range s.Nodes {
			what, world, to := fmt.Sprintf("the world to %s by its load balancer and %s", backend.Name, node.Name), outside(s.standing), servicePorts(addrs[j])
			visits = append(visits, visit{what, world, to, s.seenBehind(node, world, backend, to)})
		}
	}
	makeVisits(t, visits)
}

// With the policy Local clients are seen as they are, and a load balancer's node without a pod of the Service drops.
func testLoadBalancersOfLocalPods(t *testing.T, s *stage) {
	var visits, vain []visit
	for i, backend := range []*cluster.Pod{s.near, s.far} {
		addrs := addLoadBalancer(t, s, "balanced-local-"+backend.Name, byte(24+2*i), func(spec *core.ServiceSpec) {
			behind(backend.Name)(spec)
			spec.ExternalTrafficPolicy = core.ServiceExternalTrafficPolicyLocal
		})
		for _, from := range clients(s.standing) {
			what := fmt.Sprintf("%s to %s by its load balancer, policy Local", from.name, backend.Name)
			to := servicePorts(addrs[0])
			visits = append(visits, visit{what, from, to, s.seen(from, backend, to)})
		}
		world := outside(s.standing)
		for j, node := range s.Nodes {
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
	addrs := addLoadBalancer(t, s, "balanced-for-some", 32, func(spec *core.ServiceSpec) {
		behind(s.near.Name)(spec)
		for _, from := range welcome {
			spec.LoadBalancerSourceRanges = append(spec.LoadBalancerSourceRanges, netip.PrefixFrom(from.addr, from.addr.BitLen()).String())
		}
	})
	var visits, vain []visit
	for _, from := range welcome {
		to := servicePorts(addrs[0])
		visits = append(visits, visit{from.name + ", who is welcome", from, to, s.seenOutside(from, s.near, to)})
	}
	for _, from := range others {
		vain = append(vain, visit{what: from.name + ", who is not welcome", from: from, to: servicePorts(addrs[0])})
	}
	makeVisits(t, visits)
	mustBeVain(t, vain)
}

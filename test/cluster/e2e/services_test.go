package e2e

import (
	"fmt"
	"testing"

	core "k8s.io/api/core/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// serviceTests hold in every mode of kube-proxy, and where there is none, but for what the programs leave to others. Those at the end change
// more than what they make themselves.
var serviceTests = []struct {
	name  string
	test  func(*testing.T, *stage)
	alone bool
	every bool // in every family, not in the first alone: what differs is the translation
	ours  bool // not where kube-proxy is: it would be in the way, or nothing to do with it
}{
	{name: "ClusterIPs", test: testClusterIPs, every: true},
	{name: "NodePorts", test: testNodePorts, every: true},
	{name: "NodePortsOfLocalPods", test: testNodePortsOfLocalPods, every: true},
	{name: "ExternalIPs", test: testExternalIPs, every: true},
	{name: "LoadBalancers", test: testLoadBalancers, every: true},
	{name: "LoadBalancersOfLocalPods", test: testLoadBalancersOfLocalPods, every: true},
	{name: "LoadBalancerForSome", test: testLoadBalancerForSome, every: true},
	{name: "HealthChecks", test: testHealthChecks, every: true},
	{name: "SamePort", test: testSamePort, every: true},
	{name: "ForeignEndpoints", test: testForeignEndpoints},
	{name: "Refusals", test: testRefusals, every: true},
	{name: "PathMTU", test: testPathMTU},
	{name: "ChoiceOfPods", test: testChoiceOfPods},
	{name: "SessionAffinity", test: testSessionAffinity},
	{name: "InternalTraffic", test: testInternalTrafficStaysOnItsNode},
	{name: "DNS", test: testDNS},
	{name: "ByName", test: testServicesByName},
	{name: "Headless", test: testHeadlessService},
	{name: "HostPorts", test: testHostPorts, every: true},
	{name: "HostPortOfTwo", test: testHostPortOfTwo, ours: true},
	{name: "HostPortBeforeNodePort", test: testHostPortBeforeNodePort, ours: true},
	{name: "Webhooks", test: testWebhooks},
	{name: "ByTheAPIServer", test: testByTheAPIServer},
	{name: "Loopback", test: testNodePortsOnLoopback, every: true, ours: true},
	{name: "NodeLocalDNS", test: testNodeLocalDNS, alone: true},
	// With the caches gone it is CoreDNS again that answers.
	{name: "DNSWithoutCache", test: testDNS, alone: true},
	{name: "APIServer", test: testAPIServerByItsService},
}

// Who reaches whom through Services, and as whom they are seen: as the classical network shows them.
func TestServices(t *testing.T) { runServiceTests(t, newStage(t, running(t)), true) }

// runServiceTests runs all of them, or, unless exclusive, those that run beside each other.
func runServiceTests(t *testing.T, s *stage, exclusive bool) {
	t.Helper()
	for i, family := range s.Options.Families {
		seen := s.in(t, family)
		t.Run(string(family), func(t *testing.T) {
			for _, c := range serviceTests {
				if c.alone && !exclusive || i > 0 && !c.every || c.ours && s.hasProxy() {
					continue
				}
				t.Run(c.name, func(t *testing.T) {
					if !c.alone {
						t.Parallel()
					}
					c.test(t, seen)
				})
			}
		})
	}
}

// The address of a Service is translated where the client is, and only a pod that is asked by itself sees another's address.
func testClusterIPs(t *testing.T, s *stage) {
	var visits []visit
	for _, backend := range s.backends() {
		to := addService(t, s.standing, "address-"+backend.Name, behind(backend.Name)).byAddr(t)
		for _, from := range clients(s.standing) {
			what := fmt.Sprintf("%s to %s by its Service", from.name, backend.Name)
			visits = append(visits, visit{what, from, to, s.seen(from, backend, to)})
		}
	}
	makeVisits(t, visits)
}

// The node whose port is used translates.
func testNodePorts(t *testing.T, s *stage) {
	var visits []visit
	for _, backend := range s.backends() {
		ports := addService(t, s.standing, "ports-"+backend.Name, behind(backend.Name))
		for _, from := range append(clients(s.standing), outside(s.standing)) {
			for _, node := range s.Nodes {
				what, to := fmt.Sprintf("%s to %s by the ports of %s", from.name, backend.Name, node.Name), ports.byPorts(node)
				visits = append(visits, visit{what, from, to, s.seenBehind(node, from, backend, to)})
			}
		}
	}
	makeVisits(t, visits)
}

// With the policy Local clients are seen as they are, and a node without a pod of the Service has nothing for the world.
func testNodePortsOfLocalPods(t *testing.T, s *stage) {
	var visits, vain []visit
	for i, backend := range []*cluster.Pod{s.near, s.far} {
		ports := addService(t, s.standing, "local-ports-"+backend.Name, func(spec *core.ServiceSpec) {
			behind(backend.Name)(spec)
			spec.ExternalTrafficPolicy = core.ServiceExternalTrafficPolicyLocal
		})
		for _, from := range append(clients(s.standing), outside(s.standing)) {
			what := fmt.Sprintf("%s to %s by the ports of its node", from.name, backend.Name)
			to, seen := ports.byPorts(backend.Node), s.seenBy(from, backend)
			if from.node == backend.Node {
				seen = s.seen(from, backend, to)
			}
			visits = append(visits, visit{what, from, to, seen})
		}
		what := fmt.Sprintf("the world to %s by the ports of the other node", backend.Name)
		vain = append(vain, visit{what: what, from: s.Fabric, to: ports.byPorts(s.Nodes[1-i])})
	}
	makeVisits(t, visits)
	mustBeVain(t, vain)
}

// An address from outside is translated as a node's port is, on the node where the client is, and for the world on the one
// that it comes by.
func testExternalIPs(t *testing.T, s *stage) {
	var visits []visit
	for i, backend := range []*cluster.Pod{s.near, s.far} {
		addrs := routedByNodes(t, s, byte(8+2*i))
		addService(t, s.standing, "external-"+backend.Name, func(spec *core.ServiceSpec) {
			behind(backend.Name)(spec)
			for _, addr := range addrs {
				spec.ExternalIPs = append(spec.ExternalIPs, addr.String())
			}
		})
		for _, from := range clients(s.standing) {
			what := fmt.Sprintf("%s to %s by an external address", from.name, backend.Name)
			to := servicePorts(addrs[0])
			visits = append(visits, visit{what, from, to, s.seenOutside(from, backend, to)})
		}
		for j, node := range s.Nodes {
			what, world, to := fmt.Sprintf("the world to %s by an external address and %s", backend.Name, node.Name), outside(s.standing), servicePorts(addrs[j])
			visits = append(visits, visit{what, world, to, s.seenBehind(node, world, backend, to)})
		}
	}
	makeVisits(t, visits)
}

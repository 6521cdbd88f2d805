package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// nodePorts are of the Services of the stories, by their order.
const nodePorts = 30080

// balancer is where the Services' load balancers answer, which no node has.
var balancer = [wire.Families]netip.Addr{wire.IPv4: netip.MustParseAddr("198.51.100.7"), wire.IPv6: netip.MustParseAddr("2001:db8:100::7")}

// Everything that can be sent to a Service by who is no pod of the node that is asked, in clusters of either routing mode.
func TestServicesFromOutside(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"direct", "vxlan"} {
		t.Run(mode, func(t *testing.T) {
			forNewestAttach(t, func(t *testing.T, attach string) {
				s := startServed(t, lab.Options{Families: families, AgentFlags: []string{
					attach, "--routing-mode=" + mode, fmt.Sprintf("--service-cidr=%s,%s", lab.ServiceCIDR[wire.IPv4], lab.ServiceCIDR[wire.IPv6]),
				}}, drops.NoBackend, drops.NoLocalBackend, drops.SourceRange, drops.ServiceTtl, drops.TooBig)
				prepared := s.openOutside(t)
				overEachFamily(t, s.Lab, func(t *testing.T, family wire.Family) { prepared(t, family) })
			})
		})
	}
}

// openOutside makes a Service for each backend, with a port of the nodes and, for who has a route, a load balancer.
func (s *served) openOutside(t *testing.T) func(*testing.T, wire.Family) {
	var specs []lab.ServiceSpec
	for i, b := range s.backends() {
		spec := s.spec(b.name, b.endpoint)
		spec.NodePort = nodePorts + uint16(i)
		specs = append(specs, spec)
	}
	specs[0].LoadBalancerIPs = []netip.Addr{balancer[wire.IPv4], balancer[wire.IPv6]}
	specs[0].SourceRanges = []netip.Prefix{single(s.Outside.AddrOf(wire.IPv4)), single(s.Outside.AddrOf(wire.IPv6))}
	near := s.spec("nearlocal", s.near)
	near.NodePort, near.ExternalLocal = nodePorts+20, true
	empty := s.spec("empty")
	empty.NodePort = nodePorts + 21
	s.set(t, append(specs, near, empty)...)
	return func(t *testing.T, family wire.Family) {
		asked := s.Nodes[0].AddrOf(family)
		t.Run("world", func(t *testing.T) { s.assertBackends(t, s.Outside, asked, family) })
		t.Run("pod", func(t *testing.T) { s.assertBackends(t, s.far.Namespace, asked, family) })
		t.Run("policy", func(t *testing.T) { s.assertExternalLocal(t, family) })
		t.Run("balancer", func(t *testing.T) { s.assertBalancer(t, family) })
		t.Run("refused", func(t *testing.T) { s.assertRefusedOutside(t, family) })
		t.Run("way", func(t *testing.T) { s.assertWayIn(t, family) })
	}
}

// assertBackends asks the first node for every backend. Those there see the client, all others the node.
func (s *served) assertBackends(t *testing.T, client *lab.Namespace, asked netip.Addr, family wire.Family) {
	t.Helper()
	for i, b := range s.backends() {
		seen := client.AddrOf(family)
		if b.name != "near" && b.name != "itself" && b.name != "host" {
			seen = asked
		}
		t.Run(b.name, func(t *testing.T) {
			to := netip.AddrPortFrom(asked, nodePorts+uint16(i))
			assertServedTo(t, client, to, b.endpoint.Endpoint(family, backendPort).At, seen)
		})
	}
}

// assertExternalLocal asks both nodes for what only the first one has. Other nodes' pods are outside as well.
func (s *served) assertExternalLocal(t *testing.T, family wire.Family) {
	t.Helper()
	has, lacks := s.Nodes[0].AddrOf(family), s.Nodes[1].AddrOf(family)
	backend := s.near.Endpoint(family, backendPort).At
	assertServedTo(t, s.Outside, netip.AddrPortFrom(has, nodePorts+20), backend, s.Outside.AddrOf(family))
	for _, client := range []*lab.Namespace{s.Outside, s.client.Namespace} {
		before := dropped(t, s.Nodes[1], drops.NoLocalBackend)
		if _, err := client.UDP(within(t, refusedAtOnce), netip.AddrPortFrom(lacks, nodePorts+20), 64); err == nil || errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("a node without an endpoint, asked by %s: %v", client.Netns(), err)
		}
		if got := dropped(t, s.Nodes[1], drops.NoLocalBackend); got != before+1 {
			t.Errorf("of %s %d packets counted as NO_LOCAL_BACKEND, want 1", client.Netns(), got-before)
		}
	}
	assertServedTo(t, s.far.Namespace, netip.AddrPortFrom(lacks, nodePorts+20), backend, s.far.AddrOf(family)) // a pod of the node that is asked
}

// assertBalancer asks a load balancer's address, which leads to the first node, from a source that may and one that may not.
func (s *served) assertBalancer(t *testing.T, family wire.Family) {
	t.Helper()
	to := netip.AddrPortFrom(balancer[family], servicePort)
	for ns, via := range map[*lab.Namespace]netip.Addr{s.Outside: lab.RouterOutside[family], s.Router: s.Nodes[0].AddrOf(family)} {
		if err := ns.AddRoute(single(to.Addr()), via, ""); err != nil {
			t.Fatal(err)
		}
	}
	assertServedTo(t, s.Outside, to, s.near.Endpoint(family, backendPort).At, s.Outside.AddrOf(family))
	before := dropped(t, s.Nodes[0], drops.SourceRange)
	if _, err := s.Router.UDP(within(t, refusedAtOnce), to, 64); err == nil || errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a source that may not ask: %v", err)
	}
	if got := dropped(t, s.Nodes[0], drops.SourceRange); got != before+1 {
		t.Errorf("%d packets counted as SOURCE_RANGE, want 1", got-before)
	}
}

// assertRefusedOutside wants an answer at once from who has no endpoint.
func (s *served) assertRefusedOutside(t *testing.T, family wire.Family) {
	t.Helper()
	to := netip.AddrPortFrom(s.Nodes[0].AddrOf(family), nodePorts+21)
	for _, client := range []*lab.Namespace{s.Outside, s.far.Namespace} {
		assertRefusedTo(t, client, to)
	}
}

// assertWayIn looks at who answers for a packet that does not get through, as traceroute and path MTU discovery do.
func (s *served) assertWayIn(t *testing.T, family wire.Family) {
	t.Helper()
	node, far := s.Nodes[0].AddrOf(family), netip.AddrPortFrom(s.Nodes[0].AddrOf(family), nodePorts+1)
	out := run(t, s.Outside, "traceroute", "-T", "-p", fmt.Sprint(far.Port()), "-n", "-q", "1", "-N", "1", "-w", "1", "-m", "5", node.String())
	hops := found(out, `(?m)^ *(\d+)  (\S+)  [\d.]+ ms`)
	if want := fmt.Sprintf("2 %s", node); len(hops) < 3 || hops[1] != want {
		t.Errorf("the hops %q, want the second to be %q:\n%s", hops, want, out)
	}
	conn := dontFragment(t, s.Outside, far)
	for range 3 { // the way may be narrower than the link to the node
		if _, err := conn.Write(make([]byte, 1400)); err != nil && !errors.Is(err, unix.EMSGSIZE) {
			t.Fatal(err)
		}
	}
	assertUDP(t, s.Outside, far, 1200, 9000)
}

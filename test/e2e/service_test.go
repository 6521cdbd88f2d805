package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// Services that the dataplane serves by itself, to pods.

// backendPort is where all backends answer; their Services have servicePort.
const backendPort = 8080

// serviceCIDRs names the ranges of ClusterIPs.
var serviceCIDRs = fmt.Sprintf("--service-cidr=%s,%s", lab.ServiceCIDR[wire.IPv4], lab.ServiceCIDR[wire.IPv6])

// served is a cluster of two nodes, behind a router, whose agents serve Services.
type served struct {
	*lab.Lab
	// client and near are on the first node, far is on the second.
	client, near, far *lab.Pod
	clients           []*lab.Pod // those that connect together (connects)

	specs   []lab.ServiceSpec
	last    [wire.Families]netip.Addr // given to a Service
	changes uint16                    // of the list
}

// startServed starts agents, pods, and a server on each host and pod.
func startServed(t *testing.T, opts lab.Options, expected ...drops.Reason) *served {
	t.Helper()
	return startServedOn(t, opts, func(*lab.Lab) {}, expected...)
}

// startServedOn is startServed with something done before the agents start.
func startServedOn(t *testing.T, opts lab.Options, before func(*lab.Lab), expected ...drops.Reason) *served {
	t.Helper()
	opts.Nodes, opts.Router = 2, true
	opts.AgentFlags = append(opts.AgentFlags, "--services=on")
	l := lab.ForTest(t, opts, expected...)
	before(l)
	startAgents(t, l)
	s := newServed(l)
	s.client, s.near, s.far = addPod(t, s.Nodes[0], "client"), addPod(t, s.Nodes[0], "near"), addPod(t, s.Nodes[1], "far")
	for _, on := range []*lab.Namespace{s.client.Namespace, s.near.Namespace, s.far.Namespace, s.Nodes[0].Namespace, s.Nodes[1].Namespace, s.Outside} {
		serveBackend(t, on)
	}
	return s
}

// newServed is a cluster without Services yet.
func newServed(l *lab.Lab) *served {
	s := &served{Lab: l}
	for family, cidr := range lab.ServiceCIDR {
		s.last[family] = cidr.Addr()
	}
	return s
}

func serveBackend(t *testing.T, on *lab.Namespace) {
	t.Helper()
	if _, err := on.Serve(backendPort); err != nil {
		t.Fatal(err)
	}
}

// backer is a pod, a node or another host as the endpoint of a Service.
type backer interface {
	Endpoint(family wire.Family, port uint16) lab.EndpointSpec
}

// inEachFamily are pods or nodes as endpoints, in all families of the pods.
func (s *served) inEachFamily(of ...backer) (all []lab.EndpointSpec) {
	for _, one := range of {
		for _, family := range s.Options.Families {
			all = append(all, one.Endpoint(family, backendPort))
		}
	}
	return all
}

// spec is a Service of addresses that no other has, in each family.
func (s *served) spec(name string, of ...backer) lab.ServiceSpec {
	spec := lab.ServiceSpec{Name: name, Port: servicePort, Endpoints: s.inEachFamily(of...)}
	for _, family := range s.Options.Families {
		s.last[family] = s.last[family].Next()
		spec.ClusterIPs = append(spec.ClusterIPs, s.last[family])
	}
	return spec
}

// set adds Services, or replaces those of the same names, and waits until all nodes have them.
func (s *served) set(t *testing.T, specs ...lab.ServiceSpec) {
	t.Helper()
	s.stage(t, specs...)()
	s.wait(t)
}

// stage is set up to the moment at which the agents may read it, which is when the function returned is called.
func (s *served) stage(t *testing.T, specs ...lab.ServiceSpec) (publish func()) {
	t.Helper()
	for _, spec := range specs {
		s.specs = slices.DeleteFunc(s.specs, func(have lab.ServiceSpec) bool { return have.Name == spec.Name })
		s.specs = append(s.specs, spec)
	}
	s.changes++
	staged, err := s.StageServices(append(slices.Clone(s.specs), s.marker())...)
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := staged(); err != nil {
			t.Fatal(err)
		}
	}
}

// marker is a Service whose port is another in each list.
func (s *served) marker() lab.ServiceSpec {
	family := firstFamily(s.Lab)
	return lab.ServiceSpec{Name: "marker", ClusterIPs: []netip.Addr{markers[family]}, Port: s.changes}
}

var markers = [wire.Families]netip.Addr{wire.IPv4: netip.MustParseAddr("10.96.255.254"), wire.IPv6: netip.MustParseAddr("fd00:10:96::fffe")}

// wait waits until every node has the newest list: its last frontends, which come last, in any order.
func (s *served) wait(t *testing.T) {
	t.Helper()
	for _, node := range s.Nodes {
		eventually(t, changeLimit, node.Name+" has the Services", func() bool { return hasFrontends(t, node, append(slices.Clone(s.specs), s.marker())) })
	}
}

// hasFrontends says whether a node has all of some Services.
func hasFrontends(t *testing.T, node *lab.Node, specs []lab.ServiceSpec) bool {
	t.Helper()
	m, err := typed.Open[services.Key, services.Value](bpffs.Dir(node.BPFFS()).Map(services.Name))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for _, spec := range specs {
		for _, addr := range spec.ClusterIPs {
			for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
				_, err := m.Get(services.Key{Address: wire.AddrFrom(addr), Port: wire.PortFrom(spec.Port), Proto: proto})
				if errors.Is(err, fs.ErrNotExist) {
					return false
				}
				if err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	return true
}

// at is where a Service is in a family.
func (s *served) at(name string, family wire.Family) netip.AddrPort {
	return netip.AddrPortFrom(wire.AddressesFrom(s.named(name).ClusterIPs...)[family].Netip(), servicePort)
}

// named is a Service as it was last set.
func (s *served) named(name string) lab.ServiceSpec {
	i := slices.IndexFunc(s.specs, func(spec lab.ServiceSpec) bool { return spec.Name == name })
	if i < 0 {
		panic("no Service " + name)
	}
	return s.specs[i]
}

// outside is the outside host as an endpoint: no Node's.
type outside struct{ *lab.Namespace }

func (o outside) Endpoint(family wire.Family, port uint16) lab.EndpointSpec {
	return lab.EndpointSpec{At: netip.AddrPortFrom(lab.OutsideAddr[family], port)}
}

// closed is an endpoint at a port where nobody listens.
type closed struct{ backer }

func (c closed) Endpoint(family wire.Family, _ uint16) lab.EndpointSpec {
	return c.backer.Endpoint(family, closedPort)
}

// Everything that a pod can send to a Service, in clusters of either routing mode.
func TestServices(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"direct", "vxlan"} {
		t.Run(mode, func(t *testing.T) {
			forNewestAttach(t, func(t *testing.T, attach string) {
				s := startServed(t, lab.Options{Families: families, AgentFlags: []string{
					attach, "--routing-mode=" + mode, serviceCIDRs,
				}}, drops.NoBackend, drops.NoLocalBackend, drops.NoServicePort, drops.NoService, drops.BackendGone, drops.ServiceTtl, drops.NoEndpoint, drops.NodeOffLink, drops.TunnelNode)
				answerEveryProbe(t, s.Lab)
				if mode == "direct" {
					dropInvalid(t, s.Lab)
				}
				for _, story := range serviceStories {
					if story.once && mode != "direct" && !priv.Long() {
						continue
					}
					t.Run(story.name, func(t *testing.T) {
						if !story.more {
							s.specs = nil
						}
						prepared := story.prepare(t, s)
						overEachFamily(t, s.Lab, func(t *testing.T, family wire.Family) { prepared(t, family) })
					})
				}
			})
		})
	}
}

// dropInvalid has a firewall on each node drop what does not fit what it has seen before. It does if both directions of a flow go
// one way.
func dropInvalid(t *testing.T, l *lab.Lab) {
	t.Helper()
	rules := "table inet strict {\n"
	for _, hook := range []string{"input", "forward", "output"} {
		rules += fmt.Sprintf("chain %s { type filter hook %[1]s priority 0; ct state invalid drop; }\n", hook)
	}
	for _, node := range l.Nodes {
		applyRules(t, node, rules+"}\n", "nft", "-f")
	}
}

// serviceStories are told one after the other in one cluster: each makes Services, then tells what happens in a family.
var serviceStories = []struct {
	name    string
	prepare func(*testing.T, *served) func(*testing.T, wire.Family)
	more    bool // with the Services of the one before
	once    bool // in one mode, since none of it is about the way to a backend; in the long form in both
}{
	{name: "backends", prepare: everyBackend},
	{name: "errors", prepare: errorsOfTheWay, more: true},
	{name: "addresses", prepare: otherAddresses},
	{name: "addresses of the node", prepare: heldAddresses},
	{name: "refusals", prepare: refusals},
	{name: "one port", prepare: onePort},
	{name: "local policy", prepare: localPolicy},
	{name: "removal", prepare: removal, once: true},
	{name: "connections outlive readiness", prepare: leavingBackends},
	{name: "scale", prepare: scaling, once: true},
	{name: "affinity", prepare: affinityOfClients, once: true},
}

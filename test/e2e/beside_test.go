package e2e

import (
	"context"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// switchLimit is how long an agent may take to follow rules that come. Then the verifier looks at all programs anew, which
// takes a busy machine its time.
const switchLimit = 10 * time.Second

// visit is one exchange with a Service or past it, and whom its server must see.
type visit struct {
	way
	seen netip.Addr
}

// proxied is a cluster of two nodes whose pods are behind Services.
type proxied struct {
	*lab.Lab
	// client and backend are on the first node, remote is on the second.
	client, backend, remote *lab.Pod
	services                []kubeService
	// tunnelled says that packets between the nodes' pods go through the tunnel.
	tunnelled bool
	// port is the newest that the client chose itself.
	port atomic.Uint32
}

const (
	servicePort = 80
	// The node ports of the backend's Services, with either policy.
	clusterPort, localPort = 30010, 30012
	// closedPort is where nobody listens.
	closedPort = 9
)

// startProxied starts agents that find out by themselves, unless flags say otherwise.
func startProxied(t *testing.T, opts lab.Options, expected ...drops.Reason) *proxied {
	t.Helper()
	opts.Nodes = 2
	p := &proxied{Lab: startCluster(t, opts, expected...), tunnelled: slices.Contains(opts.AgentFlags, "--routing-mode=vxlan") || opts.Links == 2}
	p.port.Store(20000)
	p.client, p.backend, p.remote = addPod(t, p.Nodes[0], "client"), addPod(t, p.Nodes[0], "backend"), addPod(t, p.Nodes[1], "remote")
	behind := func(name string, on *lab.Namespace) *kubeService {
		cluster := serviceAddr[p.family()]
		for range p.services {
			cluster = cluster.Next()
		}
		p.services = append(p.services, kubeService{name: name, cluster: netip.AddrPortFrom(cluster, servicePort), endpoint: serve(t, on)})
		return &p.services[len(p.services)-1]
	}
	behind("near", p.backend.Namespace).nodePort = clusterPort
	local := behind("local", p.backend.Namespace)
	local.nodePort, local.local = localPort, true
	behind("far", p.remote.Namespace)
	behind("itself", p.client.Namespace)
	behind("outside", p.Outside)
	behind("host", p.Nodes[0].Namespace)
	behind("kubernetes", p.Nodes[1].Namespace)
	behind("closednear", p.backend.Namespace).endpoint = netip.AddrPortFrom(p.backend.Addr(), closedPort)
	behind("closedfar", p.remote.Namespace).endpoint = netip.AddrPortFrom(p.remote.Addr(), closedPort)
	return p
}

// serviceAddr is the address of the first Service.
var serviceAddr = [wire.Families]netip.Addr{wire.IPv4: netip.MustParseAddr("10.96.0.10"), wire.IPv6: netip.MustParseAddr("fd00:10:96::10")}

// family is that of the Services.
func (p *proxied) family() wire.Family { return firstFamily(p.Lab) }

// at is a Service's address.
func (p *proxied) at(name string) netip.AddrPort { return p.service(name).cluster }

func (p *proxied) service(name string) kubeService {
	for _, s := range p.services {
		if s.name == name {
			return s
		}
	}
	panic("no Service " + name)
}

// masked is what the other node sees of what netfilter has masqueraded on a node.
func (p *proxied) masked(node *lab.Node) netip.Addr {
	if p.tunnelled {
		return node.PodCIDR().Addr() // the tunnel device's
	}
	return node.Addr()
}

// own is what a node's pods see of what netfilter has masqueraded there. In IPv6 the kernel takes of all the node's addresses
// the one that is most like the destination.
func (p *proxied) own(node *lab.Node) netip.Addr {
	if p.family() == wire.IPv6 {
		return node.PodCIDR().Addr() // the tunnel device's
	}
	return node.Addr()
}

// outside is what nodes see of the outside host.
func (p *proxied) outside() netip.Addr {
	if p.Router != nil {
		return lab.OutsideAddr[p.family()]
	}
	return lab.GatewayAddr[p.family()]
}

// visits are the ways to Services, and from pod to pod, with the addresses that the classical network shows, but that
// nodes see pods' own.
func (p *proxied) visits() []visit {
	client, near, far := p.client.Namespace, p.Nodes[0], p.Nodes[1]
	on := netip.AddrPortFrom
	return []visit{
		{way{name: "pod to its Service, same node", from: client, to: p.at("near")}, client.Addr()},
		{way{name: "pod to its Service, other node", from: client, to: p.at("far")}, client.Addr()},
		{way{name: "pod to itself by its Service", from: client, to: p.at("itself")}, p.own(near)},
		{way{name: "pod to a Service outside", from: client, to: p.at("outside")}, near.Addr()},
		{way{name: "pod to a Service on its host", from: client, to: p.at("host")}, client.Addr()},
		{way{name: "pod to a Service on the other node", from: client, to: p.at("kubernetes")}, client.Addr()},
		{way{name: "host to its pod's Service", from: near.Namespace, to: p.at("near")}, p.own(near)},
		{way{name: "host to a Service, other node", from: near.Namespace, to: p.at("far")}, p.masked(near)},
		{way{name: "outside to the backend's node", from: p.Outside, to: on(near.Addr(), clusterPort)}, p.own(near)},
		{way{name: "outside to the other node", from: p.Outside, to: on(far.Addr(), clusterPort)}, p.masked(far)},
		{way{name: "outside, policy Local", from: p.Outside, to: on(near.Addr(), localPort)}, p.outside()},
		{way{name: "pod to its node's port", from: client, to: on(near.Addr(), clusterPort)}, p.own(near)},
		{way{name: "pod to another node's port", from: client, to: on(far.Addr(), clusterPort)}, p.masked(far)},
		{way{name: "pod to its node's port, policy Local", from: client, to: on(near.Addr(), localPort)}, client.Addr()},
		{way{name: "pod to another node's port, policy Local", from: p.remote.Namespace, to: on(near.Addr(), localPort)}, p.remote.Addr()},
		{way{name: "host to another node's port", from: near.Namespace, to: on(far.Addr(), clusterPort)}, p.masked(far)},
		{way{name: "pod to pod, same node", from: client, to: p.service("near").endpoint}, client.Addr()},
		{way{name: "pod to pod, other node", from: client, to: p.service("far").endpoint}, client.Addr()},
		{way{name: "pod to the world", from: client, to: p.service("outside").endpoint}, near.Addr()},
		{way{name: "pod to its host", from: client, to: p.service("host").endpoint}, client.Addr()},
		{way{name: "pod to another node", from: client, to: p.service("kubernetes").endpoint}, client.Addr()},
		{way{name: "host to its pod", from: near.Namespace, to: p.service("near").endpoint}, near.Addr()},
		{way{name: "host to another node's pod", from: near.Namespace, to: p.service("far").endpoint}, near.Addr()},
	}
}

// assertVisits makes all of them, with datagrams that fit and others that do not.
func (p *proxied) assertVisits(t *testing.T) {
	t.Helper()
	for _, v := range p.visits() {
		seen, err := v.from.TCP(t.Context(), v.to)
		assertSeen(t, "TCP, "+v.name, seen, err, v.seen)
		for _, size := range []int{64, 9000} {
			seen, err = v.from.UDP(t.Context(), v.to, size)
			assertSeen(t, "UDP, "+v.name, seen, err, v.seen)
		}
	}
	for _, to := range []*lab.Namespace{p.backend.Namespace, p.remote.Namespace, p.Nodes[0].Namespace, p.Nodes[1].Namespace, p.Outside} {
		if _, err := p.client.Ping(t.Context(), to.Addr(), lab.PingOptions{}); err != nil {
			t.Error(err)
		}
	}
	if _, err := p.Outside.TCP(within(t, 300*time.Millisecond), netip.AddrPortFrom(p.Nodes[1].Addr(), localPort)); err == nil {
		t.Error("a node without an endpoint serves a port of policy Local")
	}
}

// isBeside says what the node's agent says.
func isBeside(t *testing.T, node *lab.Node) bool {
	t.Helper()
	return isOne(t, node, "ebpf_cni_beside_netfilter")
}

// isBesideMasquerading says that for the agent netfilter translates others' packets than pods'.
func isBesideMasquerading(t *testing.T, node *lab.Node) bool {
	t.Helper()
	return isOne(t, node, "ebpf_cni_beside_masquerading")
}

func isOne(t *testing.T, node *lab.Node, metric string) bool {
	t.Helper()
	_, body, err := node.HTTPGet(t.Context(), "/metrics")
	return err == nil && strings.Contains(string(body), "\n"+metric+" 1\n")
}

func (p *proxied) waitBeside(t *testing.T, want bool) {
	t.Helper()
	for _, node := range p.Nodes {
		eventually(t, switchLimit, "the agent of "+node.Name+" has followed netfilter's rules", func() bool { return isBeside(t, node) == want })
	}
}

// Services as kube-proxy makes them, in each of its modes, with agents that find out by themselves.
func TestServicesOfKubeProxy(t *testing.T) {
	t.Parallel()
	forEachFamily(t, func(t *testing.T, family []wire.Family) {
		forNewestAttach(t, func(t *testing.T, flag string) {
			p := startProxied(t, lab.Options{Families: family, AgentFlags: []string{flag}})
			p.waitBeside(t, false)
			for how := range kubeProxy {
				t.Run(how, func(t *testing.T) {
					proxy(t, p.Lab, how, p.services)
					p.waitBeside(t, true)
					p.assertVisits(t)
					p.assertSamePort(t, "near")
					p.assertSamePort(t, "far")
					unproxy(t, p.Lab, how, p.family())
				})
			}
			if out, err := p.Nodes[0].Ebpfctl(t.Context(), "status"); err != nil || !strings.Contains(string(out), "\nnetfilter  translates: ") {
				t.Errorf("error %v, status:\n%s", err, out)
			}
		})
	})
}

// Services whose backends are behind the tunnel, with nodes on one link and on two. Netfilter does not track the outer packets.
func TestServicesThroughTheTunnel(t *testing.T) {
	t.Parallel()
	forEachTunnel(t, func(t *testing.T, opts lab.Options) {
		p := startProxied(t, opts)
		proxy(t, p.Lab, "iptables-nft", p.services)
		p.waitBeside(t, true)
		p.assertVisits(t)
		p.assertSamePort(t, "near")
		p.assertSamePort(t, "far")
		for _, node := range p.Nodes {
			out, err := node.Exec(t.Context(), "conntrack", "-L", "-p", "udp", "--dport", strconv.Itoa(tunnelPort))
			if err != nil || len(out) > 0 {
				t.Errorf("%s tracks outer packets (error %v):\n%s", node.Name, err, out)
			}
		}
	})
}

// assertSamePort has the client use one port to a Service and then to its endpoint, at the same time.
func (p *proxied) assertSamePort(t *testing.T, name string) {
	t.Helper()
	s, port := p.service(name), p.newPort()
	streams, err := p.openSamePort(t.Context(), name, port)
	if err != nil {
		t.Errorf("%s: %v", name, err)
		return
	}
	for _, stream := range streams {
		assertSeen(t, name, stream.Seen, nil, p.client.Addr())
		if err := stream.Echo(t.Context(), 10_000); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	closeAll(streams) // while the rules stand
	packets := listenUDP(t, p.client.Namespace, netip.AddrPortFrom(p.client.Addr(), port))
	for range 3 {
		for _, to := range []netip.AddrPort{s.cluster, s.endpoint} {
			if _, err := packets.WriteToUDPAddrPort(make([]byte, 64), to); err != nil {
				t.Fatal(err)
			}
			if from := receiveAny(t, packets); from != to {
				t.Errorf("%s: %s was asked, and %s answers", name, to, from)
			}
		}
	}
}

// newPort is one that the client has not used.
func (p *proxied) newPort() uint16 { return uint16(p.port.Add(1)) }

// openSamePort connects the client to a Service and then to its endpoint. It returns both connections, or fewer and an error.
func (p *proxied) openSamePort(ctx context.Context, name string, port uint16) (streams []*lab.TCPConn, err error) {
	s := p.service(name)
	for _, to := range []netip.AddrPort{s.cluster, s.endpoint} {
		stream, err := p.client.DialTCP(ctx, to, port)
		if err != nil {
			return streams, err
		}
		streams = append(streams, stream)
	}
	return streams, nil
}

func closeAll(streams []*lab.TCPConn) {
	for _, stream := range streams {
		stream.Close()
	}
}

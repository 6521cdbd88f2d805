package e2e

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// The host ports of the pods web and other, who both answer on webPort.
const (
	anyPort   = 8080 // web's, at all addresses
	ownPort   = 8081 // web's, at the node's own address
	loopPort  = 8082 // web's, over loopback
	protoPort = 8083 // by TCP web's, by UDP other's
	eachPort  = 8084 // web's at the node's own address, other's over loopback
	boundPort = 8085 // web's at all addresses, and a socket's of the node's at one
	webPort   = 80
)

// hosted is a cluster without Services, whose first node's pods ask for host ports. The second node is behind the tunnel.
type hosted struct {
	*lab.Lab
	node *lab.Node
	// old and beside are on the node, and older than its first host port; direct and beyond are on the other nodes.
	old, beside, direct, beyond *lab.Pod
	web, other                  *lab.Pod
}

// TestHostPorts tells one story after the other in one cluster.
func TestHostPorts(t *testing.T) {
	t.Parallel()
	h := &hosted{Lab: startCluster(t, lab.Options{Nodes: 3, Links: 2, Families: families}, drops.BackendGone)}
	h.node = h.Nodes[0]
	h.old, h.beside = addPod(t, h.node, "old"), addPod(t, h.node, "beside")
	h.beyond, h.direct = addPod(t, h.Nodes[1], "beyond"), addPod(t, h.Nodes[2], "direct")
	for _, story := range []struct {
		name string
		tell func(*hosted, *testing.T)
	}{
		{"the first", (*hosted).askFirst},
		{"ways", (*hosted).assertWays},
		{"processes", (*hosted).assertProcesses},
		{"sockets of the node", (*hosted).assertBesideSockets},
		{"sockets of loopback", (*hosted).assertBesideLoopback},
		{"conflicts", (*hosted).assertConflicts},
		{"ports of sockets", (*hosted).assertSocketsHave},
		{"from the link to loopback", (*hosted).assertLoopbackIsClosed},
		{"ports of masquerading", (*hosted).assertNotMasqueradedTo},
		{"without an agent", (*hosted).outliveTheAgent},
		{"without a DEL", (*hosted).loseAPod},
		{"NodePorts", (*hosted).meetNodePorts},
		{"guarded ports", (*hosted).assertGuarded},
	} {
		if !t.Run(story.name, func(t *testing.T) { story.tell(h, t) }) {
			return // the next ones would fail of the same
		}
	}
}

// protocols are what a port is asked for by.
var tcp, udp, both = []string{"tcp"}, []string{"udp"}, []string{"tcp", "udp"}

// ports asks for one at some addresses of the node's; none: at all.
func ports(port uint16, protocols []string, at ...netip.Addr) (all []lab.HostPort) {
	if len(at) == 0 {
		at = []netip.Addr{{}}
	}
	for _, protocol := range protocols {
		for _, host := range at {
			all = append(all, lab.HostPort{Host: host, Port: port, PodPort: webPort, Protocol: protocol})
		}
	}
	return all
}

// addHosted adds a pod that has host ports, and answers. An agent on emulated processors may need longer than the plugin waits.
func addHosted(t *testing.T, node *lab.Node, name string, ports ...lab.HostPort) *lab.Pod {
	t.Helper()
	pod, err := node.AddPod(t.Context(), name, lab.PodOptions{HostPorts: ports})
	var later *types.Error
	for tries := priv.Patience(1); tries > 1 && errors.As(err, &later) && later.Code == types.ErrTryAgainLater; tries-- {
		pod, err = node.AddPod(t.Context(), name, lab.PodOptions{HostPorts: ports}) // as a kubelet does
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pod.Serve(webPort); err != nil {
		t.Fatal(err)
	}
	return pod
}

// askFirst: with the first host port of a node its programs translate, by a start of the agent within its process. What is under way goes
// on, and the runtime notices nothing.
func (h *hosted) askFirst(t *testing.T) {
	if serves(t, h.node) {
		t.Error("the programs translate although no pod has asked for it")
	}
	agent := h.node.AgentPID()
	list, err := os.Stat(h.node.Conflist())
	if err != nil {
		t.Fatal(err)
	}
	tr := startTraffic(t, h.old, h.beside.Namespace, h.direct.Namespace, h.beyond.Namespace, h.Outside)
	in := connect(t, h.beyond.Namespace, serve(t, h.old.Namespace), 1, 3)
	own := h.node.Addrs()
	h.web = addHosted(t, h.node, "web", slices.Concat(
		ports(anyPort, both), ports(ownPort, both, own...), ports(loopPort, both, loopback[:]...), ports(protoPort, tcp), ports(eachPort, both, own...),
		ports(boundPort, both), ports(inRange, both),
	)...)
	for _, family := range families {
		assertServedTo(t, h.old.Namespace, netip.AddrPortFrom(h.node.AddrOf(family), anyPort), h.web.Endpoint(family, webPort).At, h.old.AddrOf(family))
	}
	tr.end(t)
	in.assertAlive(t, "with the first host port")
	in.close()
	if now, err := os.Stat(h.node.Conflist()); err != nil || !os.SameFile(now, list) || h.node.AgentPID() != agent {
		t.Errorf("the list for the runtime is another one, or gone: %v; or the agent is: %d, %d before", err, h.node.AgentPID(), agent)
	}
	if log, err := os.ReadFile(h.node.AgentLog()); err != nil || strings.Count(string(log), "starting anew") != 1 || strings.Contains(string(log), "level=ERROR") {
		t.Errorf("the agent has not started anew once, or with errors: %v\n%s", err, log)
	}
	h.other = addHosted(t, h.node, "other", slices.Concat(ports(protoPort, udp), ports(eachPort, both, loopback[:]...))...)
	for _, pod := range []*lab.Pod{h.old, h.beside, h.web} {
		if err := pod.Check(t.Context()); err != nil {
			t.Error(err)
		}
	}
	for i, node := range h.Nodes {
		if serves(t, node) != (i == 0) {
			t.Errorf("that the programs of %s translate: %v", node.Name, i != 0)
		}
	}
}

// serves says whether a node's programs translate to backends.
func serves(t *testing.T, node *lab.Node) bool {
	t.Helper()
	flags, _ := dump(t, node, "config")[0]["flags"].(string)
	return strings.Contains(flags, "services")
}

// answering are who has a port, by TCP and by UDP.
type answering map[uint16][2]*lab.Pod

// byAddress are those at the node's own address.
func (h *hosted) byAddress() answering {
	web, other := h.web, h.other
	return answering{anyPort: {web, web}, ownPort: {web, web}, protoPort: {web, other}, eachPort: {web, web}, boundPort: {web, web}, inRange: {web, web}}
}

// assertWays asks by the node's address, from everywhere but the node itself. Who is asked sees who asks; only a pod that asks
// itself sees the address that it has asked.
func (h *hosted) assertWays(t *testing.T) {
	for _, family := range families {
		at := h.node.AddrOf(family)
		to, web := netip.AddrPortFrom(at, anyPort), h.web.Endpoint(family, webPort).At
		for _, from := range []*lab.Namespace{h.Outside, h.beside.Namespace, h.direct.Namespace, h.beyond.Namespace} {
			assertServedTo(t, from, to, web, from.AddrOf(family))
		}
		for _, from := range []*lab.Namespace{h.Outside, h.old.Namespace, h.beyond.Namespace, h.Nodes[1].Namespace, h.Nodes[2].Namespace} {
			h.byAddress().assertFrom(t, from, at, from.AddrOf(family))
			assertRefusedTo(t, from, netip.AddrPortFrom(at, loopPort))
		}
		answering{anyPort: {h.web, h.web}}.assertFrom(t, h.web.Namespace, at, at)
		h.assertOtherAddress(t, family)
	}
}

// assertFrom asks for each port at an address of the node's.
func (a answering) assertFrom(t *testing.T, from *lab.Namespace, at, seen netip.Addr) {
	t.Helper()
	family := wire.FamilyOf(at)
	for port, by := range a {
		to := netip.AddrPortFrom(at, port)
		conn, err := from.DialTCP(within(t, answerLimit), to, 0)
		if err != nil {
			t.Error(err)
			continue
		}
		conn.Close()
		if want := by[0].Endpoint(family, webPort).At; conn.By != want || conn.Seen.Addr() != seen {
			t.Errorf("TCP from %s to %s is answered by %s, which saw %s; want %s and %s", from.Netns(), to, conn.By, conn.Seen, want, seen)
		}
		got, err := from.AskUDP(within(t, answerLimit), to)
		if want := by[1].Endpoint(family, webPort).At; err != nil || got != want {
			t.Errorf("UDP from %s to %s is answered by %s, want %s; %v", from.Netns(), to, got, want, err)
		}
	}
}

// assertOtherAddress gives the node one more, which has the ports of all addresses alone.
func (h *hosted) assertOtherAddress(t *testing.T, family wire.Family) {
	t.Helper()
	more := [wire.Families]netip.Addr{wire.IPv4: netip.MustParseAddr("192.0.2.44"), wire.IPv6: netip.MustParseAddr("2001:db8:44::1")}[family]
	release := hold(t, h.node, more)
	defer release()
	eventually(t, changeLimit, "host ports are open at an address that is new", func() bool {
		_, err := h.old.TCP(within(t, refusedAtOnce), netip.AddrPortFrom(more, anyPort))
		return err == nil
	})
	answering{anyPort: {h.web, h.web}}.assertFrom(t, h.old.Namespace, more, h.old.AddrOf(family))
	assertRefusedTo(t, h.old.Namespace, netip.AddrPortFrom(more, ownPort))
}

// assertProcesses of the node, by its address and over loopback.
func (h *hosted) assertProcesses(t *testing.T) {
	p := startProcess(t, h.node, h.node.Namespace)
	here := answering{anyPort: {h.web, h.web}, loopPort: {h.web, h.web}, protoPort: {h.web, h.other}, eachPort: {h.other, h.other}}
	for _, family := range families {
		own, local := h.node.AddrOf(family), loopback[family]
		h.byAddress().assertAsked(t, p, own, family)
		assertClosed(t, p, own, loopPort)
		here.assertAsked(t, p, local, family)
		assertClosed(t, p, local, ownPort)
		answering{anyPort: {h.web, h.web}}.assertAsked(t, p, everywhere[family].Addr(), family)
	}
	here.assertAsked(t, p, mapped(netip.AddrPortFrom(loopback[wire.IPv4], 0)).Addr(), wire.IPv4)
	assertClosed(t, p, netip.MustParseAddr("127.8.9.10"), anyPort)
}

// assertAsked has a process of the node's ask for each port.
func (a answering) assertAsked(t *testing.T, p *lab.Process, at netip.Addr, family wire.Family) {
	t.Helper()
	for port, by := range a {
		to := netip.AddrPortFrom(at, port)
		if got, want := asTCP(t, p, to), by[0].Endpoint(family, webPort).At; got != want {
			t.Errorf("TCP to %s is answered by %s, want %s", to, got, want)
		}
		for how, got := range map[string]netip.AddrPort{"connected": asUDP(t, p, to), "loose": openLoose(t, p, at).ask(t, to)} {
			if want := by[1].Endpoint(family, webPort).At; got != want {
				t.Errorf("a datagram to %s by a %s socket is answered by %s, want %s", to, how, got, want)
			}
		}
	}
}

// assertBesideSockets: a socket of the node's that is bound to one address has it to itself, one of all addresses gives way.
func (h *hosted) assertBesideSockets(t *testing.T) {
	p := startProcess(t, h.node, h.node.Namespace)
	all, err := h.node.Serve(anyPort)
	if err != nil {
		t.Fatal(err)
	}
	defer all.Close()
	one, err := h.node.ServeAt(boundPort, h.node.Addrs()...)
	if err != nil {
		t.Fatal(err)
	}
	defer one.Close()
	named, err := h.node.ServeAt(ownPort, h.node.Addrs()...)
	if err != nil {
		t.Fatal(err)
	}
	defer named.Close()
	for _, family := range families {
		own := h.node.AddrOf(family)
		web := answering{anyPort: {h.web, h.web}}
		web.assertFrom(t, h.Outside, own, h.Outside.AddrOf(family))
		web.assertFrom(t, h.old.Namespace, own, h.old.AddrOf(family))
		web.assertAsked(t, p, own, family)
		web[boundPort] = web[anyPort]
		web.assertAsked(t, p, loopback[family], family)

		h.assertBound(t, p, netip.AddrPortFrom(own, boundPort))
		h.assertBound(t, p, netip.AddrPortFrom(own, ownPort))
	}
	one.Close()
	named.Close()
	for _, family := range families {
		answering{boundPort: {h.web, h.web}, ownPort: {h.web, h.web}}.assertFrom(t, h.Outside, h.node.AddrOf(family), h.Outside.AddrOf(family))
	}
	another := netip.MustParseAddrPort("127.8.9.10:8080") // is no host port's
	if by := asTCP(t, p, another); by != another {
		t.Errorf("%s is answered by %s", another, by)
	}
}

// assertBound asks, from everywhere, where a socket of the node's is bound to the very address.
func (h *hosted) assertBound(t *testing.T, p *lab.Process, to netip.AddrPort) {
	t.Helper()
	for _, from := range []*lab.Namespace{h.Outside, h.old.Namespace, h.beyond.Namespace} {
		conn, err := from.DialTCP(within(t, answerLimit), to, 0)
		if err != nil {
			t.Error(err)
			continue
		}
		conn.Close()
		by, err := from.AskUDP(within(t, answerLimit), to)
		if conn.By != to || by != to || err != nil {
			t.Errorf("%s, where a socket of the node's is bound, is answered by %s and %s; %v", to, conn.By, by, err)
		}
	}
	assertBoundFor(t, p, to)
}

// assertBoundFor has a process of the node's ask there.
func assertBoundFor(t *testing.T, p *lab.Process, to netip.AddrPort) {
	t.Helper()
	if stream, packet := asTCP(t, p, to), asUDP(t, p, to); stream != to || packet != to {
		t.Errorf("%s, where a socket of the node's is bound, is answered by %s and %s to a process", to, stream, packet)
	}
}

// assertBesideLoopback: what listens on loopback, as kubelet and agents do, no pod takes over, whatever address it names.
func (h *hosted) assertBesideLoopback(t *testing.T) {
	p := startProcess(t, h.node, h.node.Namespace)
	for _, port := range []uint16{loopPort, boundPort} {
		s, err := h.node.ServeAt(port, loopback[:]...)
		if err != nil {
			t.Fatal(err)
		}
		for _, family := range families {
			bound := netip.AddrPortFrom(loopback[family], port)
			assertBoundFor(t, p, bound)
			conn, err := p.DialTCP(t.Context(), netip.AddrPortFrom(everywhere[family].Addr(), port)) // which is loopback's
			if err != nil {
				t.Error(err)
				continue
			}
			conn.Close()
			if conn.By != bound {
				t.Errorf("the unspecified address is answered by %s, want %s", conn.By, bound)
			}
		}
		s.Close()
		answering{port: {h.web, h.web}}.assertAsked(t, p, loopback[wire.IPv4], wire.IPv4)
	}
}

package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// receiveAny waits for a datagram, whatever is in it, and says where it came from.
func receiveAny(t *testing.T, conn *net.UDPConn) netip.AddrPort {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(priv.Patience(answerLimit))); err != nil {
		t.Fatal(err)
	}
	_, from, err := conn.ReadFromUDPAddrPort(make([]byte, 2048))
	if err != nil {
		t.Errorf("no answer: %v", err)
	}
	return from
}

// Rules come while pods talk, and the mode goes again: what was there goes on, without a loss, whether it was there before
// the rules or came with them.
func TestFlowsOutliveTheModeBesideNetfilter(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, flag string) {
		p := startProxied(t, lab.Options{AgentFlags: []string{flag}})
		direct := []string{"near", "far", "outside", "host", "kubernetes"}
		var endpoints []netip.AddrPort
		for _, name := range direct {
			endpoints = append(endpoints, p.service(name).endpoint)
		}
		older := startSteadyFlows(t, p.client.Namespace, endpoints...)
		streams := p.open(t, endpoints)

		proxy(t, p.Lab, "iptables-nft", p.services)
		p.waitBeside(t, true)
		p.assertVisits(t)
		newer := startSteadyFlows(t, p.client.Namespace, endpoints...)
		streams = append(streams, p.open(t, endpoints)...)
		for _, stream := range streams {
			if err := stream.Echo(t.Context(), 100_000); err != nil {
				t.Errorf("beside netfilter: %v", err)
			}
		}

		translated := startSteadyFlows(t, p.client.Namespace, p.at("near"), p.at("far"), p.at("outside"), p.at("kubernetes"))
		p.restart(t)
		p.waitBeside(t, true)
		// Somebody writes the rules anew; what they have translated goes on.
		for _, node := range p.Nodes {
			if _, err := node.Exec(t.Context(), "iptables-nft", "-t", "nat", "-F"); err != nil {
				t.Fatal(err)
			}
		}
		p.restart(t)
		p.waitBeside(t, true)
		translated.end(t)

		p.restart(t, "--kube-proxy=off")
		p.waitBeside(t, false)
		for _, stream := range streams {
			if err := stream.Echo(t.Context(), 100_000); err != nil {
				t.Errorf("without netfilter: %v", err)
			}
		}
		older.end(t)
		newer.end(t)
	})
}

// restart ends all agents and starts them again.
func (p *proxied) restart(t *testing.T, flags ...string) {
	t.Helper()
	for _, node := range p.Nodes {
		if _, err := node.StopAgent(); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.StartAgents(within(t, readyLimit), flags...); err != nil {
		t.Fatal(err)
	}
}

// open makes a connection of the client's to each address.
func (p *proxied) open(t *testing.T, to []netip.AddrPort) (streams []*lab.TCPConn) {
	t.Helper()
	for _, at := range to {
		stream, err := p.client.DialTCP(t.Context(), at, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { stream.Close() })
		streams = append(streams, stream)
	}
	return streams
}

// An administrator who knows may say so, and what is said is not looked for.
func TestModeBesideNetfilterByFlag(t *testing.T) {
	t.Parallel()
	p := startProxied(t, lab.Options{AgentFlags: []string{"--kube-proxy=on"}})
	p.waitBeside(t, true) // without a rule
	proxy(t, p.Lab, "nftables", p.services)
	p.assertVisits(t)
}

// boxNetwork is where boxes are.
var boxNetwork = [wire.Families]netip.Prefix{wire.IPv4: netip.MustParsePrefix("192.168.7.0/24"), wire.IPv6: netip.MustParsePrefix("fd00:192:168:7::/64")}

// masqueradeRule is what somebody has for a box, and for packets that netfilter calls invalid.
func masqueradeRule(family wire.Family) string {
	return fmt.Sprintf(`table %[1]s own {
	chain out { type nat hook postrouting priority 100; %[1]s saddr %[2]s oifname eth0 masquerade; }
	chain through { type filter hook forward priority 0; ct state invalid drop; }
}
`, netfilters[family].nft, boxNetwork[family])
}

// box is a host behind a node that is no pod, as containers of another runtime are.
func box(t *testing.T, l *lab.Lab, node *lab.Node) *lab.Namespace {
	t.Helper()
	family := firstFamily(l)
	network := boxNetwork[family]
	inside, gateway := inNetwork(network, 7), inNetwork(network, 1)
	ns, err := l.NewHost("box", inside)
	if err != nil {
		t.Fatal(err)
	}
	peer, err := os.Open(ns.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "box0"
	if err := node.Netlink().LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(peer.Fd())}); err != nil {
		t.Fatal(err)
	}
	for _, end := range []struct {
		on      *lab.Namespace
		name    string
		address netip.Addr
	}{{node.Namespace, "box0", gateway}, {ns, "eth0", inside}} {
		found, err := end.on.Netlink().LinkByName(end.name)
		if err != nil {
			t.Fatal(err)
		}
		if err := end.on.Netlink().LinkSetUp(found); err != nil {
			t.Fatal(err)
		}
		address := prefix(netip.PrefixFrom(end.address, network.Bits()).String())
		if err := end.on.Netlink().AddrAdd(found, &netlink.Addr{IPNet: address, Flags: unix.IFA_F_NODAD}); err != nil {
			t.Fatal(err)
		}
	}
	if err := ns.AddRoute(everywhere[family], gateway, ""); err != nil {
		t.Fatal(err)
	}
	return ns
}

// Netfilter masquerades somebody else's flow to a port of our range that a pod has too, in both orders.
func TestMasqueradeOfNetfilterOnAPodsPort(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, flag string) {
		l := startCluster(t, lab.Options{Nodes: 1, AgentFlags: []string{flag}})
		node, pod, at := l.Nodes[0], addPod(t, l.Nodes[0], "a"), serve(t, l.Outside)
		other := box(t, l, node)
		applyRules(t, node, masqueradeRule(firstFamily(l)), "nft", "-f")
		eventually(t, switchLimit, "the agent has followed the rule", func() bool { return isBesideMasquerading(t, node) })
		for i, order := range [][]*lab.Namespace{{other, pod.Namespace}, {pod.Namespace, other}} {
			t.Run(fmt.Sprint("order ", i), func(t *testing.T) {
				assertBothKeepTheirFlows(t, order, at, uint16(inRange+i), node.Addr())
			})
		}
	})
}

// The same with each program removed: who is then cut off, and that all keep their flows.
func TestMasqueradeOfNetfilterWithAProgramRemoved(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, flag string) {
		l := startCluster(t, lab.Options{Nodes: 1, AgentFlags: []string{flag, "--kube-proxy=on"}}, drops.NoMapping)
		node, pod, at := l.Nodes[0], addPod(t, l.Nodes[0], "a"), serve(t, l.Outside)
		other := box(t, l, node)
		applyRules(t, node, masqueradeRule(firstFamily(l)), "nft", "-f")
		eventually(t, switchLimit, "the agent has followed the rule", func() bool { return isBeside(t, node) })
		if err := node.KillAgent(); err != nil {
			t.Fatal(err)
		}
		m := newMaimed(l, node, pod, flag)
		for i, order := range [][]*lab.Namespace{{other, pod.Namespace}, {pod.Namespace, other}} {
			for _, from := range order {
				old, err := from.DialTCP(t.Context(), at, uint16(inRange+i))
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { old.Close() })
				m.ways = append(m.ways, way{name: fmt.Sprint(from.Netns(), ", order ", i), from: from, to: at, old: old})
			}
		}
		first, second := pod.Netns()+", order 0", pod.Netns()+", order 1"
		// The box's flow that came second has the pod's port, and another outside.
		translated := []string{"old, " + first, "new, " + first, "old, " + second, "new, " + second, "old, " + other.Netns() + ", order 1"}
		for hook, cut := range map[attach.Hook][]string{attach.FromPod: nil, attach.FromUplink: translated, attach.ToUplink: translated} {
			t.Run(string(hook), func(t *testing.T) {
				m.withoutProgram(t, hook, cut, func() {})
			})
		}
	})
}

// assertBothKeepTheirFlows has each use the same port to the same server, one after the other.
func assertBothKeepTheirFlows(t *testing.T, order []*lab.Namespace, at netip.AddrPort, port uint16, node netip.Addr) {
	t.Helper()
	var streams []*lab.TCPConn
	var packets []*lab.UDPConn
	var tcp, udp []netip.AddrPort
	for _, from := range order {
		stream, err := from.DialTCP(t.Context(), at, port)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { stream.Close() })
		conn, err := from.DialUDP(at, port)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		seen, err := conn.Echo(t.Context(), 100)
		assertSeen(t, "UDP of "+from.Netns(), seen, err, node)
		assertSeen(t, "TCP of "+from.Netns(), stream.Seen, nil, node)
		streams, packets, tcp, udp = append(streams, stream), append(packets, conn), append(tcp, stream.Seen), append(udp, seen)
	}
	if tcp[0].Port() != port || udp[0].Port() != port {
		t.Errorf("the first was seen as %s by TCP and %s by UDP, not from port %d: this shows nothing", tcp[0], udp[0], port)
	}
	if tcp[0] == tcp[1] || udp[0] == udp[1] {
		t.Errorf("both were seen as %s by TCP, or as %s by UDP", tcp[0], udp[0])
	}
	for range 2 {
		for i := range slices.Backward(order) {
			if err := streams[i].Echo(t.Context(), 100_000); err != nil {
				t.Error(err)
			}
			if _, err := packets[i].Echo(t.Context(), 100); err != nil {
				t.Error(err)
			}
		}
	}
}

package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// theBridge is what the nodes of these tests have their containers behind.
const theBridge = "docker0"

// bridgeMTU is that of the bridge and its containers: what the tunnel carries.
const bridgeMTU = 1500 - 70

// bridged is a cluster of two nodes with containers behind a bridge, and one with pods.
type bridged struct {
	*lab.Lab
	one, other, far *lab.Namespace // on the first node twice, and on the second
	pod             *lab.Pod       // on the third
}

func startBridged(t *testing.T, opts lab.Options, expected ...drops.Reason) bridged {
	t.Helper()
	opts.Nodes = 3
	b := bridged{Lab: lab.ForTest(t, opts, expected...)}
	for _, node := range b.Nodes[:2] {
		must(t, node.AddBridge(theBridge, bridgeMTU))
		startBridgedAgent(t, node)
	}
	must(t, b.Nodes[2].StartAgent())
	must(t, b.Nodes[2].WaitReady(within(t, readyLimit)))
	b.one, b.other = addContainer(t, b.Nodes[0], "one", 2), addContainer(t, b.Nodes[0], "other", 3)
	b.far, b.pod = addContainer(t, b.Nodes[1], "far", 4), addPod(t, b.Nodes[2], "pod")
	return b
}

// startBridgedAgent starts an agent that knows of the bridge, and waits until it is ready and has taken it.
func startBridgedAgent(t *testing.T, node *lab.Node) {
	t.Helper()
	node.Bridged = true
	must(t, node.StartAgent("--attach-bridge="+theBridge))
	must(t, node.WaitReady(within(t, readyLimit)))
}

func addContainer(t *testing.T, node *lab.Node, name string, last byte) *lab.Namespace {
	t.Helper()
	ns, err := node.AddContainer(theBridge, name, last)
	must(t, err)
	return ns
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// assertReached is assertReaches with packets that a bridge carries, which is narrower than links are.
func assertReached(t *testing.T, from *lab.Namespace, to netip.AddrPort, seenAs netip.Addr) {
	t.Helper()
	if _, err := from.Ping(t.Context(), to.Addr(), lab.PingOptions{}); err != nil {
		t.Error(err)
	}
	seen, err := from.TCP(t.Context(), to)
	assertSeen(t, fmt.Sprintf("TCP from %s to %s", from.Netns(), to), seen, err, seenAs)
	seen, err = from.UDP(t.Context(), to, 1300)
	assertSeen(t, fmt.Sprintf("UDP from %s to %s", from.Netns(), to), seen, err, seenAs)
}

// assertCarried has everybody reach everybody, in a family.
func (b bridged) assertCarried(t *testing.T, family wire.Family) {
	t.Helper()
	all := []party{{b.one, b.Nodes[0]}, {b.other, b.Nodes[0]}, {b.far, b.Nodes[1]}, {b.pod.Namespace, b.Nodes[2]}}
	for _, node := range b.Nodes {
		all = append(all, party{node.Namespace, node})
	}
	world := serveOver(t, b.Outside, family)
	for _, to := range all {
		at := serveOver(t, to.Namespace, family)
		for _, from := range all {
			if from.Namespace == to.Namespace {
				continue
			}
			seenAs := from.AddrOf(family)
			if from.Namespace == from.node.Namespace && (to.Namespace == b.one || to.Namespace == b.other || to.Namespace == b.far) && to.node == from.node {
				seenAs = inNetwork(from.node.PodCIDROf(family), 1) // the host has an address on its bridge
			}
			assertReached(t, from.Namespace, at, seenAs)
		}
		assertReached(t, to.Namespace, world, to.node.AddrOf(family))
	}
}

// Containers behind a bridge are pods as far as packets go, and have the host on the bridge's address as well.
func TestContainersBehindABridge(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"direct", "vxlan"} {
		t.Run(mode, func(t *testing.T) {
			forNewestAttach(t, func(t *testing.T, attach string) {
				b := startBridged(t, lab.Options{Families: families, AgentFlags: []string{attach, "--routing-mode=" + mode}})
				overEachFamily(t, b.Lab, func(t *testing.T, family wire.Family) {
					b.assertCarried(t, family)
					gateway, err := b.Nodes[0].ServeAt(0, inNetwork(b.Nodes[0].PodCIDROf(family), 1))
					must(t, err)
					for _, from := range []*lab.Namespace{b.one, b.far, b.pod.Namespace} {
						assertReached(t, from, netip.AddrPortFrom(inNetwork(b.Nodes[0].PodCIDROf(family), 1), gateway.Port), from.AddrOf(family))
					}
				})
				for _, arg := range [][]string{{"status"}, {"dump", "bridges"}} {
					text, err := b.Nodes[0].Ebpfctl(t.Context(), arg...)
					must(t, err)
					for _, p := range b.Nodes[0].PodCIDRs {
						if !strings.Contains(string(text), p.String()) || arg[0] == "status" && !strings.Contains(string(text), "No problems.") {
							t.Errorf("ebpfctl %s, want %s in it, and no problems:\n%s", arg, p, text)
						}
					}
				}
				if _, err := os.Stat(b.Nodes[0].Conflist()); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("the node has a network configuration list: %v", err)
				}
			})
		})
	}
}

// What a container sends past its bridge has an address of its bridge as its source, and the bridge's own address is the host's.
func TestContainersCannotSpoof(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		b := startBridged(t, lab.Options{Families: families, AgentFlags: []string{attach}}, drops.SpoofedSource)
		captures := []*lab.Capture{}
		for ns, link := range map[*lab.Namespace]string{b.far: "eth0", b.pod.Namespace: b.pod.IfName, b.Outside: lab.Uplink} {
			capture, err := ns.Capture(link)
			must(t, err)
			captures = append(captures, capture)
		}
		sent := uint64(0)
		overEachFamily(t, b.Lab, func(t *testing.T, family wire.Family) {
			gateway := inNetwork(b.Nodes[0].PodCIDROf(family), 1)
			for _, source := range []netip.Addr{b.far.AddrOf(family), b.Nodes[0].AddrOf(family), gateway, strangers[family]} {
				for _, to := range []netip.Addr{b.far.AddrOf(family), b.pod.AddrOf(family), b.Outside.AddrOf(family)} {
					if source != to {
						must(t, b.one.SendRaw(datagram(t, source, to, "lie")))
						sent++
					}
				}
			}
			eventually(t, answerLimit, "every spoofed packet is counted", func() bool { return dropped(t, b.Nodes[0], drops.SpoofedSource) == sent })
		})
		for _, capture := range captures {
			for _, packet := range capture.Close() {
				if app := packet.ApplicationLayer(); app != nil && string(app.Payload()) == "lie" {
					t.Errorf("a spoofed packet got through:\n%s", packet)
				}
			}
		}
	})
}

// A container that gets the address of another one, and so Docker's Ethernet address for it, gets nothing of its flows.
func TestNextContainerInheritsNothing(t *testing.T) {
	t.Parallel()
	forEachFamily(t, func(t *testing.T, family []wire.Family) {
		b := startBridged(t, lab.Options{Families: family}, drops.NoMapping)
		at := netip.AddrPortFrom(b.Outside.Addr(), 7000)
		world := listenUDP(t, b.Outside, at)
		inside := dialUDP(t, b.one, inRange, at)
		send(t, inside, "hello")
		from := receive(t, world, "hello")
		if _, err := world.WriteToUDPAddrPort([]byte("answer"), from); err != nil {
			t.Fatal(err)
		}
		receive(t, inside, "answer")
		inside.Close()
		if n := flowsOf(t, b.Nodes[0], b.one.Addr()); n == 0 {
			t.Fatal("the container has no flow")
		}
		address := b.one.Addr()
		must(t, b.Nodes[0].RemoveContainer(b.one, "one"))
		eventually(t, answerLimit, "its flows have ended", func() bool { return flowsOf(t, b.Nodes[0], address) == 0 })

		heir := addContainer(t, b.Nodes[0], "heir", 2)
		capture, err := heir.Capture(lab.Uplink)
		must(t, err)
		for range 10 {
			if _, err := world.WriteToUDPAddrPort([]byte("for the old one"), from); err != nil {
				break // the node says that nobody listens: right
			}
		}
		assertReached(t, heir, serve(t, b.Outside), b.Nodes[0].Addr())
		for _, packet := range capture.Close() {
			if udp, ok := packet.TransportLayer().(*layers.UDP); ok && udp.SrcPort == 7000 {
				t.Errorf("the new owner of %s saw a packet of the old one's flow:\n%s", address, packet)
			}
		}
		// The other containers' flows are left alone.
		assertReached(t, b.other, serve(t, b.Outside), b.Nodes[0].Addr())
	})
}

// flowsOf is how many masqueraded flows of an address a node has.
func flowsOf(t *testing.T, node *lab.Node, address netip.Addr) int {
	t.Helper()
	text, err := node.Ebpfctl(t.Context(), "dump", "snat", "-o", "json")
	must(t, err)
	return bytes.Count(text, []byte(`"src":"`+address.String()+`"`)) + bytes.Count(text, []byte(`"src": "`+address.String()+`"`))
}

// Whoever owns the bridge may delete it and make it anew, before the agent starts, while it runs and while it is dead.
func TestBridgeComesAndGoes(t *testing.T) {
	t.Parallel()
	forEachFamily(t, func(t *testing.T, family []wire.Family) {
		b := startBridged(t, lab.Options{Families: family})
		node := b.Nodes[0]
		b.assertCarried(t, family[0])
		makeAnew := func() {
			must(t, node.AddBridge(theBridge, bridgeMTU))
			b.one, b.other = addContainer(t, node, "one", 2), addContainer(t, node, "other", 3)
		}
		unmake := func() {
			must(t, node.RemoveContainer(b.one, "one"))
			must(t, node.RemoveContainer(b.other, "other"))
			must(t, node.DeleteLink(theBridge))
		}
		carried := func() bool {
			text, _ := node.Ebpfctl(t.Context(), "status")
			return strings.Contains(string(text), theBridge+" "+node.PodCIDR().String())
		}
		unmake()
		eventually(t, answerLimit, "the bridge is gone", func() bool { return !carried() })
		makeAnew()
		eventually(t, answerLimit, "the bridge is carried again", carried)
		b.assertCarried(t, family[0])

		conn, err := b.one.DialTCP(t.Context(), serve(t, b.Outside), 0)
		must(t, err)
		defer conn.Close()
		must(t, node.KillAgent())
		if err := conn.Echo(t.Context(), 10_000); err != nil {
			t.Error(err)
		}
		b.assertCarried(t, family[0])
		startBridgedAgent(t, node)
		if err := conn.Echo(t.Context(), 10_000); err != nil {
			t.Error(err)
		}

		must(t, node.KillAgent())
		unmake()
		makeAnew()
		startBridgedAgent(t, node)
		eventually(t, answerLimit, "the new bridge is carried", carried)
		b.assertCarried(t, family[0])
	})
}

// A bridge that is not there is waited for, and one that has no address of the podCIDR is left alone; both are said.
func TestBridgeIsWaitedFor(t *testing.T) {
	t.Parallel()
	l := lab.ForTest(t, lab.Options{Nodes: 1, Families: families})
	node := l.Nodes[0]
	startBridgedAgent(t, node)
	says := func(what string) func() bool {
		return func() bool {
			text, _ := node.Ebpfctl(t.Context(), "status") // which fails where there are problems
			return strings.Contains(string(text), what)
		}
	}
	eventually(t, answerLimit, "the missing bridge is said", says("there is no bridge "+theBridge+" yet"))
	must(t, node.AddBridge(theBridge, bridgeMTU))
	eventually(t, answerLimit, "nothing is missing", says("No problems."))
	text, err := node.Ebpfctl(t.Context(), "dump", "devices", "-o", "json")
	must(t, err)
	if !strings.Contains(string(text), `"ifindex": 0,`) {
		t.Errorf("nothing counts which neighbours the world has the bridge asked for:\n%s", text)
	}
	container := addContainer(t, node, "one", 2)
	eventually(t, priv.Patience(time.Second), "it is carried", func() bool {
		_, err := container.TCP(t.Context(), serve(t, l.Outside))
		return err == nil
	})
}

// forwardRules are those by which Docker has the stack forward for its containers, and for nobody else.
func forwardRules(container netip.AddrPort) string {
	return fmt.Sprintf(`*filter
:FORWARD DROP [0:0]
-A FORWARD -o %[1]s -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A FORWARD -d %[2]s ! -i %[1]s -o %[1]s -p tcp -m tcp --dport %[3]d -j ACCEPT
-A FORWARD -i %[1]s ! -o %[1]s -j ACCEPT
-A FORWARD -i %[1]s -o %[1]s -j ACCEPT
COMMIT
`, theBridge, only(container.Addr()), container.Port())
}

// Docker's own rules work on: a published port leads to its container, and neither these nor what forbids all else to be
// forwarded keeps containers from each other.
func TestDockersRulesBesideABridge(t *testing.T) {
	t.Parallel()
	forEachFamily(t, func(t *testing.T, family []wire.Family) {
		b := startBridged(t, lab.Options{Families: family}, drops.NoMapping)
		node, names := b.Nodes[0], netfilters[family[0]]
		inside := serve(t, b.one)
		nat := strings.ReplaceAll(containerRules(node.PodCIDR(), inside), "box0", theBridge)
		applyRules(t, node, nat+forwardRules(inside), names.iptables+"-nft-restore", "-n")
		eventually(t, switchLimit, "the agent works beside netfilter", func() bool { return isBeside(t, node) })
		at := netip.AddrPortFrom(node.Addr(), published)
		for _, from := range []*lab.Namespace{b.far, b.pod.Namespace, b.Nodes[1].Namespace, b.Outside} {
			if _, err := from.TCP(t.Context(), at); err != nil {
				t.Errorf("%s to the published port: %v", from.Netns(), err)
			}
		}
		for _, to := range []netip.AddrPort{serve(t, b.far), serve(t, b.pod.Namespace), serve(t, b.Outside), serve(t, node.Namespace)} {
			if _, err := b.one.TCP(t.Context(), to); err != nil {
				t.Errorf("the container to %s: %v", to, err)
			}
		}
		for _, from := range []*lab.Namespace{b.far, b.pod.Namespace, node.Namespace} {
			if _, err := from.TCP(t.Context(), serve(t, b.other)); err != nil {
				t.Errorf("%s to a container: %v", from.Netns(), err)
			}
		}
	})
}

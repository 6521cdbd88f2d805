package e2e

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// inRange is a port of the default masquerading range, which a pod keeps when it is free.
const inRange = 50001

func TestSameSourcePortToTheSameServer(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 2, Families: families, AgentFlags: []string{attach}})
		pods := []*lab.Pod{addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[0], "b"), addPod(t, l.Nodes[1], "c")}
		overEachFamily(t, l, func(t *testing.T, family wire.Family) {
			at := serveOver(t, l.Outside, family)
			seen := map[string]string{}
			for _, pod := range pods {
				stream, err := pod.DialTCP(t.Context(), at, inRange)
				if err != nil {
					t.Fatal(err)
				}
				defer stream.Close()
				packets, err := pod.DialUDP(at, inRange)
				if err != nil {
					t.Fatal(err)
				}
				defer packets.Close()
				from, err := packets.Echo(t.Context(), 100)
				assertSeen(t, "UDP of "+pod.Name, from, err, pod.Node.AddrOf(family))
				assertSeen(t, "TCP of "+pod.Name, stream.Seen, nil, pod.Node.AddrOf(family))
				for _, name := range []string{"TCP " + stream.Seen.String(), "UDP " + from.String()} {
					if other, taken := seen[name]; taken {
						t.Errorf("%s and %s both came as %s", other, pod.Name, name)
					}
					seen[name] = pod.Name
				}
				// All earlier flows live on beside the new one.
				defer func() {
					if err := stream.Echo(t.Context(), 1000); err != nil {
						t.Error(err)
					}
					if _, err := packets.Echo(t.Context(), 100); err != nil {
						t.Error(err)
					}
				}()
			}
		})
	})
}

// Pods that want more ports towards one server than there are get their shares of connections, and each port goes to one connection.
func TestEveryPortInUse(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		forEachFamily(t, func(t *testing.T, family []wire.Family) {
			const flows, ports, first = 200, 100, 50000
			l := startCluster(t, lab.Options{Nodes: 1, Families: family, AgentFlags: []string{attach, fmt.Sprintf("--snat-ports=%d-%d", first, first+ports-1)}}, drops.PortLimit)
			at := serve(t, l.Outside)
			pods := []*lab.Pod{addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[0], "b")}
			// The node's own ping takes no port, and finds the neighbour: few packets can wait for that.
			if _, err := l.Nodes[0].Ping(t.Context(), l.Outside.Addr(), lab.PingOptions{}); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), priv.Patience(5*time.Second))
			defer cancel()
			var all sync.WaitGroup
			var mu sync.Mutex
			seen := map[netip.AddrPort]int{}
			for i := range flows {
				all.Go(func() {
					conn, err := pods[i%len(pods)].DialTCP(ctx, at, 0)
					if err != nil { // refused a port
						return
					}
					t.Cleanup(func() { conn.Close() }) // open until the end
					mu.Lock()
					seen[conn.Seen]++
					mu.Unlock()
				})
			}
			all.Wait()
			// Each pod stops where it holds twice as many as are free, or a few more: then the programs go by a sample.
			want := ports * 2 * len(pods) / (2*len(pods) + 1)
			if len(seen) < want || len(seen) > ports*9/10 {
				t.Errorf("%d connections were carried, want %d or a few more", len(seen), want)
			}
			for from, times := range seen {
				if times != 1 || from.Addr() != l.Nodes[0].Addr() || from.Port() < first || from.Port() >= first+ports {
					t.Errorf("%d connections came as %s, want one from each port %d-%d", times, from, first, first+ports-1)
				}
			}
			if got := dropped(t, l.Nodes[0], drops.PortLimit); int(got) < flows-len(seen) {
				t.Errorf("%d packets counted as PORT_LIMIT, want %d at least", got, flows-len(seen))
			}
		})
	})
}

func TestHostSocketKeepsItsPort(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 1, Families: families, AgentFlags: []string{attach}})
		node, pod := l.Nodes[0].Namespace, addPod(t, l.Nodes[0], "a").Namespace
		overEachFamily(t, l, func(t *testing.T, family wire.Family) {
			at := serveOver(t, l.Outside, family)
			t.Run("the host's socket first", func(t *testing.T) { assertOwnPorts(t, at, inRange, node.AddrOf(family), node, pod) })
			t.Run("the pod's flow first", func(t *testing.T) { assertOwnPorts(t, at, inRange+1, node.AddrOf(family), pod, node) })
		})
	})
}

// assertOwnPorts has a host and its pod use the same port towards a server, one after the other: it sees two.
func assertOwnPorts(t *testing.T, at netip.AddrPort, port uint16, seenAs netip.Addr, both ...*lab.Namespace) {
	t.Helper()
	var streams [2]*lab.TCPConn
	var packets [2]*lab.UDPConn
	var seen [2]netip.AddrPort
	for i, from := range both {
		var err error
		if streams[i], err = from.DialTCP(t.Context(), at, port); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { streams[i].Close() })
		if packets[i], err = from.DialUDP(at, port); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { packets[i].Close() })
		seen[i], err = packets[i].Echo(t.Context(), 100)
		assertSeen(t, "UDP", seen[i], err, seenAs)
	}
	if streams[0].Seen == streams[1].Seen || seen[0] == seen[1] {
		t.Errorf("host and pod were both seen as %s by TCP, %s by UDP", streams[0].Seen, seen[0])
	}
	for i := range both {
		if err := streams[i].Echo(t.Context(), 100_000); err != nil {
			t.Error(err)
		}
		if _, err := packets[i].Echo(t.Context(), 100); err != nil {
			t.Error(err)
		}
	}
}

// The world sends to a pod, from the very address and port that the pod talks to through the masquerade.
func TestWorldOpensTheTupleThatIsMasqueraded(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 1, Families: families, AgentFlags: []string{attach}}, drops.FlowCollision)
		node, pod := l.Nodes[0], addPod(t, l.Nodes[0], "a")
		overEachFamily(t, l, func(t *testing.T, family wire.Family) {
			if err := l.Outside.AddRoute(node.PodCIDROf(family), node.AddrOf(family), ""); err != nil {
				t.Fatal(err)
			}
			at := netip.AddrPortFrom(lab.OutsideAddr[family], 7000)
			world, inside := listenUDP(t, l.Outside, at), dialUDP(t, pod.Namespace, inRange, at)
			send(t, inside, "from the pod")
			from := receive(t, world, "from the pod")
			if from.Addr() != node.AddrOf(family) {
				t.Fatalf("the world saw %s, want the node", from)
			}

			// Straight to the pod: its answer could not be told from the masqueraded flow.
			before := dropped(t, node, drops.FlowCollision)
			if _, err := world.WriteToUDPAddrPort([]byte("straight"), netip.AddrPortFrom(pod.AddrOf(family), inRange)); err != nil {
				t.Fatal(err)
			}
			eventually(t, answerLimit, "the collision is counted", func() bool { return dropped(t, node, drops.FlowCollision) == before+1 })

			// The masqueraded flow goes on, in both directions, under the same port.
			if _, err := world.WriteToUDPAddrPort([]byte("answer"), from); err != nil {
				t.Fatal(err)
			}
			receive(t, inside, "answer")
			send(t, inside, "more")
			if again := receive(t, world, "more"); again != from {
				t.Errorf("the flow came as %s, then as %s", from, again)
			}
		})
	})
}

func TestNewOwnerOfAnAddressInheritsNothing(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		forEachFamily(t, func(t *testing.T, family []wire.Family) {
			l := startCluster(t, lab.Options{Nodes: 1, Families: family, AgentFlags: []string{attach}}, drops.NoMapping)
			node := l.Nodes[0]
			pod := addPod(t, node, "old")
			world := listenUDP(t, l.Outside, netip.AddrPortFrom(l.Outside.Addr(), 7000))
			inside := dialUDP(t, pod.Namespace, inRange, netip.AddrPortFrom(l.Outside.Addr(), 7000))
			send(t, inside, "hello")
			from := receive(t, world, "hello")
			if _, err := world.WriteToUDPAddrPort([]byte("answer"), from); err != nil {
				t.Fatal(err)
			}
			receive(t, inside, "answer")
			inside.Close()

			address := pod.Addr()
			if err := node.DelPod(t.Context(), pod); err != nil {
				t.Fatal(err)
			}
			heir, err := node.AddPod(t.Context(), "new", lab.PodOptions{IP: address})
			if err != nil {
				t.Fatal(err)
			}
			if heir.Addr() != address {
				t.Fatalf("IP=%s gave the pod %s", address, heir.Addr())
			}
			capture, err := heir.Capture(heir.IfName)
			if err != nil {
				t.Fatal(err)
			}
			for range 10 {
				if _, err := world.WriteToUDPAddrPort([]byte("for the old one"), from); err != nil {
					break // the node says that nobody listens: right
				}
			}
			// The pod's own exchange comes after whatever the old flow could have brought.
			assertReaches(t, heir.Namespace, serve(t, l.Outside), node.Addr())
			for _, packet := range capture.Close() {
				if udp, ok := packet.TransportLayer().(*layers.UDP); ok && udp.SrcPort == 7000 {
					t.Errorf("the new owner of %s saw a packet of the old one's flow:\n%s", address, packet)
				}
			}
		})
	})
}

// With the agent dead nothing is collected: whoever fills the table must not end another pod's connection.
func TestFullTableSparesTheEstablished(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		forEachFamily(t, func(t *testing.T, family []wire.Family) {
			const entries, attempts = 2048, 20_000
			l := startCluster(t, lab.Options{Nodes: 1, Families: family, AgentFlags: []string{attach, fmt.Sprintf("--snat-entries=%d", entries)}},
				drops.SnatLimit, drops.SnatFull, drops.SnatExhausted)
			node := l.Nodes[0]
			victim, greedy := addPod(t, node, "victim"), addPod(t, node, "greedy")
			at := serve(t, l.Outside)
			idle, err := victim.DialTCP(t.Context(), at, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer idle.Close()
			if err := node.KillAgent(); err != nil {
				t.Fatal(err)
			}

			before := neverSent(t, greedy)
			// Each datagram to a port of its own opens a flow.
			socket := listenUDP(t, greedy.Namespace, netip.AddrPortFrom(greedy.Addr(), 0))
			for i := range attempts {
				if _, err := socket.WriteToUDPAddrPort([]byte("flood"), netip.AddrPortFrom(l.Outside.Addr(), uint16(10_000+i))); err != nil {
					t.Fatal(err)
				}
			}
			assertAllCounted(t, node, greedy, attempts-(neverSent(t, greedy)-before))
			if err := idle.Echo(t.Context(), 10_000); err != nil {
				t.Errorf("the idle connection of another pod: %v", err)
			}
			// There is room left for a pod that has few.
			if _, err := victim.TCP(t.Context(), at); err != nil {
				t.Errorf("a new connection of another pod: %v", err)
			}
		})
	})
}

// neverSent is how many packets of a pod never came to the node: a busy kernel has queues that are full.
func neverSent(t *testing.T, pod *lab.Pod) uint64 {
	t.Helper()
	device, err := pod.Netlink().LinkByName(pod.IfName)
	if err != nil {
		t.Fatal(err)
	}
	return device.Attrs().Statistics.TxDropped
}

// assertAllCounted: each packet of a pod that arrived has opened a flow or was refused, and every refusal is counted.
func assertAllCounted(t *testing.T, node *lab.Node, pod *lab.Pod, arrived uint64) {
	t.Helper()
	var opened uint64
	for _, row := range dump(t, node, "snat") {
		if row["src"] == pod.Addr().String() {
			opened++
		}
	}
	limit, full := dropped(t, node, drops.SnatLimit), dropped(t, node, drops.SnatFull)
	exhausted := dropped(t, node, drops.SnatExhausted)
	if opened == 0 || limit+full+exhausted != arrived-opened {
		t.Errorf("%d packets, %d flows opened, refused and counted %d (limit) + %d (full) + %d (exhausted): want %d",
			arrived, opened, limit, full, exhausted, arrived-opened)
	}
}

// udpSockets are those of one family only.
var udpSockets = [wire.Families]string{wire.IPv4: "udp4", wire.IPv6: "udp6"}

func listenUDP(t *testing.T, on *lab.Namespace, at netip.AddrPort) *net.UDPConn {
	t.Helper()
	return openUDP(t, on, func() (*net.UDPConn, error) {
		return net.ListenUDP(udpSockets[wire.FamilyOf(at.Addr())], net.UDPAddrFromAddrPort(at))
	})
}

func dialUDP(t *testing.T, on *lab.Namespace, port int, to netip.AddrPort) *net.UDPConn {
	t.Helper()
	return openUDP(t, on, func() (*net.UDPConn, error) {
		return net.DialUDP(udpSockets[wire.FamilyOf(to.Addr())], &net.UDPAddr{Port: port}, net.UDPAddrFromAddrPort(to))
	})
}

// openUDP opens a socket in a namespace; it is closed with the test.
func openUDP(t *testing.T, on *lab.Namespace, open func() (*net.UDPConn, error)) *net.UDPConn {
	t.Helper()
	var conn *net.UDPConn
	err := on.Do(func() (err error) {
		conn, err = open()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func send(t *testing.T, conn *net.UDPConn, text string) {
	t.Helper()
	if _, err := conn.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
}

// receive expects a datagram and says where it came from.
func receive(t *testing.T, conn *net.UDPConn, want string) netip.AddrPort {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(priv.Patience(answerLimit))); err != nil {
		t.Fatal(err)
	}
	packet := make([]byte, 2048)
	n, from, err := conn.ReadFromUDPAddrPort(packet)
	if err != nil {
		t.Fatalf("waiting for %q: %v", want, err)
	}
	if string(packet[:n]) != want {
		t.Fatalf("received %q, want %q", packet[:n], want)
	}
	return from
}

package e2e

import (
	"context"
	"errors"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// A node whose ephemeral ports are those to masquerade to keeps its share of them, from the start of the agent and when the range
// changes, and flows that have one of the others keep it.
func TestNodeKeepsEphemeralPorts(t *testing.T) {
	t.Parallel()
	l := lab.ForTest(t, lab.Options{Nodes: 1, Families: families, AgentFlags: []string{"--snat-ports=49152-65535"}})
	node := l.Nodes[0]
	become := func(ephemeral string) {
		t.Helper()
		if err := node.WriteSysctl("net/ipv4/ip_local_port_range", ephemeral); err != nil {
			t.Fatal(err)
		}
	}
	reserves := func(want string) {
		t.Helper()
		eventually(t, changeLimit, want+" are reserved", func() bool {
			have, err := node.ReadSysctl("net/ipv4/ip_local_reserved_ports")
			return err == nil && have == want
		})
	}
	become("49152 65535") // what is to be masqueraded to
	startAgents(t, l)
	const first, then = "58368-65535", "49152-57343" // the latter are not ephemeral, and need no reservation
	reserves(first)
	assertStatus(t, node, changeLimit, "(snat_ports)", first)
	pod := addPod(t, node, "a")
	ask := func(from *lab.Namespace, to netip.AddrPort, port uint16) (*lab.UDPConn, uint16) {
		t.Helper()
		conn, err := from.DialUDP(to, port)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn, echoFrom(t, conn)
	}
	flows, ports := map[netip.AddrPort]*lab.UDPConn{}, map[netip.AddrPort]uint16{}
	for _, f := range families {
		to := serveOver(t, l.Outside, f)
		ask(node.Namespace, to, 0)
		if flows[to], ports[to] = ask(pod.Namespace, to, 50000); ports[to] < 58368 {
			t.Errorf("a flow has the port %d", ports[to])
		}
	}
	become("57344 65535") // all of these are the node's
	reserves("")
	assertStatus(t, node, changeLimit, then)
	own := uint16(50000)
	for to, flow := range flows {
		eventually(t, 2*changeLimit, "new flows get other ports", func() bool {
			time.Sleep(50 * time.Millisecond)
			own++
			_, port := ask(pod.Namespace, to, own)
			return port <= 57343
		})
		if port := echoFrom(t, flow); port != ports[to] {
			t.Errorf("a flow that had the port %d has %d", ports[to], port)
		}
		ask(node.Namespace, to, 0)
	}
}

// A flow keeps any port that it has got: when new flows do not get that any more, and when the agent starts again. A service of the
// node that starts there later is reached by all others.
func TestFlowsKeepTheirPorts(t *testing.T) {
	t.Parallel()
	// The first ports will be the node's own.
	const low, high = 19000, 27191
	l := startCluster(t, lab.Options{Nodes: 1, Families: families, AgentFlags: []string{"--snat-ports=19000-27191,40000-42000"}})
	node := l.Nodes[0]
	pod := addPod(t, node, "a")
	streams := map[*lab.TCPConn]netip.AddrPort{}
	echo := func(when string) {
		t.Helper()
		for stream, from := range streams {
			if err := stream.Echo(t.Context(), 1000); err != nil {
				t.Errorf("%s: the connection from %s: %v", when, from, err)
			}
		}
	}
	for _, f := range families {
		for to := serveOver(t, l.Outside, f); ; {
			stream, err := pod.DialTCP(t.Context(), to, 0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { stream.Close() })
			if stream.Seen.Port() <= high {
				streams[stream] = stream.Seen
				break
			}
		}
	}
	if err := node.WriteSysctl("net/ipv4/ip_local_port_range", "19000 27191"); err != nil { // all of these are the node's
		t.Fatal(err)
	}
	to := serve(t, l.Outside)
	eventually(t, 2*changeLimit, "new flows get other ports", func() bool {
		for range 20 {
			stream, err := pod.DialTCP(within(t, changeLimit), to, 0)
			if err != nil {
				return false
			}
			stream.Close()
			if p := stream.Seen.Port(); low <= p && p <= high {
				return false
			}
		}
		return true
	})
	echo("after another range of ephemeral ports")
	for _, flow := range streams {
		if _, err := node.Serve(flow.Port()); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Outside.TCP(t.Context(), flow); err != nil {
			t.Error(err)
		}
	}
	echo("beside a service of the node")
	restartEach(t, l)
	echo("after another start of the agent")
}

// A server that trusts only ports below 1024, as those of NFS do, serves pods outside of the cluster.
func TestPrivilegedSourcePorts(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 1, Families: families})
	pod := addPod(t, l.Nodes[0], "a")
	for _, f := range families {
		to := serveOver(t, l.Outside, f)
		stream, err := pod.DialTCP(t.Context(), to, 700)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { stream.Close() })
		datagrams, err := pod.DialUDP(to, 700)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { datagrams.Close() })
		for proto, port := range map[string]uint16{"TCP": stream.Seen.Port(), "UDP": echoFrom(t, datagrams)} {
			if port < 665 || port > 852 {
				t.Errorf("over %v the server sees port %d of %s", f, port, proto)
			}
		}
	}
}

// Whichever limit refuses something, status names it, and the pod is told at once: one node has four ports to masquerade to, the smallest flow table, and
// ephemeral ports that are all its own.
func TestScarcePortsAndFlowsAreTold(t *testing.T) {
	t.Parallel()
	const scarce, ownPort = "49152 49500", 49200
	l := lab.ForTest(t, lab.Options{Nodes: 1, AgentFlags: []string{"--snat-ports=40000-40003", "--snat-entries=16"}}, drops.PortLimit, drops.SnatLimit, drops.SnatExhausted)
	node := l.Nodes[0]
	if err := node.WriteSysctl("net/ipv4/ip_local_port_range", scarce); err != nil {
		t.Fatal(err)
	}
	startAgents(t, l)
	addHosted(t, node, "hosted", ports(ownPort, both)...)
	pods := []*lab.Pod{addPod(t, node, "a"), addPod(t, node, "b"), addPod(t, node, "c")}
	at := serve(t, l.Outside)
	connected := 0
	for i := range 4 * len(pods) {
		conn, err := pods[i/4].DialTCP(within(t, 10*time.Second), at, 0)
		if err == nil {
			connected++
			t.Cleanup(func() { conn.Close() })
		} else if !errors.Is(err, syscall.EHOSTUNREACH) {
			t.Errorf("a connection without a port: %v, want to be told that the host is unreachable", err)
		}
	}
	if connected != 4 {
		t.Errorf("%d connections to one place have 4 ports", connected)
	}
	for i := range uint16(20) {
		conn, err := pods[2].DialUDP(netip.AddrPortFrom(at.Addr(), at.Port()+1+i), 0) // nobody answers there
		if err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Echo(within(t, time.Millisecond), 100)
		conn.Close()
	}
	assertStatus(t, node, 3*changeLimit, "(ephemeral_ports)", "(unreserved_ports)", "(port_limit)", "(snat_exhausted)", "(snat_limit)")
}

// echoFrom sends a datagram and returns the port that it came from.
func echoFrom(t *testing.T, conn *lab.UDPConn) uint16 {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), priv.Patience(time.Second))
	defer cancel()
	from, err := conn.Echo(ctx, 100)
	if err != nil {
		t.Error(err)
	}
	return from.Port()
}

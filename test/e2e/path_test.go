package e2e

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// What pods learn of the path: MTU, hops, closed ports, addresses that nobody has.

const (
	unreachable        = 3
	hostUnreachable    = 1
	fragmentationNeeds = 4
	timeExceeded       = 11
)

func TestSmallerMTUOutside(t *testing.T) {
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 1, OutsideMTU: 1300, AgentFlags: []string{attach}})
		pod := addPod(t, l.Nodes[0], "a")
		var complaint *lab.ICMPError
		_, err := pod.Ping(t.Context(), lab.OutsideAddr[wire.IPv4], lab.PingOptions{Size: 1400, DontFragment: true})
		if !errors.As(err, &complaint) || complaint.Type != unreachable || complaint.Code != fragmentationNeeds || complaint.MTU != 1300 {
			t.Errorf("ping of 1400 bytes: %v, want fragmentation needed, MTU 1300", err)
		} else if complaint.InnerSource != pod.Addr() || complaint.InnerDestination != lab.OutsideAddr[wire.IPv4] {
			t.Errorf("the error quotes a packet %s > %s, want the pod's own", complaint.InnerSource, complaint.InnerDestination)
		}
		at := serve(t, l.Outside)
		// Segments of 1500 bytes until the first error has been understood.
		moved, err := pod.Transfer(within(t, 20*time.Second), at, 10<<20)
		assertSeen(t, "a transfer through the smaller MTU", moved.Seen, err, l.Nodes[0].Addr())
		for _, size := range []int{1272, 1280, 9000} {
			// The first datagram too large may be lost to path MTU discovery; what is learnt from it must help the next.
			_, first := pod.UDP(within(t, 500*time.Millisecond), at, size)
			if seen, err := pod.UDP(t.Context(), at, size); err != nil {
				t.Errorf("UDP of %d bytes: %v; the try before: %v", size, err, first)
			} else if seen.Addr() != l.Nodes[0].Addr() {
				t.Errorf("UDP of %d bytes: seen as %s", size, seen)
			}
		}
	})
}

func TestHopsEndAndSaySo(t *testing.T) {
	forEachRouting(t, func(t *testing.T, opts lab.Options) {
		opts.Nodes, opts.Router = 2, true
		l := startCluster(t, opts)
		pod, far := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[1], "far")
		for _, tc := range []struct {
			name string
			to   netip.Addr
			ttl  int
			from netip.Addr
		}{
			{"own node, to the outside", lab.OutsideAddr[wire.IPv4], 1, l.Nodes[0].Addr()},
			{"router, to the outside", lab.OutsideAddr[wire.IPv4], 2, lab.GatewayAddr[wire.IPv4]},
			{"own node, to another", far.Addr(), 1, l.Nodes[0].Addr()},
			{"other node", far.Addr(), 2, l.Nodes[1].Addr()},
		} {
			var complaint *lab.ICMPError
			_, err := pod.Ping(t.Context(), tc.to, lab.PingOptions{TTL: tc.ttl})
			if !errors.As(err, &complaint) || complaint.Type != timeExceeded {
				t.Errorf("%s: TTL %d: %v, want time exceeded", tc.name, tc.ttl, err)
				continue
			}
			if complaint.From != tc.from || complaint.InnerSource != pod.Addr() || complaint.InnerDestination != tc.to {
				t.Errorf("%s: TTL %d: %v, want it from %s about %s > %s", tc.name, tc.ttl, complaint, tc.from, pod.Addr(), tc.to)
			}
		}
		// 64 in the outside host, less the router and the node.
		if reply, err := pod.Ping(t.Context(), lab.OutsideAddr[wire.IPv4], lab.PingOptions{}); err != nil || reply.TTL != 62 {
			t.Errorf("reply from outside: TTL %d, want 62; error %v", reply.TTL, err)
		}
		if reply, err := pod.Ping(t.Context(), far.Addr(), lab.PingOptions{}); err != nil || reply.TTL != 62 {
			t.Errorf("reply from another node's pod: TTL %d, want 62; error %v", reply.TTL, err)
		}
	})
}

func TestClosedPortsRefuse(t *testing.T) {
	forEachRouting(t, func(t *testing.T, opts lab.Options) {
		opts.Nodes = 2
		l := startCluster(t, opts)
		pod, near, far := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[0], "near"), addPod(t, l.Nodes[1], "far")
		for _, to := range []netip.Addr{near.Addr(), far.Addr(), l.Nodes[0].Addr(), l.Nodes[1].Addr(), lab.OutsideAddr[wire.IPv4]} {
			closed := netip.AddrPortFrom(to, 9)
			if _, err := pod.TCP(t.Context(), closed); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("TCP to a closed port of %s: %v, want connection refused", to, err)
			}
			if _, err := pod.UDP(t.Context(), closed, 64); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("UDP to a closed port of %s: %v, want connection refused", to, err)
			}
		}
	})
}

// A pod that has closed its socket says so to the world, through the translation.
func TestWorldLearnsOfClosedPodPort(t *testing.T) {
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 1, AgentFlags: []string{attach}})
		pod := addPod(t, l.Nodes[0], "a")
		world := netip.AddrPortFrom(lab.OutsideAddr[wire.IPv4], 7000)
		outside := listenUDP(t, l.Outside, world)
		inside := dialUDP(t, pod.Namespace, 0, world)
		send(t, inside, "hello")
		from := receive(t, outside, "hello")
		inside.Close()

		// Connected, so that the error finds the socket; from the port that the pod has talked to.
		outside.Close()
		answer := openUDP(t, l.Outside, func() (*net.UDPConn, error) {
			return net.DialUDP("udp4", net.UDPAddrFromAddrPort(world), net.UDPAddrFromAddrPort(from))
		})
		send(t, answer, "too late")
		if err := answer.SetDeadline(time.Now().Add(priv.Patience(answerLimit))); err != nil {
			t.Fatal(err)
		}
		if _, err := answer.Read(make([]byte, 100)); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("answer to a port that the pod has closed: %v, want connection refused", err)
		}
	})
}

func TestAddressWithoutPod(t *testing.T) {
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 2, AgentFlags: []string{attach}}, drops.NoEndpoint)
		pod := addPod(t, l.Nodes[0], "a")
		var complaint *lab.ICMPError
		nobody := l.Nodes[0].PodCIDR().Addr()
		for range 200 {
			nobody = nobody.Next()
		}
		_, err := pod.Ping(t.Context(), nobody, lab.PingOptions{})
		if !errors.As(err, &complaint) || complaint.Type != unreachable || complaint.Code != hostUnreachable {
			t.Errorf("ping to %s, which no pod has: %v, want host unreachable", nobody, err)
		}
		if got := dropped(t, l.Nodes[0], drops.NoEndpoint); got != 1 {
			t.Errorf("%d packets counted as NO_ENDPOINT, want 1", got)
		}
	})
}

// A node that the cluster knows and that does not answer: the sender is told, as soon as the host has given up asking.
func TestPodsOfANodeThatDoesNotAnswer(t *testing.T) {
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 1, AgentFlags: []string{attach}})
		node, pod := l.Nodes[0], addPod(t, l.Nodes[0], "a")
		silent := lab.NodeSpec{
			Name: "k8s-silent", InternalIPs: []netip.Addr{netip.MustParseAddr("172.18.0.99")}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.99.0/24")},
		}
		if err := l.WriteNodes(append(l.NodeSpecs(), silent)...); err != nil {
			t.Fatal(err)
		}
		eventually(t, changeLimit, "the node is known", func() bool {
			return slices.ContainsFunc(dump(t, node, "destinations"), func(row map[string]any) bool { return row["node"] == "172.18.0.99" })
		})
		to := silent.PodCIDRs[0].Addr().Next().Next()
		var complaint *lab.ICMPError
		_, err := pod.Ping(within(t, 10*time.Second), to, lab.PingOptions{})
		if !errors.As(err, &complaint) || complaint.Type != unreachable || complaint.Code != hostUnreachable {
			t.Fatalf("ping to %s: %v, want host unreachable", to, err)
		}
		if complaint.From != node.Addr() || complaint.InnerSource != pod.Addr() || complaint.InnerDestination != to {
			t.Errorf("%v, want it from %s about %s > %s", complaint, node.Addr(), pod.Addr(), to)
		}
	})
}

package e2e

import (
	"errors"
	"net"
	"net/netip"
	"runtime"
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

// assertComplaint wants an ICMP error about a packet of the given source and destination.
func assertComplaint(t *testing.T, what string, err error, want lab.ICMPError) {
	t.Helper()
	var complaint *lab.ICMPError
	if !errors.As(err, &complaint) || *complaint != want {
		t.Errorf("%s: %v, want %v", what, err, &want)
	}
}

func TestSmallerMTUOutside(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 1, OutsideMTU: 1300, Families: families, AgentFlags: []string{attach}})
		pod := addPod(t, l.Nodes[0], "a")
		overEachFamily(t, l, func(t *testing.T, family wire.Family) {
			outside, node := lab.OutsideAddr[family], l.Nodes[0].AddrOf(family)
			_, err := pod.Ping(t.Context(), outside, lab.PingOptions{Size: 1400, DontFragment: true})
			assertComplaint(t, "ping of 1400 bytes", err, lab.ICMPError{
				From: lab.GatewayAddr[family], ICMPKind: lab.TooBig[family], MTU: 1300, InnerSource: pod.AddrOf(family), InnerDestination: outside,
			})
			at := serveOver(t, l.Outside, family)
			// Segments of 1500 bytes until the first error has been understood.
			moved, err := pod.Transfer(within(t, 20*time.Second), at, 10<<20)
			assertSeen(t, "a transfer through the smaller MTU", moved.Seen, err, node)
			if seen := assertUDP(t, pod.Namespace, at, 1252, 1272, 1280, 9000); seen.Addr() != node {
				t.Errorf("UDP: seen as %s", seen)
			}
		})
	})
}

func TestHopsEndAndSaySo(t *testing.T) {
	t.Parallel()
	forEachCluster(t, always, func(t *testing.T, opts lab.Options) {
		opts.Nodes, opts.Router = 2, true
		l := startCluster(t, opts)
		answerEveryProbe(t, l)
		pod, far := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[1], "far")
		overEachFamily(t, l, func(t *testing.T, family wire.Family) {
			outside, near := lab.OutsideAddr[family], l.Nodes[0].AddrOf(family)
			for _, tc := range []struct {
				name string
				to   netip.Addr
				ttl  int
				from netip.Addr
			}{
				{"own node, to the outside", outside, 1, near},
				{"router, to the outside", outside, 2, lab.GatewayAddr[family]},
				{"own node, to another", far.AddrOf(family), 1, near},
				{"other node", far.AddrOf(family), 2, l.Nodes[1].AddrOf(family)},
			} {
				_, err := pod.Ping(t.Context(), tc.to, lab.PingOptions{TTL: tc.ttl})
				assertComplaint(t, tc.name, err, lab.ICMPError{
					From: tc.from, ICMPKind: lab.TimeExceeded[family], InnerSource: pod.AddrOf(family), InnerDestination: tc.to,
				})
			}
			// 64 in the outside host, less the router and the node.
			for _, to := range []netip.Addr{outside, far.AddrOf(family)} {
				if reply, err := pod.Ping(t.Context(), to, lab.PingOptions{}); err != nil || reply.TTL != 62 {
					t.Errorf("reply from %s: TTL %d, want 62; error %v", to, reply.TTL, err)
				}
			}
			narrow(t, l.Router, single(outside), netip.Addr{}, "eth1", narrowed)
			assertTraced(t, pod, serveOver(t, l.Outside, family), traced{
				[]netip.Addr{near, lab.GatewayAddr[family], outside}, narrowed, lab.GatewayAddr[family],
			})
			assertTraced(t, pod, serveOver(t, far.Namespace, family), traced{
				[]netip.Addr{near, l.Nodes[1].AddrOf(family), far.AddrOf(family)}, mtuOf(t, pod.Namespace, pod.IfName), netip.Addr{},
			})
		})
	})
}

func TestClosedPortsRefuse(t *testing.T) {
	t.Parallel()
	forEachCluster(t, always, func(t *testing.T, opts lab.Options) {
		opts.Nodes = 2
		l := startCluster(t, opts)
		pod, near, far := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[0], "near"), addPod(t, l.Nodes[1], "far")
		overEachFamily(t, l, func(t *testing.T, family wire.Family) {
			for _, to := range []*lab.Namespace{near.Namespace, far.Namespace, l.Nodes[0].Namespace, l.Nodes[1].Namespace, l.Outside} {
				closed := netip.AddrPortFrom(to.AddrOf(family), 9)
				if _, err := pod.TCP(t.Context(), closed); !errors.Is(err, unix.ECONNREFUSED) {
					t.Errorf("TCP to a closed port of %s: %v, want connection refused", to.Netns(), err)
				}
				if _, err := pod.UDP(t.Context(), closed, 64); !errors.Is(err, unix.ECONNREFUSED) {
					t.Errorf("UDP to a closed port of %s: %v, want connection refused", to.Netns(), err)
				}
			}
		})
	})
}

// A pod that has closed its socket says so to the world, through the translation.
func TestWorldLearnsOfClosedPodPort(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 1, Families: families, AgentFlags: []string{attach}})
		pod := addPod(t, l.Nodes[0], "a")
		overEachFamily(t, l, func(t *testing.T, family wire.Family) {
			world := netip.AddrPortFrom(lab.OutsideAddr[family], 7000)
			outside := listenUDP(t, l.Outside, world)
			inside := dialUDP(t, pod.Namespace, 0, world)
			send(t, inside, "hello")
			from := receive(t, outside, "hello")
			inside.Close()

			// Connected, so that the error finds the socket; from the port that the pod has talked to.
			outside.Close()
			answer := openUDP(t, l.Outside, func() (*net.UDPConn, error) {
				return net.DialUDP(udpSockets[family], net.UDPAddrFromAddrPort(world), net.UDPAddrFromAddrPort(from))
			})
			send(t, answer, "too late")
			if err := answer.SetDeadline(time.Now().Add(priv.Patience(answerLimit))); err != nil {
				t.Fatal(err)
			}
			if _, err := answer.Read(make([]byte, 100)); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("answer to a port that the pod has closed: %v, want connection refused", err)
			}
		})
	})
}

func TestAddressWithoutPod(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 2, Families: families, AgentFlags: []string{attach}}, drops.NoEndpoint)
		pod := addPod(t, l.Nodes[0], "a")
		overEachFamily(t, l, func(t *testing.T, family wire.Family) {
			before := dropped(t, l.Nodes[0], drops.NoEndpoint)
			nobody := l.Nodes[0].PodCIDROf(family).Addr()
			for range 200 {
				nobody = nobody.Next()
			}
			_, err := pod.Ping(t.Context(), nobody, lab.PingOptions{})
			assertComplaint(t, "ping to an address that no pod has", err, lab.ICMPError{
				From: l.Nodes[0].AddrOf(family), ICMPKind: lab.RouteUnreachable[family], InnerSource: pod.AddrOf(family), InnerDestination: nobody,
			})
			if got := dropped(t, l.Nodes[0], drops.NoEndpoint) - before; got != 1 {
				t.Errorf("%d packets counted as NO_ENDPOINT, want 1", got)
			}
		})
	})
}

// A node that the cluster knows and that does not answer: the sender of a second packet is told, as soon as the host has given up asking.
func TestPodsOfANodeThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	silent := lab.NodeSpec{
		Name: "k8s-silent", InternalIPs: []netip.Addr{netip.MustParseAddr("172.18.0.99"), netip.MustParseAddr("fd00:172:18::99")},
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.99.0/24"), netip.MustParsePrefix("fd00:10:244:99::/64")},
	}
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 1, Families: families, AgentFlags: []string{attach}})
		node, pod := l.Nodes[0], addPod(t, l.Nodes[0], "a")
		if err := l.WriteNodes(append(l.NodeSpecs(), silent)...); err != nil {
			t.Fatal(err)
		}
		overEachFamily(t, l, func(t *testing.T, family wire.Family) {
			eventually(t, changeLimit, "the node is known", func() bool {
				return slices.ContainsFunc(dump(t, node, "destinations"), func(row map[string]any) bool {
					return row["node"] == silent.InternalIPs[family].String()
				})
			})
			to := silent.PodCIDRs[family].Addr().Next().Next()
			eventually(t, changeLimit, "the host has the route", func() bool { // which the stack takes, and comes after that
				routes, err := node.Netlink().RouteGet(to.AsSlice())
				return err == nil && len(routes) > 0 && routes[0].Gw.Equal(silent.InternalIPs[family].AsSlice())
			})
			// The first packet on each processor is redirected, which asks for the node and tells the sender nothing.
			var err error
			for tries := 0; !errors.As(err, new(*lab.ICMPError)) && tries <= runtime.NumCPU(); tries++ {
				_, err = pod.Ping(within(t, 4*time.Second), to, lab.PingOptions{})
			}
			assertComplaint(t, "ping to a pod of a node that does not answer", err, lab.ICMPError{
				From: node.AddrOf(family), ICMPKind: lab.HostUnreachable[family], InnerSource: pod.AddrOf(family), InnerDestination: to,
			})
		})
	})
}

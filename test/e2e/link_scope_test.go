package e2e

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// What IPv6 has on the link alone: pods say nothing there that anybody hears, and the node's own goes on.

// A pod that says that it is a router, or another pod, or knows a better way, is heard by nobody.
func TestPodsAreNoRouters(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 1, Families: families, AgentFlags: []string{attach}}, drops.ICMPRedirect)
		node := l.Nodes[0]
		liar, other := addPod(t, node, "liar"), addPod(t, node, "other")
		at := serveOver(t, other.Namespace, wire.IPv6)
		assertReaches(t, liar.Namespace, at, liar.AddrOf(wire.IPv6))
		captures := map[string]*lab.Capture{}
		for link, ns := range map[string]*lab.Namespace{lab.Uplink: l.Outside, other.IfName: other.Namespace} {
			capture, err := ns.Capture(link)
			if err != nil {
				t.Fatal(err)
			}
			captures[ns.Netns()] = capture
		}
		before := ipv6Of(t, node.Namespace, other.Namespace)
		count := func() uint64 { return dropped(t, node, drops.LinkScope) + dropped(t, node, drops.ICMPRedirect) }
		for name, say := range map[string]func() error{
			"a router": func() error {
				return liar.Advertise(liar.IfName, lab.RouterAdvertisement{Lifetime: time.Hour, Prefix: netip.MustParsePrefix("2001:db8:bad::/64")})
			},
			"the other pod": func() error { return liar.SendFrame(liar.IfName, advertisement(t, liar, other.AddrOf(wire.IPv6))) },
			"the gateway": func() error {
				return liar.SendFrame(liar.IfName, advertisement(t, liar, gatewayQuestions[wire.IPv6].gateway))
			},
			"knows a better way": func() error { return liar.SendFrame(liar.IfName, redirect(t, liar, other)) },
		} {
			had := count()
			if err := say(); err != nil {
				t.Fatal(err)
			}
			eventually(t, answerLimit, "it is dropped that a pod says it is "+name, func() bool { return count() > had })
		}
		assertReaches(t, liar.Namespace, at, liar.AddrOf(wire.IPv6)) // whatever was on its way has arrived
		for where, capture := range captures {
			for _, packet := range capture.Close() {
				icmp, ok := packet.Layer(layers.LayerTypeICMPv6).(*layers.ICMPv6)
				if ok && slices.Contains(routersWords, icmp.TypeCode.Type()) && strings.Contains(packet.LinkLayer().LinkFlow().String(), liar.MAC.String()) {
					t.Errorf("%s hears the pod:\n%s", where, packet)
				}
			}
		}
		if diff := cmp.Diff(before, ipv6Of(t, node.Namespace, other.Namespace)); diff != "" {
			t.Errorf("somebody has believed the pod:\n%s", diff)
		}
	})
}

// routersWords are ICMPv6 messages that only routers send, and those by which a neighbour is believed.
var routersWords = []uint8{layers.ICMPv6TypeRouterAdvertisement, layers.ICMPv6TypeNeighborAdvertisement, layers.ICMPv6TypeRedirect}

// ipv6Of are the addresses, routes and permanent neighbours of hosts, as far as they are of IPv6.
func ipv6Of(t *testing.T, all ...*lab.Namespace) (lines []string) {
	t.Helper()
	for _, ns := range all {
		snapshot, err := ns.Snapshot()
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range snapshot.Only("address", "route", "neighbour") {
			if strings.Contains(line, ":") {
				lines = append(lines, ns.Netns()+" "+line)
			}
		}
	}
	return lines
}

// advertisement says to everybody on the pod's link that it has an address.
func advertisement(t *testing.T, pod *lab.Pod, claimed netip.Addr) []byte {
	t.Helper()
	ip := &layers.IPv6{
		Version: 6, HopLimit: 255, NextHeader: layers.IPProtocolICMPv6,
		SrcIP: pod.AddrOf(wire.IPv6).AsSlice(), DstIP: netip.IPv6LinkLocalAllNodes().AsSlice(),
	}
	const override = 0x20
	return onLink(t, pod.MAC, []byte{0x33, 0x33, 0, 0, 0, 1}, ip, layers.ICMPv6TypeNeighborAdvertisement, &layers.ICMPv6NeighborAdvertisement{
		Flags: override, TargetAddress: claimed.AsSlice(), Options: layers.ICMPv6Options{{Type: layers.ICMPv6OptTargetAddress, Data: pod.MAC}},
	})
}

// redirect tells another pod that the way to the world is by this one.
func redirect(t *testing.T, pod, to *lab.Pod) []byte {
	t.Helper()
	mac, err := net.ParseMAC(pod.Result.Interfaces[0].Mac) // of the host's side
	if err != nil {
		t.Fatal(err)
	}
	ip := &layers.IPv6{
		Version: 6, HopLimit: 255, NextHeader: layers.IPProtocolICMPv6,
		SrcIP: pod.AddrOf(wire.IPv6).AsSlice(), DstIP: to.AddrOf(wire.IPv6).AsSlice(),
	}
	return onLink(t, pod.MAC, mac, ip, layers.ICMPv6TypeRedirect, &layers.ICMPv6Redirect{
		TargetAddress: pod.AddrOf(wire.IPv6).AsSlice(), DestinationAddress: lab.OutsideAddr[wire.IPv6].AsSlice(),
	})
}

// A pod asks and tells of thousands of neighbours, and somebody on the link sends to as many addresses that no pod has: the node
// remembers none of them, and others go on. What the pod says in its own name the program answers, and nobody else hears.
func TestFloodOfNeighbours(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		const many = 2000
		l := startCluster(t, lab.Options{Nodes: 1, Families: only6, AgentFlags: []string{attach}}, drops.SpoofedSource, drops.NoEndpoint)
		node, flooder, other := l.Nodes[0], addPod(t, l.Nodes[0], "flooder"), addPod(t, l.Nodes[0], "other")
		if err := l.Outside.AddRoute(node.PodCIDR(), node.Addr(), ""); err != nil {
			t.Fatal(err)
		}
		at := serve(t, l.Outside)
		assertReaches(t, other.Namespace, at, node.Addr())
		assertReaches(t, flooder.Namespace, at, node.Addr())
		before := neighboursOf(t, node)
		flow := startSteadyFlows(t, other.Namespace, at, netip.AddrPortFrom(node.Addr(), serve(t, node.Namespace).Port()))
		nobody, gateway := node.PodCIDR().Addr(), gatewayQuestions[wire.IPv6].gateway
		for range 256 { // past those that pods have
			nobody = nobody.Next()
		}
		var frames [][]byte
		for range many {
			nobody = nobody.Next()
			frames = append(frames, solicitation(t, flooder.MAC, nobody, gateway), solicitation(t, flooder.MAC, flooder.Addr(), nobody),
				solicitation(t, flooder.MAC, flooder.Addr(), gateway), advertisement(t, flooder, nobody))
			if err := l.Outside.SendRaw(datagram(t, l.Outside.Addr(), nobody, "is anybody there?")); err != nil {
				t.Fatal(err)
			}
		}
		if err := flooder.SendFrame(flooder.IfName, frames...); err != nil {
			t.Fatal(err)
		}
		eventually(t, answerLimit, "each of them is counted", func() bool {
			return dropped(t, node, drops.LinkScope) >= 2*many && dropped(t, node, drops.NoEndpoint) == many
		})
		eventually(t, answerLimit, "others have talked", func() bool { return flow.exchanged.Load() >= 100 })
		flow.end(t)
		// Those that talk have found each other meanwhile.
		if after := neighboursOf(t, node); after > before+10 {
			t.Errorf("the node had %d neighbours, and has %d", before, after)
		}
	})
}

// neighboursOf is how many neighbours of IPv6 a node has in its tables, in whatever state.
func neighboursOf(t *testing.T, node *lab.Node) int {
	t.Helper()
	all, err := lab.RetryInterrupted(func() ([]netlink.Neigh, error) { return node.Netlink().NeighList(0, netlink.FAMILY_V6) })
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// followed is how long a router says that it is one, again and again.
const followed = 2 * time.Second

// A node that follows a router's advertisements goes on to follow them when it begins to forward: its default route outlives each of
// them, and cleanup gives the setting back. One that is configured by hand keeps its setting.
func TestFollowedRouterStays(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := lab.ForTest(t, lab.Options{Nodes: 2, Router: true, Families: only6, AgentFlags: []string{attach}})
		follows, configured := l.Nodes[0], l.Nodes[1]
		for _, node := range l.Nodes {
			assertSysctl(t, node, acceptRA, "1")
		}
		if err := configured.WriteSysctl(acceptRA, "0"); err != nil {
			t.Fatal(err)
		}
		uplink, err := follows.Netlink().LinkByName(lab.Uplink)
		if err != nil {
			t.Fatal(err)
		}
		via := lab.GatewayAddr[wire.IPv6]
		if err := follows.Netlink().RouteDel(&netlink.Route{LinkIndex: uplink.Attrs().Index, Gw: via.AsSlice()}); err != nil {
			t.Fatal(err)
		}
		advertiseAlways(t, l.Router)
		hasRoute := func() bool {
			return slices.ContainsFunc(ipv6Of(t, follows.Namespace), func(line string) bool { return strings.Contains(line, "route table 254 ::/0 type 1 via fe80:") })
		}
		eventually(t, answerLimit, "the node follows the router", hasRoute)

		startAgents(t, l)
		pod := addPod(t, follows, "a")
		at := serve(t, l.Outside)
		for end := time.Now().Add(followed * 3 / 2); time.Now().Before(end); time.Sleep(followed / 3) {
			assertReaches(t, pod.Namespace, at, follows.Addr())
			if !hasRoute() {
				t.Fatal("the default route has ended with the advertisement")
			}
		}
		assertSysctl(t, follows, acceptRA, "2")
		assertSysctl(t, configured, acceptRA, "0")
		for _, node := range l.Nodes {
			if _, err := node.StopAgent(); err != nil {
				t.Fatal(err)
			}
			if err := cleanup(t, node); err != nil {
				t.Fatal(err)
			}
		}
		assertSysctl(t, follows, acceptRA, "1")
		assertSysctl(t, configured, acceptRA, "0")
	})
}

const acceptRA = "net/ipv6/conf/" + lab.Uplink + "/accept_ra"

func assertSysctl(t *testing.T, node *lab.Node, name, want string) {
	t.Helper()
	if have, err := node.ReadSysctl(name); have != want || err != nil {
		t.Errorf("%s has %s = %q (%v), want %s", node.Name, name, have, err, want)
	}
}

// advertiseAlways has a router advertise itself until the test ends.
func advertiseAlways(t *testing.T, router *lab.Namespace) {
	t.Helper()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for tick := time.NewTicker(followed / 6); ; {
			if err := router.Advertise(lab.Uplink, lab.RouterAdvertisement{Lifetime: followed}); err != nil {
				t.Error(err)
				return
			}
			select {
			case <-tick.C:
			case <-t.Context().Done():
				tick.Stop()
				return
			}
		}
	}()
	t.Cleanup(func() { <-ended })
}

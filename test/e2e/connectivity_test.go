package e2e

import (
	"flag"
	"net/netip"
	"slices"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// cluster is a kind of cluster that packets find their way through.
type cluster struct {
	name  string
	pods  []wire.Family // in the order of podCIDRs
	hosts []wire.Family // in the order of InternalIPs: the first is the tunnel's outside
	mode  string        // --routing-mode
	links int
	when  form
}

// form is how thorough a run is that has a cluster.
type form int

const (
	emulatedToo form = iota // on emulated processors too
	always
	reachOnly // in the short form, by TestEverybodyReachesEverybody alone
	longOnly  // in the long form
)

var fewClusters = flag.Bool("few-clusters", false, "run tests with fewer kinds of clusters, of fewer nodes, which have both families and a tunnel all the same")

// clusters are all kinds, each on the links where its routing mode makes a difference.
var clusters = []cluster{
	{"direct", only4, only4, "direct", 1, reachOnly},
	{"vxlan", only4, only4, "vxlan", 1, emulatedToo},
	{"auto", only4, only4, "auto", 2, always},

	{"both, direct", ipv6First, families, "direct", 1, emulatedToo},
	{"both, vxlan over IPv4", families, families, "vxlan", 1, reachOnly},
	{"both, vxlan over IPv6", families, ipv6First, "vxlan", 1, always},
	{"both, auto", families, families, "auto", 2, longOnly},

	{"IPv6, direct", only6, only6, "direct", 1, longOnly},
	{"IPv6, vxlan over IPv4", only6, families, "vxlan", 1, longOnly},
	{"IPv6, vxlan over IPv6", only6, only6, "vxlan", 1, longOnly},
	{"IPv6, auto", only6, only6, "auto", 2, reachOnly},

	{"vxlan over IPv6", only4, ipv6First, "vxlan", 1, longOnly},
}

// Families that a Node may have, besides both in their own order.
var (
	only4     = []wire.Family{wire.IPv4}
	only6     = []wire.Family{wire.IPv6}
	ipv6First = []wire.Family{wire.IPv6, wire.IPv4}
)

func (c cluster) options(flags ...string) lab.Options {
	nodes := 3
	if *fewClusters {
		nodes = 2
	}
	return lab.Options{Nodes: nodes, Families: c.pods, Underlay: c.hosts, Links: c.links, AgentFlags: append(flags, "--routing-mode="+c.mode)}
}

// forEachCluster runs a test with every kind of cluster that a run of the given form has.
func forEachCluster(t *testing.T, most form, test func(t *testing.T, opts lab.Options)) {
	forClusters(t, most, func(cluster) bool { return true }, test)
}

// forEachTunnel is for tests of IPv4: with every kind of cluster that has a tunnel.
func forEachTunnel(t *testing.T, test func(t *testing.T, opts lab.Options)) {
	forClusters(t, always, func(c cluster) bool {
		return c.mode != "direct" && slices.Equal(c.pods, only4) && slices.Equal(c.hosts, only4)
	}, test)
}

func forClusters(t *testing.T, most form, chosen func(cluster) bool, test func(t *testing.T, opts lab.Options)) {
	if priv.Long() {
		most = longOnly
	}
	if *fewClusters {
		most = emulatedToo
	}
	for _, c := range clusters {
		if c.when > most || !chosen(c) {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			forNewestAttach(t, func(t *testing.T, attach string) { test(t, c.options(attach)) })
		})
	}
}

// party is somebody who reaches others, on a node whose address the outside host must see.
type party struct {
	*lab.Namespace
	node *lab.Node
}

func TestEverybodyReachesEverybody(t *testing.T) {
	t.Parallel()
	forEachCluster(t, reachOnly, func(t *testing.T, opts lab.Options) {
		l := startCluster(t, opts)
		var all []party
		for _, node := range l.Nodes {
			all = append(all, party{node.Namespace, node})
			for _, name := range []string{"a", "b"} {
				all = append(all, party{addPod(t, node, name).Namespace, node})
			}
		}
		overEachFamily(t, l, func(t *testing.T, family wire.Family) {
			for _, to := range all {
				at := serveOver(t, to.Namespace, family)
				for _, from := range all {
					if from.Namespace != to.Namespace {
						assertReaches(t, from.Namespace, at, from.AddrOf(family))
					}
				}
			}

			capture, err := l.Outside.Capture(lab.Uplink)
			if err != nil {
				t.Fatal(err)
			}
			at := serveOver(t, l.Outside, family)
			for _, from := range all {
				assertReaches(t, from.Namespace, at, from.node.AddrOf(family))
			}
			assertNoPodAddress(t, l, capture.Close())
		})
	})
}

// assertNoPodAddress: what leaves for the world never carries a pod's address.
func assertNoPodAddress(t *testing.T, l *lab.Lab, packets []gopacket.Packet) {
	t.Helper()
	if len(packets) == 0 {
		t.Error("nothing was captured outside")
	}
	for _, packet := range packets {
		if ip, ok := ipHeaderOf(packet.NetworkLayer()); ok && isPodAddress(l, ip.source) {
			t.Errorf("a packet with a pod's address arrived outside:\n%s", packet)
			return
		}
	}
}

// isPodAddress says whether an address is of a node's podCIDRs.
func isPodAddress(l *lab.Lab, addr netip.Addr) bool {
	for _, node := range l.Nodes {
		if slices.ContainsFunc(node.PodCIDRs, func(pods netip.Prefix) bool { return pods.Contains(addr) }) {
			return true
		}
	}
	return false
}

func TestWorldOpensFlowsToPods(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 2, Families: families, AgentFlags: []string{attach}})
		node, pod := l.Nodes[0], addPod(t, l.Nodes[0], "a")
		overEachFamily(t, l, func(t *testing.T, family wire.Family) {
			if err := l.Outside.AddRoute(node.PodCIDROf(family), node.AddrOf(family), ""); err != nil {
				t.Fatal(err)
			}
			at := serveOver(t, pod.Namespace, family)
			// The outside host answers from its address on the fabric, or a route to the pods would need a source.
			seen, err := l.Outside.TCP(t.Context(), at)
			assertSeen(t, "TCP from outside", seen, err, lab.GatewayAddr[family])
			seen, err = l.Outside.UDP(t.Context(), at, 9000)
			assertSeen(t, "UDP from outside", seen, err, lab.GatewayAddr[family])
			if _, err := l.Outside.Ping(t.Context(), at.Addr(), lab.PingOptions{}); err != nil {
				t.Error(err)
			}
			// The pod's own flows to the same host are masqueraded all the same.
			seen, err = pod.TCP(t.Context(), serveOver(t, l.Outside, family))
			assertSeen(t, "TCP to the outside", seen, err, node.AddrOf(family))
		})
	})
}

// strangers are addresses that nobody in a cluster has.
var strangers = [wire.Families]netip.Addr{wire.IPv4: netip.MustParseAddr("192.0.2.77"), wire.IPv6: netip.MustParseAddr("2001:db8::77")}

// loopback are addresses that every host has for itself alone.
var loopback = [wire.Families]netip.Addr{wire.IPv4: netip.MustParseAddr("127.0.0.1"), wire.IPv6: netip.IPv6Loopback()}

func TestSpoofedSourceIsDropped(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 2, Families: families, AgentFlags: []string{attach}}, drops.SpoofedSource)
		liar, near, far := addPod(t, l.Nodes[0], "liar"), addPod(t, l.Nodes[0], "near"), addPod(t, l.Nodes[1], "far")
		captures := map[*lab.Namespace]*lab.Capture{}
		for _, ns := range []*lab.Namespace{near.Namespace, far.Namespace, l.Outside} {
			capture, err := ns.Capture("eth0")
			if err != nil {
				t.Fatal(err)
			}
			captures[ns] = capture
		}
		sent := uint64(0)
		overEachFamily(t, l, func(t *testing.T, family wire.Family) {
			sources := []netip.Addr{near.AddrOf(family), far.AddrOf(family), l.Nodes[0].AddrOf(family), strangers[family], loopback[family]}
			for _, source := range sources {
				for _, to := range []netip.Addr{near.AddrOf(family), far.AddrOf(family), l.Outside.AddrOf(family), l.Nodes[0].AddrOf(family)} {
					if source == to {
						continue
					}
					if err := liar.SendRaw(datagram(t, source, to, "lie")); err != nil {
						t.Fatal(err)
					}
					sent++
				}
			}
			eventually(t, answerLimit, "every spoofed packet is counted", func() bool {
				return dropped(t, l.Nodes[0], drops.SpoofedSource) == sent
			})
		})
		for ns, capture := range captures {
			for _, packet := range capture.Close() {
				if app := packet.ApplicationLayer(); app != nil && string(app.Payload()) == "lie" {
					t.Errorf("a spoofed packet reached %s:\n%s", ns.Netns(), packet)
				}
			}
		}
		overEachFamily(t, l, func(t *testing.T, family wire.Family) {
			assertReaches(t, liar.Namespace, serveOver(t, near.Namespace, family), liar.AddrOf(family))
		})
	})
}

// The programs answer for the gateway, in each family by its own means.
func TestGatewayIsAnswered(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 1, Families: families, AgentFlags: []string{attach}})
		pod := addPod(t, l.Nodes[0], "a")
		link, err := pod.Netlink().LinkByName(pod.IfName)
		if err != nil {
			t.Fatal(err)
		}
		overEachFamily(t, l, func(t *testing.T, family wire.Family) {
			capture, err := pod.Capture(pod.IfName)
			if err != nil {
				t.Fatal(err)
			}
			ask := gatewayQuestions[family]
			if err := pod.SendFrame(pod.IfName, ask.frame(t, link.Attrs().HardwareAddr, pod.AddrOf(family), ask.gateway)); err != nil {
				t.Fatal(err)
			}
			eventually(t, answerLimit, "an answer for the gateway", func() bool {
				return slices.ContainsFunc(capture.Packets(), func(p gopacket.Packet) bool { return ask.answered(p) == ask.gateway })
			})
			capture.Close()
		})
	})
}

// gatewayQuestions are how a pod asks for its gateway, and whom an answer is about.
var gatewayQuestions = [wire.Families]struct {
	gateway  netip.Addr
	frame    func(t *testing.T, mac []byte, from, to netip.Addr) []byte
	answered func(gopacket.Packet) netip.Addr
}{
	wire.IPv4: {netip.MustParseAddr("169.254.1.1"), arpRequest, arpAnswer},
	wire.IPv6: {netip.MustParseAddr("fe80::1"), solicitation, advertised},
}

func arpAnswer(packet gopacket.Packet) netip.Addr {
	arp, ok := packet.Layer(layers.LayerTypeARP).(*layers.ARP)
	if !ok || arp.Operation != layers.ARPReply {
		return netip.Addr{}
	}
	return netip.AddrFrom4([4]byte(arp.SourceProtAddress))
}

func advertised(packet gopacket.Packet) netip.Addr {
	na, ok := packet.Layer(layers.LayerTypeICMPv6NeighborAdvertisement).(*layers.ICMPv6NeighborAdvertisement)
	if !ok {
		return netip.Addr{}
	}
	return netip.AddrFrom16([16]byte(na.TargetAddress))
}

// solicitation asks for the Ethernet address of a neighbour.
func solicitation(t *testing.T, mac []byte, from, to netip.Addr) []byte {
	t.Helper()
	group := to.As16() // the solicited-node multicast address, and its Ethernet address
	copy(group[:], []byte{0xff, 0x02, 11: 1, 12: 0xff})
	ip := &layers.IPv6{Version: 6, HopLimit: 255, NextHeader: layers.IPProtocolICMPv6, SrcIP: from.AsSlice(), DstIP: group[:]}
	return onLink(t, mac, append([]byte{0x33, 0x33}, group[12:]...), ip, layers.ICMPv6TypeNeighborSolicitation, &layers.ICMPv6NeighborSolicitation{
		TargetAddress: to.AsSlice(), Options: layers.ICMPv6Options{{Type: layers.ICMPv6OptSourceAddress, Data: mac}},
	})
}

func arpRequest(t *testing.T, mac []byte, from, to netip.Addr) []byte {
	t.Helper()
	broadcast := []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	buffer := gopacket.NewSerializeBuffer()
	err := gopacket.SerializeLayers(buffer, gopacket.SerializeOptions{FixLengths: true},
		&layers.Ethernet{SrcMAC: mac, DstMAC: broadcast, EthernetType: layers.EthernetTypeARP},
		&layers.ARP{
			AddrType: layers.LinkTypeEthernet, Protocol: layers.EthernetTypeIPv4, HwAddressSize: 6, ProtAddressSize: 4, Operation: layers.ARPRequest,
			SourceHwAddress: mac, SourceProtAddress: from.AsSlice(), DstHwAddress: make([]byte, 6), DstProtAddress: to.AsSlice(),
		})
	if err != nil {
		t.Fatal(err)
	}
	return buffer.Bytes()
}

package e2e

import (
	"flag"
	"net/netip"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// party is somebody who reaches others, with the address that the outside host must see of it.
type party struct {
	*lab.Namespace
	outside netip.Addr
}

// routings are the routing modes, each on the links where it makes a difference.
var routings = []struct {
	mode  string
	links int
}{{"direct", 1}, {"vxlan", 1}, {"auto", 2}}

func forEachRouting(t *testing.T, test func(t *testing.T, opts lab.Options)) { forRoutings(t, 0, test) }

// forEachTunnel is without the one that has no tunnel.
func forEachTunnel(t *testing.T, test func(t *testing.T, opts lab.Options)) { forRoutings(t, 1, test) }

func forRoutings(t *testing.T, first int, test func(t *testing.T, opts lab.Options)) {
	for _, r := range routings[first:] {
		t.Run(r.mode, func(t *testing.T) {
			forNewestAttach(t, func(t *testing.T, attach string) {
				test(t, lab.Options{Nodes: 3, Links: r.links, AgentFlags: []string{attach, "--routing-mode=" + r.mode}})
			})
		})
	}
}

func TestEverybodyReachesEverybody(t *testing.T) {
	forEachRouting(t, func(t *testing.T, opts lab.Options) {
		l := startCluster(t, opts)
		var all []party
		for _, node := range l.Nodes {
			all = append(all, party{node.Namespace, node.Addr()})
			for _, name := range []string{"a", "b"} {
				all = append(all, party{addPod(t, node, name).Namespace, node.Addr()})
			}
		}
		for _, to := range all {
			at := serve(t, to.Namespace)
			for _, from := range all {
				if from.Namespace != to.Namespace {
					assertReaches(t, from.Namespace, at, from.Addr())
				}
			}
		}

		capture, err := l.Outside.Capture(lab.Uplink)
		if err != nil {
			t.Fatal(err)
		}
		at := serve(t, l.Outside)
		for _, from := range all {
			assertReaches(t, from.Namespace, at, from.outside)
		}
		assertNoPodAddress(t, l, capture.Close())
	})
}

// assertNoPodAddress: what leaves for the world never carries a pod's address.
func assertNoPodAddress(t *testing.T, l *lab.Lab, packets []gopacket.Packet) {
	t.Helper()
	if len(packets) == 0 {
		t.Error("nothing was captured outside")
	}
	for _, packet := range packets {
		ip, ok := packet.NetworkLayer().(*layers.IPv4)
		if !ok {
			continue
		}
		source, _ := netip.AddrFromSlice(ip.SrcIP)
		for _, node := range l.Nodes {
			if node.PodCIDR().Contains(source.Unmap()) {
				t.Errorf("a packet with a pod's address arrived outside:\n%s", packet)
				return
			}
		}
	}
}

var payload = flag.Int64("payload", 8<<20+7, "bytes of each transfer with offloads on and off")

func TestPayloadsSurviveOffloads(t *testing.T) {
	forEachRouting(t, func(t *testing.T, opts lab.Options) {
		opts.Nodes = 2
		l := startCluster(t, opts)
		a, near, far := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[0], "near"), addPod(t, l.Nodes[1], "far")
		targets := map[string]netip.AddrPort{
			"same node":    serve(t, near.Namespace),
			"across nodes": serve(t, far.Namespace),
			"outside":      serve(t, l.Outside),
			"own host":     serve(t, l.Nodes[0].Namespace),
		}
		for _, offloads := range []struct {
			name         string
			pods, uplink bool
		}{{"on", true, true}, {"off", false, false}, {"off in pods", false, true}, {"off on the uplinks", true, false}} {
			for _, pod := range []*lab.Pod{a, near, far} {
				if err := pod.SetOffloads(pod.IfName, offloads.pods); err != nil {
					t.Fatal(err)
				}
			}
			for _, host := range []*lab.Namespace{l.Nodes[0].Namespace, l.Nodes[1].Namespace, l.Outside} {
				if err := host.SetOffloads(lab.Uplink, offloads.uplink); err != nil {
					t.Fatal(err)
				}
			}
			for name, at := range targets {
				if _, err := a.Transfer(within(t, 20*time.Second), at, *payload); err != nil {
					t.Errorf("offloads %s, %s: %v", offloads.name, name, err)
				}
				if _, err := a.UDP(t.Context(), at, 9000); err != nil {
					t.Errorf("offloads %s, %s: %v", offloads.name, name, err)
				}
			}
		}
	})
}

func TestWorldOpensFlowsToPods(t *testing.T) {
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 2, AgentFlags: []string{attach}})
		pod := addPod(t, l.Nodes[0], "a")
		if err := l.Outside.AddRoute(l.Nodes[0].PodCIDR(), l.Nodes[0].Addr(), ""); err != nil {
			t.Fatal(err)
		}
		at := serve(t, pod.Namespace)
		// The outside host answers from its address on the fabric, or a route to the pods would need a source.
		seen, err := l.Outside.TCP(t.Context(), at)
		assertSeen(t, "TCP from outside", seen, err, lab.GatewayAddr[wire.IPv4])
		seen, err = l.Outside.UDP(t.Context(), at, 9000)
		assertSeen(t, "UDP from outside", seen, err, lab.GatewayAddr[wire.IPv4])
		if _, err := l.Outside.Ping(t.Context(), pod.Addr(), lab.PingOptions{}); err != nil {
			t.Error(err)
		}
		// The pod's own flows to the same host are masqueraded all the same.
		seen, err = pod.TCP(t.Context(), serve(t, l.Outside))
		assertSeen(t, "TCP to the outside", seen, err, l.Nodes[0].Addr())
	})
}

func TestSpoofedSourceIsDropped(t *testing.T) {
	forEachAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 2, AgentFlags: []string{attach}}, drops.SpoofedSource)
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
		for _, source := range []netip.Addr{near.Addr(), far.Addr(), l.Nodes[0].Addr(), netip.MustParseAddr("192.0.2.77"), netip.MustParseAddr("127.0.0.1")} {
			for _, to := range []netip.Addr{near.Addr(), far.Addr(), l.Outside.Addr(), l.Nodes[0].Addr()} {
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
		for ns, capture := range captures {
			for _, packet := range capture.Close() {
				if app := packet.ApplicationLayer(); app != nil && string(app.Payload()) == "lie" {
					t.Errorf("a spoofed packet reached %s:\n%s", ns.Netns(), packet)
				}
			}
		}
		assertReaches(t, liar.Namespace, serve(t, near.Namespace), liar.Addr())
	})
}

// datagram is a UDP packet from and to port 9.
func datagram(t *testing.T, from, to netip.Addr, payload string) []byte {
	t.Helper()
	ip := &layers.IPv4{Version: 4, TTL: 64, Protocol: layers.IPProtocolUDP, SrcIP: from.AsSlice(), DstIP: to.AsSlice()}
	udp := &layers.UDP{SrcPort: 9, DstPort: 9}
	if err := udp.SetNetworkLayerForChecksum(ip); err != nil {
		t.Fatal(err)
	}
	buffer := gopacket.NewSerializeBuffer()
	opts := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
	if err := gopacket.SerializeLayers(buffer, opts, ip, udp, gopacket.Payload(payload)); err != nil {
		t.Fatal(err)
	}
	return buffer.Bytes()
}

func TestGatewayIsAnswered(t *testing.T) {
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 1, AgentFlags: []string{attach}})
		pod := addPod(t, l.Nodes[0], "a")
		link, err := pod.Netlink().LinkByName(pod.IfName)
		if err != nil {
			t.Fatal(err)
		}
		capture, err := pod.Capture(pod.IfName)
		if err != nil {
			t.Fatal(err)
		}
		gateway := netip.MustParseAddr("169.254.1.1")
		if err := pod.SendFrame(pod.IfName, arpRequest(t, link.Attrs().HardwareAddr, pod.Addr(), gateway)); err != nil {
			t.Fatal(err)
		}
		eventually(t, answerLimit, "an ARP reply for the gateway", func() bool {
			for _, packet := range capture.Packets() {
				arp, ok := packet.Layer(layers.LayerTypeARP).(*layers.ARP)
				if ok && arp.Operation == layers.ARPReply && netip.AddrFrom4([4]byte(arp.SourceProtAddress)) == gateway {
					return true
				}
			}
			return false
		})
		capture.Close()
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

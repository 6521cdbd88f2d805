package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// hopsOffset is where a header has the packet's hops.
var hopsOffset = [wire.Families]int{wire.IPv4: 8, wire.IPv6: 7}

// lie is what must never arrive.
const lie = "a lie"

// headers is the length of those of IP and UDP, which a socket writes.
var headers = [wire.Families]int{wire.IPv4: 28, wire.IPv6: 48}

// everybody and group are destinations that no packet in a tunnel has.
var (
	everybody = [wire.Families]netip.Addr{wire.IPv4: netip.MustParseAddr("255.255.255.255"), wire.IPv6: netip.MustParseAddr("ff02::1")}
	group     = [wire.Families]netip.Addr{wire.IPv4: netip.MustParseAddr("224.0.0.1"), wire.IPv6: netip.MustParseAddr("ff0e::1")}
)

// etherTypes are what a frame says of what it carries.
var etherTypes = [wire.Families]layers.EthernetType{wire.IPv4: layers.EthernetTypeIPv4, wire.IPv6: layers.EthernetTypeIPv6}

// forged is a packet such as a node sends to another through the tunnel.
func forged(t *testing.T, from, to netip.Addr, vni uint32, inside ...gopacket.SerializableLayer) []byte {
	t.Helper()
	ip, udp := ipLayer(from, to, layers.IPProtocolUDP), &layers.UDP{SrcPort: 50000, DstPort: tunnelPort}
	if err := udp.SetNetworkLayerForChecksum(ip); err != nil {
		t.Fatal(err)
	}
	return serialised(t, append([]gopacket.SerializableLayer{ip, udp, &layers.VXLAN{ValidIDFlag: true, VNI: vni}}, inside...)...)
}

// ethernet is the header of a frame inside such a packet.
func ethernet(family wire.Family) gopacket.SerializableLayer {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	return &layers.Ethernet{SrcMAC: mac, DstMAC: mac, EthernetType: etherTypes[family]}
}

// inner is a datagram as it is inside such a packet.
func inner(t *testing.T, from, to netip.Addr) []gopacket.SerializableLayer {
	t.Helper()
	return []gopacket.SerializableLayer{ethernet(wire.FamilyOf(from)), gopacket.Payload(datagram(t, from, to, lie))}
}

// hostile is a cluster of three nodes in which somebody forges packets for the first one.
type hostile struct {
	*lab.Lab
	node, peer, third *lab.Node
	victim, other     *lab.Pod
	captures          map[*lab.Namespace]*lab.Capture
}

func startHostile(t *testing.T, expected ...drops.Reason) *hostile {
	t.Helper()
	l := startCluster(t, lab.Options{Nodes: 3, AgentFlags: []string{"--routing-mode=vxlan"}}, expected...)
	h := &hostile{Lab: l, node: l.Nodes[0], peer: l.Nodes[1], third: l.Nodes[2], captures: map[*lab.Namespace]*lab.Capture{}}
	h.victim, h.other = addPod(t, h.node, "victim"), addPod(t, h.peer, "other")
	// Neighbours and paths are known then.
	assertReaches(t, h.other.Namespace, serve(t, h.victim.Namespace), h.other.Addr())
	for _, ns := range []*lab.Namespace{h.victim.Namespace, h.other.Namespace, h.Outside} {
		capture, err := ns.Capture("eth0")
		if err != nil {
			t.Fatal(err)
		}
		h.captures[ns] = capture
	}
	return h
}

// assertNoLie: nothing that was forged has arrived anywhere.
func (h *hostile) assertNoLie(t *testing.T) {
	t.Helper()
	for ns, capture := range h.captures {
		link, err := ns.Netlink().LinkByName("eth0")
		if err != nil {
			t.Fatal(err)
		}
		own := link.Attrs().HardwareAddr.String()
		for _, packet := range capture.Close() {
			app := packet.ApplicationLayer()
			if app != nil && string(app.Payload()) == lie && packet.LinkLayer().LinkFlow().Src().String() != own {
				t.Errorf("%s gets a forged packet:\n%s", ns.Netns(), packet)
			}
		}
	}
}

// claim gives a node a second InternalIP, and has another one's kubelet say that it has both.
func (h *hostile) claim(t *testing.T, second netip.Addr) {
	t.Helper()
	specs := h.NodeSpecs()
	specs[1].InternalIPs = append(specs[1].InternalIPs, second)
	specs[2].InternalIPs = append(specs[2].InternalIPs, h.peer.Addr(), second)
	if err := h.WriteNodes(specs...); err != nil {
		t.Fatal(err)
	}
	for _, a := range []netip.Addr{h.peer.Addr(), second} {
		says := fmt.Sprintf("InternalIP %s is node %s's", a, h.peer.Name)
		eventually(t, answerLimit, "status says that "+says, func() bool {
			out, _ := h.node.Ebpfctl(t.Context(), "status") // which fails because of the problem
			return strings.Contains(string(out), says)
		})
	}
}

// What comes to a node's tunnel port and was not sent there by a node for its own pods is dropped, each for its reason.
func TestForgedTunnelPackets(t *testing.T) {
	t.Parallel()
	h := startHostile(t, drops.TunnelNode, drops.TunnelSource, drops.TunnelVni, drops.TunnelDestination, drops.NotIP, drops.Invalid)
	family := firstFamily(h.Lab)
	second := inNetwork(lab.FabricPrefix[family], 201)
	h.claim(t, second)
	world, victim, good := strangers[family], h.victim.Addr(), h.other.Addr()
	device := func(node *lab.Node) netip.Addr { return node.PodCIDR().Addr() }
	empty := []gopacket.SerializableLayer{ethernet(family)} // filled up with zeroes
	arp := arpRequest(t, net.HardwareAddr{2, 0, 0, 0, 0, 1}, strangers[wire.IPv4], strangers[wire.IPv4])
	for _, f := range []struct {
		name   string
		from   *lab.Namespace
		vni    uint32
		inside []gopacket.SerializableLayer
		reason drops.Reason
	}{
		{"a host that is no node, as a pod", h.Outside, tunnelVNI, inner(t, good, victim), drops.TunnelNode},
		{"a host that is no node, as the world", h.Outside, tunnelVNI, inner(t, world, victim), drops.TunnelNode},
		{"a node, as another node's pod", h.third.Namespace, tunnelVNI, inner(t, good, victim), drops.TunnelSource},
		{"a node, as another node", h.third.Namespace, tunnelVNI, inner(t, h.peer.Addr(), victim), drops.TunnelSource},
		{"a node, as another node's second address", h.third.Namespace, tunnelVNI, inner(t, second, victim), drops.TunnelSource},
		{"a node, as the world", h.peer.Namespace, tunnelVNI, inner(t, world, victim), drops.TunnelSource},
		{"a node, as the victim's node", h.peer.Namespace, tunnelVNI, inner(t, h.node.Addr(), victim), drops.TunnelSource},
		{"a node, as the victim itself", h.peer.Namespace, tunnelVNI, inner(t, victim, victim), drops.TunnelSource},
		{"a node, as the victim's node's tunnel", h.peer.Namespace, tunnelVNI, inner(t, device(h.node), victim), drops.TunnelSource},
		{"a node, as loopback", h.peer.Namespace, tunnelVNI, inner(t, loopback[family], h.node.Addr()), drops.TunnelSource},
		{"another cluster", h.peer.Namespace, tunnelVNI + 1, inner(t, good, victim), drops.TunnelVni},
		{"no VNI", h.peer.Namespace, 0, inner(t, good, victim), drops.TunnelVni},
		{"to the world", h.peer.Namespace, tunnelVNI, inner(t, good, lab.OutsideAddr[family]), drops.TunnelDestination},
		{"to another node", h.peer.Namespace, tunnelVNI, inner(t, good, h.third.Addr()), drops.TunnelDestination},
		{"to another node's pod", h.peer.Namespace, tunnelVNI, inner(t, good, inNetwork(h.third.PodCIDR(), 9)), drops.TunnelDestination},
		{"to everybody", h.peer.Namespace, tunnelVNI, inner(t, good, everybody[family]), drops.TunnelDestination},
		{"to a group", h.peer.Namespace, tunnelVNI, inner(t, good, group[family]), drops.TunnelDestination},
		{"no IP", h.peer.Namespace, tunnelVNI, []gopacket.SerializableLayer{gopacket.Payload(arp)}, drops.NotIP},
		{"no header", h.peer.Namespace, tunnelVNI, empty, drops.Invalid},
	} {
		const times = 3
		before := dropped(t, h.node, f.reason)
		for range times {
			from := f.from.Addr()
			if f.from == h.Outside {
				from = lab.GatewayAddr[family]
			}
			if err := f.from.SendRaw(forged(t, from, h.node.Addr(), f.vni, f.inside...)); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, answerLimit, f.name+" is counted as "+f.reason.String(), func() bool { return dropped(t, h.node, f.reason) == before+times })
	}
	// The same from where it is true gets there.
	received := listenUDP(t, h.victim.Namespace, netip.AddrPortFrom(victim, 9))
	h.assertNoLie(t)
	for _, source := range []netip.Addr{good, h.peer.Addr(), second, device(h.peer)} {
		if err := h.peer.SendRaw(forged(t, h.peer.Addr(), h.node.Addr(), tunnelVNI, inner(t, source, victim)...)); err != nil {
			t.Fatal(err)
		}
		if from := receive(t, received, lie); from.Addr() != source {
			t.Errorf("a packet of %s is seen as %s's", source, from)
		}
	}
}

// A pod can't speak to a tunnel's end: not as itself, nor by way of a Service or of the world, where its packet would get a node's
// address. VXLAN between pods is nobody's business.
func TestPodsDoNotSpeakToTunnels(t *testing.T) {
	t.Parallel()
	h := startHostile(t, drops.TunnelPort)
	pod, world := h.victim, lab.OutsideAddr[firstFamily(h.Lab)]
	for name, to := range map[string]netip.Addr{"its own node": h.node.Addr(), "another node": h.peer.Addr(), "the world": world} {
		before, ttls := dropped(t, h.node, drops.TunnelPort), []uint8{64, 1}
		if to == world { // with 1, the stack says so
			ttls = ttls[:1]
		}
		for _, ttl := range ttls {
			packet := forged(t, pod.Addr(), to, tunnelVNI, inner(t, inNetwork(h.node.PodCIDR(), 99), h.other.Addr())...)
			packet[hopsOffset[firstFamily(h.Lab)]] = ttl
			if err := pod.SendRaw(packet); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, answerLimit, "packets to the tunnel port of "+name+" are counted", func() bool {
			return dropped(t, h.node, drops.TunnelPort) == before+uint64(len(ttls))
		})
	}
	packets := listenUDP(t, h.other.Namespace, netip.AddrPortFrom(h.other.Addr(), tunnelPort))
	sender := dialUDP(t, pod.Namespace, 0, netip.AddrPortFrom(h.other.Addr(), tunnelPort))
	send(t, sender, "between pods")
	receive(t, packets, "between pods")
	h.sendTranslated(t)
	h.assertNoLie(t)
	for _, node := range h.Nodes {
		for _, reason := range []drops.Reason{drops.TunnelNode, drops.TunnelSource} {
			if n := dropped(t, node, reason); n != 0 {
				t.Errorf("%d packets came as far as %s", n, node.Name)
			}
		}
	}
}

// sendTranslated has the pod send to a port that the other node's netfilter makes the tunnel's of, as a Service does whose endpoints
// somebody has written by hand.
func (h *hostile) sendTranslated(t *testing.T) {
	t.Helper()
	family := firstFamily(h.Lab)
	network, nft := lab.FabricPrefix[family], netfilters[family].nft
	to := netip.AddrPortFrom(inNetwork(network, 200), 30000) // nobody's InternalIP, so the packet gets its node's address
	runOn(t, h.peer, "ip", "addr", "add", netip.PrefixFrom(to.Addr(), network.Bits()).String(), "dev", lab.Uplink, "nodad")
	applyRules(t, h.peer, fmt.Sprintf("table %s hostile {\n chain pre { type nat hook prerouting priority dstnat\n udp dport %d counter dnat to %s\n }\n}\n",
		nft, to.Port(), netip.AddrPortFrom(h.peer.Addr(), tunnelPort)), "nft", "-f")
	eventually(t, answerLimit, "the rule against what is translated is there", func() bool {
		_, err := h.peer.Exec(t.Context(), "nft", "list", "chain", nft, "ebpf-cni", "input")
		return err == nil
	})
	packet := forged(t, h.node.Addr(), h.peer.Addr(), tunnelVNI, inner(t, h.node.Addr(), h.other.Addr())...)
	send(t, dialUDP(t, h.victim.Namespace, 0, to), string(packet[headers[family]:]))
	eventually(t, answerLimit, "the packet is translated", func() bool {
		out, _ := h.peer.Exec(t.Context(), "nft", "list", "table", nft, "hostile")
		return strings.Contains(string(out), "packets 1 ")
	})
}

// Nor by a Service whose endpoint is a node's tunnel port: netfilter gives the packet a node's address.
func TestPodsDoNotSpeakToTunnelsByServices(t *testing.T) {
	t.Parallel()
	p := startProxied(t, lab.Options{AgentFlags: []string{"--routing-mode=vxlan"}}, drops.TunnelPort)
	service := &p.services[0]
	service.endpoint = netip.AddrPortFrom(p.Nodes[1].Addr(), tunnelPort)
	proxy(t, p.Lab, "iptables-nft", p.services)
	p.waitBeside(t, true)
	sender := dialUDP(t, p.client.Namespace, 0, service.cluster)
	packet := forged(t, p.Nodes[0].Addr(), p.Nodes[1].Addr(), tunnelVNI, inner(t, p.client.Addr(), p.remote.Addr())...)
	send(t, sender, string(packet[headers[p.family()]:]))
	eventually(t, answerLimit, "the packet is counted where it is sent", func() bool { return dropped(t, p.Nodes[0], drops.TunnelPort) == 1 })
}

package prog

import (
	"bytes"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Addresses of the link alone.
const (
	ownLink    = "fe80::a8c1:1ff:fe02:303" // a pod's
	otherLink  = "fe80::77"                // a router's, or whoever's
	allNodes   = "ff02::1"
	allRouters = "ff02::2"
)

// question is a pod's for the Ethernet address of another address.
func (b *bed) question(pod, target string) []byte {
	l := b.pods[pod]
	if b.family == inIPv4 {
		return arp(layers.ARPRequest, l.peer, pod, target)
	}
	p := solicitation(b.ip(pod).String(), b.ip(target).String(), linkLayer(1, l.peer)...)
	p.macFrom = l.peer
	return p.bytes(b.family)
}

// linkLayer is the option that says of what Ethernet address the source (1) or the target (2) is.
func linkLayer(option byte, mac net.HardwareAddr) []byte { return append([]byte{option, 1}, mac...) }

// linkMessage is an ICMPv6 message between neighbours (RFC 4861); body is what follows its first eight bytes.
func linkMessage(src, dst string, icmpType uint8, body []byte) packet {
	return packet{proto: icmpv6, src: src, dst: dst, icmpType: icmpType, quote: body, ttl: 255}
}

// solicitation asks for a neighbour's Ethernet address, as a first question does: at the target's solicited-node address.
func solicitation(src, target string, options ...byte) packet {
	a := netip.MustParseAddr(target).As16()
	group := netip.MustParseAddr("ff02::1:ff00:0").As16()
	copy(group[13:], a[13:])
	return linkMessage(src, netip.AddrFrom16(group).String(), layers.ICMPv6TypeNeighborSolicitation, slices.Concat(a[:], options))
}

// ofTheLink are the messages of neighbours, routers and multicast listeners, by ICMPv6 type.
var ofTheLink = map[string]uint8{
	"listener query": 130, "listener report": 131, "listener done": 132, "listener report, version 2": 143, "router solicitation": 133,
	"router advertisement": 134, "neighbour solicitation": 135, "neighbour advertisement": 136,
}

// sent has a pod send a packet from whatever source.
func (b *bed) sent(pod string, p packet) result {
	b.Helper()
	l := b.pods[pod]
	p.macTo, p.macFrom = l.mac, l.peer
	return b.run(wire.FromPod, l.index, p.bytes(inIPv6), nil)
}

// A pod that asks for its gateway is answered on the spot (RFC 4861, section 7.2.4), from whichever of its addresses it asks.
func TestGatewaySolicited(t *testing.T) {
	b := newBed(t, inIPv6)
	l := b.pods[podA]
	gateway := b.ip(gateway).String()
	for _, from := range []string{b.ip(podA).String(), ownLink} {
		for name, p := range map[string]packet{
			"first":                 solicitation(from, gateway, linkLayer(1, l.peer)...),
			"without its own MAC":   solicitation(from, gateway),
			"to the gateway itself": solicitation(from, gateway, linkLayer(1, l.peer)...).with(func(p *packet) { p.dst = gateway }),
		} {
			r := b.sent(podA, p).is("answered").valid()
			if !bytes.Equal(r.frame[:6], l.peer) || !bytes.Equal(r.frame[6:12], l.mac) {
				t.Errorf("%s: Ethernet header % x, want from %s to %s", name, r.frame[:12], l.mac, l.peer)
			}
			v := r.view()
			target := netip.MustParseAddr(gateway).As16()
			want := slices.Concat([]byte{layers.ICMPv6TypeNeighborAdvertisement, 0}, v.l4[2:4], []byte{0xe0, 0, 0, 0}, target[:], linkLayer(2, l.mac))
			if v.ip[7] != 255 || v.family.ip(v.src).String() != gateway || v.family.ip(v.dst).String() != from || !bytes.Equal(v.l4, want) {
				t.Errorf("%s, from %s: answered %v, hop limit %d, % x; want % x", name, from, v, v.ip[7], v.l4, want)
			}
		}
	}
}

// What is no whole and true solicitation for the gateway by a neighbour is not answered, and goes no further.
func TestNotSolicited(t *testing.T) {
	b := newBed(t, inIPv6)
	l := b.pods[podA]
	pod, gateway, option := b.ip(podA).String(), b.ip(gateway).String(), linkLayer(1, l.peer)
	asks := solicitation(pod, gateway, option...)
	for name, p := range map[string]packet{
		"from ::, as while it looks for duplicates": solicitation("::", gateway),
		"from another pod's address":                solicitation(b.ip(podB).String(), gateway, option...),
		"for itself":                                solicitation(pod, pod, option...),
		"for its link-local address":                solicitation("::", ownLink),
		"for another pod":                           solicitation(pod, b.ip(podB).String(), option...),
		"for another router":                        solicitation(pod, "fe80::2", option...),
		"for the node":                              solicitation(pod, b.ip(nodeIP).String(), option...),
		"to another group":                          asks.with(func(p *packet) { p.dst = "ff02::1:ff00:2" }),
		"to all nodes":                              asks.with(func(p *packet) { p.dst = allNodes }),
		"forwarded":                                 asks.with(func(p *packet) { p.ttl = 254 }),
		"with a code":                               asks.with(func(p *packet) { p.icmpCode = 1 }),
		"behind an extension header":                asks.with(func(p *packet) { p.chain = []extension{padded(toDest)} }),
		"with a router alert":                       asks.with(func(p *packet) { p.options = true }),
		"in a fragment":                             asks.with(func(p *packet) { p.atomic = true }),
		"in the first of many":                      asks.with(func(p *packet) { p.fragment = moreFragments }),
		"cut off in the target":                     asks.with(func(p *packet) { p.quote = p.quote[:15] }),
		"cut off in the option":                     asks.with(func(p *packet) { p.quote = p.quote[:20] }),
		"with an option of no length":               solicitation(pod, gateway, 1, 0, 0, 0, 0, 0, 0, 0),
		"with an option longer than the packet":     solicitation(pod, gateway, 1, 2, 0, 0, 0, 0, 0, 0),
		"without a target":                          asks.with(func(p *packet) { p.quote = []byte{} }),
	} {
		if r := b.sent(podA, p); r.what != "drop LINK_SCOPE" {
			t.Errorf("%s: outcome %q", name, r.what)
		}
	}
	for bit := range 8 * 32 { // any that was lost
		frame := asks.bytes(inIPv6)
		frame[ethernet+40+bit/8] ^= 1 << (bit % 8)
		b.run(wire.FromPod, l.index, frame, nil).is("drop LINK_SCOPE")
	}
	// A pod without an address of the family has no business there.
	must(t, b.devices.Put(devices.Key{Ifindex: uint32(l.index)}, devices.Value{Addresses: wire.Addresses{inIPv4.addr(podA)}}))
	b.sent(podA, asks).is("drop LINK_SCOPE")
	b.sent(podA, asks.with(func(p *packet) { p.src = ownLink })).is("drop LINK_SCOPE")
}

// A pod shares its link with nobody: it is no router, no neighbour and no listener of anyone's, wherever it says so.
func TestPodsSendNothingOfTheLink(t *testing.T) {
	b := newBed(t, inIPv6)
	pod := b.ip(podA).String()
	for name, kind := range ofTheLink {
		for _, from := range []string{ownLink, "::", pod} {
			for _, to := range []string{allNodes, allRouters, "ff02::16", "ff01::1", otherLink, b.ip(gateway).String()} {
				if r := b.sent(podA, linkMessage(from, to, kind, make([]byte, 24))); r.what != "drop LINK_SCOPE" {
					t.Errorf("%s from %s to %s: outcome %q", name, from, to, r.what)
				}
			}
		}
		for _, to := range []string{podB, podC, remote, beyond, node2IP, nodeIP, native, world, noPod} {
			if r := b.sent(podA, linkMessage(pod, to, kind, make([]byte, 24))); r.what != "drop LINK_SCOPE" {
				t.Errorf("%s to %s: outcome %q", name, to, r.what)
			}
		}
		b.toUplink(linkMessage(pod, world, kind, make([]byte, 24))).is("drop LINK_SCOPE")
	}
	redirect := linkMessage(ownLink, pod, layers.ICMPv6TypeRedirect, make([]byte, 32))
	b.sent(podA, redirect.with(func(p *packet) { p.dst = podB })).is("drop LINK_SCOPE")
	b.sent(podA, redirect.with(func(p *packet) { p.src, p.dst = podA, podB })).is("drop ICMP_REDIRECT")
	b.empty()
}

// Link-local addresses carry nothing but neighbour discovery, and no packet with one is masqueraded.
func TestLinkLocalAddresses(t *testing.T) {
	b := newBed(t, inIPv6)
	for _, to := range []string{podB, remote, beyond, node2IP, nodeIP, world, otherLink, gateway, allNodes, nowhere} {
		b.sent(podA, udp(ownLink, 5000, to, 53)).is("drop LINK_SCOPE")
		b.sent(podA, tcp(ownLink, 5000, to, 80, syn)).is("drop LINK_SCOPE")
		b.sent(podA, ping(ownLink, 7, to)).is("drop LINK_SCOPE")
	}
	for _, to := range []string{otherLink, gateway, allNodes, "ff02::fb"} {
		b.fromPod(udp(podA, 5353, to, 5353)).is("drop LINK_SCOPE")
		b.fromPod(ping(podA, 7, to)).is("drop LINK_SCOPE")
	}
	for _, to := range []string{otherLink, allNodes, nowhere} { // whatever the host makes of them
		b.leftToStack(to, b.toUplink(udp(podA, 5353, to, 5353)))
	}
	b.empty()
}

// No pod hears of others' links, by whichever way they send.
func TestPodsReceiveNothingOfTheLink(t *testing.T) {
	b := newBed(t, inIPv6)
	for name, kind := range ofTheLink {
		for _, from := range []string{world, node2IP, remote} {
			if r := b.fromUplink(linkMessage(from, podA, kind, make([]byte, 24))); r.what != "drop LINK_SCOPE" {
				t.Errorf("%s from %s: outcome %q", name, from, r.what)
			}
		}
		b.fromUplink(linkMessage(otherLink, podA, kind, make([]byte, 24))).is("drop SPOOFED_SOURCE")
		if r := b.fromTunnel(linkMessage(beyond, podA, kind, make([]byte, 24))); r.what != "drop LINK_SCOPE" {
			t.Errorf("%s through the tunnel: outcome %q", name, r.what)
		}
		b.fromTunnel(linkMessage(otherLink, podA, kind, make([]byte, 24))).is("drop TUNNEL_SOURCE")
	}
	b.empty()
}

// The tunnel is no link: through it nobody is the node's neighbour or router either, nor knows it a better way.
func TestNodeReceivesNothingOfTheLinkByTunnel(t *testing.T) {
	b := newBed(t, inIPv6)
	for name, kind := range ofTheLink {
		for _, from := range []string{beyond, node5IP} {
			for _, to := range []string{nodeIP, tunnelIP} {
				if r := b.fromTunnel(linkMessage(from, to, kind, make([]byte, 24))); r.what != "drop LINK_SCOPE" {
					t.Errorf("%s from %s: outcome %q", name, from, r.what)
				}
			}
		}
	}
	b.empty()
}

// The node's own IPv6 is left alone, in both directions: what keeps its addresses, its routers and its neighbours.
func TestNodesOwnLink(t *testing.T) {
	for name, options := range configured {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, inIPv6, options...)
			own := "fe80::1234"
			messages := map[string]packet{
				"redirect":                  linkMessage(otherLink, own, layers.ICMPv6TypeRedirect, make([]byte, 32)),
				"DHCPv6 to the client":      udp(otherLink, 547, own, 546),
				"DHCPv6 to the servers":     udp(otherLink, 546, "ff02::1:2", 547),
				"multicast DNS":             udp(otherLink, 5353, "ff02::fb", 5353),
				"ping":                      ping(otherLink, 7, own),
				"ping of all nodes":         ping(otherLink, 7, allNodes),
				"error about its own":       icmpError(otherLink, own, 3, 3, udp(own, 50000, otherLink, 53).bytes(inIPv6), 8),
				"looking for duplicates":    solicitation("::", b.ip(nodeIP).String()),
				"asking for the node":       solicitation(otherLink, b.ip(nodeIP).String()),
				"from a port of the range":  udp(otherLink, 50000, own, 50000),
				"BGP with a link's address": tcp(otherLink, 50000, own, 179, syn),
			}
			for name, kind := range ofTheLink {
				messages[name] = linkMessage(otherLink, own, kind, make([]byte, 24))
				messages[name+" to all"] = linkMessage(otherLink, allNodes, kind, make([]byte, 24))
				messages[name+" to an address"] = linkMessage(otherLink, nodeIP, kind, make([]byte, 24))
				messages[name+" with a router alert"] = linkMessage("::", "ff02::16", kind, make([]byte, 24)).with(func(p *packet) { p.options = true })
			}
			group := net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}
			for name, p := range messages {
				b.leftToStack(name+", arriving", b.fromUplink(p))
				b.leftToStack(name+", arriving for a group", b.fromUplink(p.with(func(p *packet) { p.macTo = group })))
				b.leftToStack(name+", leaving", b.toUplink(p))
			}
			b.empty()
		})
	}
}

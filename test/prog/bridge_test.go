package prog

import (
	"fmt"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/ebpf-cni/ebpf-cni/maps/bridges"
	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Behind the bridge, in the podCIDR, which has pods as well.
const (
	bridgeIP   = "10.244.1.1"
	lodger     = "10.244.1.50"
	neighbourL = "10.244.1.51"
	silentL    = "10.244.1.52" // does not resolve
)

// withBridges turns on what bridges need.
func withBridges(c *config.NodeConfig) { c.Bridges = 1 }

// newBridgedBed is a bed with containers behind a bridge.
func newBridgedBed(t *testing.T, f family, options ...option) (*bed, veth) {
	t.Helper()
	b := newBed(t, f, append(options, withBridges)...)
	l := newLink(b, "br", bridgeIP+"/24")
	for f := range wire.Families {
		f := family{f}
		f.neighbour(b, l, lodger)
		f.neighbour(b, l, neighbourL)
		must(t, b.destinations.Put(f.key(bridgeIP+"/32"), destinations.Value{Kind: destinations.Host}))
		for prefix, index := range map[string]int{"10.244.1.0/24": l.index, bridgeIP + "/32": 0, tunnelIP + "/32": 0} {
			must(t, b.bridges.Put(bridges.Key(f.key(prefix)), bridges.Value{Ifindex: uint32(index)}))
		}
	}
	must(t, b.devices.Put(devices.Key{Ifindex: uint32(l.index)}, devices.Value{}))
	for _, a := range []string{lodger, neighbourL, silentL} {
		b.pods[a] = l
	}
	return b, l
}

// Every verdict on what a container sends past its bridge, and on what is sent to one.
func TestBridgeVerdicts(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b, _ := newBridgedBed(t, f)
		last := func(p *packet) { p.ttl = 1 }
		long := func(p *packet) { p.payload = make([]byte, mtu+1) }
		b.becomes(b.fromPod, []outcome{
			{"to a pod", tcp(lodger, 40000, podA, 80, syn), "delivered"},
			{"to a container", tcp(lodger, 40000, neighbourL, 80, syn), "delivered"},
			{"of a pod to a container", tcp(podA, 40000, lodger, 80, syn), "delivered"},
			{"of a pod to a container, last hop", tcp(podA, 40000, lodger, 80, syn).with(last), "stack"},
			{"of a pod to a container, larger than the bridge", udp(podA, 40000, lodger, 80).with(long), "stack"},
			{"of a pod to a container that does not resolve", tcp(podA, 40000, silentL, 80, syn), "delivered"},
			{"of a pod to such a container, larger than the bridge", udp(podA, 40000, silentL, 80).with(long), "stack"},
			{"to the bridge's own address", tcp(lodger, 40000, bridgeIP, 80, syn), "stack"},
			{"of a pod to the bridge's own address", tcp(podA, 40000, bridgeIP, 80, syn), "stack"},
			{"to another node's pod", tcp(lodger, 40000, remote, 80, syn), "forwarded"},
			{"to a node", tcp(lodger, 40000, node2IP, 80, syn), "forwarded"},
			{"to a node's tunnel", udp(lodger, 40000, node2IP, tunnelPort), "drop TUNNEL_PORT"},
			{"to this node's tunnel", udp(lodger, 40000, bridgeIP, tunnelPort), "drop TUNNEL_PORT"},
			{"to the world", tcp(lodger, 40000, world, 80, syn), "forwarded"},
			{"to nobody's node", tcp(lodger, 40000, lost, 80, syn), "drop NODE_OFF_LINK"},
		})
		b.becomes(b.fromUplink, []outcome{
			{"another node's pod", tcp(remote, 40000, lodger, 80, syn), "delivered"},
			{"the world", tcp(world, 40000, lodger, 80, syn), "delivered"},
			{"to the bridge's own address", tcp(remote, 40000, bridgeIP, 80, syn), "stack"},
			{"a container's own address", tcp(neighbourL, 40000, lodger, 80, syn), "drop SPOOFED_SOURCE"},
			{"the bridge's address", tcp(bridgeIP, 40000, lodger, 80, syn), "drop SPOOFED_SOURCE"},
		})
		b.turnedAway(packet{proto: 47, src: lodger, dst: world, payload: make([]byte, 8)}, "drop UNKNOWN_PROTOCOL")
	})
}

// What a container sends past its bridge has an address that is behind it; neither the host's own nor a pod's is.
func TestBridgeSpoofedSource(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b, l := newBridgedBed(t, f)
		for _, src := range []string{bridgeIP, tunnelIP, remote, nodeIP, world, "0.0.0.0", "127.0.0.1", podA, podC} {
			for _, dst := range []string{podB, remote, node2IP, bridgeIP, world} {
				p := udp(src, 40000, dst, 80)
				p.macTo, p.macFrom = l.mac, l.peer
				b.run(wire.FromPod, l.index, p.bytes(f), nil).is("drop SPOOFED_SOURCE")
			}
		}
		// A pod does not become a container by an address of the bridge's.
		b.run(wire.FromPod, b.pods[podA].index, udp(lodger, 40000, remote, 80).bytes(f), nil).is("drop SPOOFED_SOURCE")
	})
}

// What is said on the bridge's link is the host's to hear, but for what a tunnel's socket would take.
func TestBridgeLink(t *testing.T) {
	b, l := newBridgedBed(t, inIPv6)
	everybody := []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	b.run(wire.FromPod, l.index, arp(layers.ARPRequest, l.peer, lodger, bridgeIP), nil).is("stack")
	gateway := inIPv6.ip(bridgeIP).String()
	for _, from := range []string{inIPv6.ip(lodger).String(), "fe80::50"} {
		for name, p := range map[string]packet{
			"solicitation":  solicitation(from, gateway, linkLayer(1, l.peer)...),
			"advertisement": linkMessage(from, gateway, layers.ICMPv6TypeNeighborAdvertisement, b.ip(lodger).AsSlice()),
		} {
			p.macTo, p.macFrom = l.mac, l.peer
			if r := b.run(wire.FromPod, l.index, p.bytes(inIPv6), nil); r.what != "stack" {
				t.Errorf("%s from %s: %s", name, from, r.what)
			}
		}
	}
	about := icmpError(lodger, bridgeIP, layers.ICMPv4TypeDestinationUnreachable, 4, udp(nodeIP, 4000, node2IP, tunnelPort).bytes(inIPv6), 8)
	for _, c := range []struct {
		p    packet
		want string
	}{
		{udp("0.0.0.0", 68, "255.255.255.255", 67), "stack"},
		{udp(lodger, 40000, "255.255.255.255", 5353), "stack"},
		{udp(lodger, 40000, bridgeIP, 80), "stack"}, // the stack forwards none of these
		{ping(lodger, 7, bridgeIP), "stack"},
		{udp(lodger, 40000, bridgeIP, tunnelPort), "drop TUNNEL_PORT"},
		{udp(remote, 40000, bridgeIP, 80), "drop SPOOFED_SOURCE"},
		{udp(world, 40000, bridgeIP, 80), "drop SPOOFED_SOURCE"},
		{udp(world, 40000, "255.255.255.255", 5353), "drop SPOOFED_SOURCE"},
		{udp("0.0.0.0", 40000, bridgeIP, 80), "drop SPOOFED_SOURCE"},
		{about, "drop FORGED_ERROR"},
		{about.with(func(p *packet) { p.fragment = moreFragments }), "drop FORGED_ERROR"},
		{about.with(func(p *packet) { p.icmpType, p.icmpCode = layers.ICMPv4TypeRedirect, 0 }), "drop ICMP_REDIRECT"},
	} {
		c.p.macTo, c.p.macFrom = everybody, l.peer
		for _, f := range []family{inIPv4, inIPv6} {
			b.run(wire.FromPod, l.index, c.p.bytes(f), nil).is(c.want)
		}
	}
	copied := udp(world, 40000, neighbourL, tunnelPort) // as a bridge that captures has it, and the stack drops it
	copied.macTo, copied.macFrom = []byte{2, 0x42, 9, 9, 9, 9}, l.peer
	b.run(wire.FromPod, l.index, copied.bytes(inIPv6), nil).is("stack")
}

// Who has only an address of the link speaks to the link and to the host; neighbour discovery stays there.
func TestBridgeLinkLocal(t *testing.T) {
	b, l := newBridgedBed(t, inIPv6)
	about := udp(nodeIP, 4000, node2IP, tunnelPort).bytes(inIPv6)
	gateway, container, outside := b.ip(bridgeIP).String(), b.ip(lodger).String(), b.ip(world).String()
	for name, c := range map[string]struct {
		p    packet
		want string
	}{
		"to the host":                    {udp("fe80::50", 40000, gateway, 80), "stack"},
		"to the link":                    {udp("fe80::50", 546, "ff02::1:2", 547), "stack"},
		"to the world":                   {udp("fe80::50", 40000, outside, 80), "drop SPOOFED_SOURCE"},
		"no address, to the host":        {udp("::", 40000, gateway, 80), "drop SPOOFED_SOURCE"},
		"a node's address, to the link":  {udp(b.ip(node2IP).String(), 40000, "ff02::1:2", 547), "drop SPOOFED_SOURCE"},
		"an error, to the host":          {icmpError("fe80::42", gateway, layers.ICMPv4TypeDestinationUnreachable, 4, about, 8), "drop FORGED_ERROR"},
		"an error, to the link":          {icmpError(container, "fe80::1", layers.ICMPv4TypeDestinationUnreachable, 4, about, 8), "drop FORGED_ERROR"},
		"as a router, to the link":       {linkMessage("fe80::50", "ff02::1", layers.ICMPv6TypeRouterAdvertisement, make([]byte, 16)), "drop LINK_SCOPE"},
		"a solicitation, of the world's": {linkMessage(container, outside, layers.ICMPv6TypeNeighborSolicitation, b.ip(world).AsSlice()), "drop LINK_SCOPE"},
	} {
		c.p.macTo, c.p.macFrom = l.mac, l.peer
		if r := b.run(wire.FromPod, l.index, c.p.bytes(inIPv6), nil); r.what != c.want {
			t.Errorf("%s: %q, want %q", name, r.what, c.want)
		}
	}
}

// What comes from other nodes and the world for addresses that no container has costs them an allowance of neighbours.
func TestBridgeSilentContainers(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		b, _ := newBridgedBed(t, f)
		must(t, b.devices.Put(devices.Key{Ifindex: devices.World}, devices.Value{}))
		began, asked := time.Now(), 0
		for i := range 150 {
			if r := b.fromUplink(udp(remote, 5000, fmt.Sprintf("10.244.1.%d", 100+i), 53)); r.what == "delivered" {
				asked++
			} else {
				r.is("drop NEIGHBOUR_LIMIT")
			}
		}
		const burst, perSecond = 100, 20
		if most := burst + 2 + int(time.Since(began).Seconds()*perSecond); asked < burst || asked > most {
			t.Errorf("%d containers asked for, want %d to %d", asked, burst, most)
		}
		b.fromUplink(udp(remote, 5000, lodger, 53)).is("delivered")
	})
}

// A container is masqueraded, and gets what answers it; the flows of one that has left its address end, and no other's.
func TestBridgeFlows(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b, l := newBridgedBed(t, f)
		for i, a := range []string{lodger, neighbourL} {
			out := b.fromPod(udp(a, 50000, world, uint16(53+i))).is("forwarded").valid().view()
			b.fromUplink(udp(world, uint16(53+i), nodeIP, out.sport)).is("delivered").valid().flow(fmt.Sprintf("udp %s:%d > %s:50000", world, 53+i, a))
			b.fromUplink(udp(world, 4000, a, 53)).is("delivered")
		}
		if got := b.device(lodger); got.SnatFlows != 2 || got.ConntrackFlows != 2 || got.Packets != 2 {
			t.Errorf("the bridge has %+v, want all flows of both", got)
		}
		n, err := b.collect.EndFlows(now(b), func(bridge uint32, address wire.Addr) bool {
			return bridge == uint32(l.index) && address == f.addr(lodger)
		})
		must(t, err)
		if n != 2 {
			t.Errorf("%d flows ended, want 2", n)
		}
		b.count(1, 1)
		if n := b.sweep(usage.Snat, time.Second, false); n != 0 {
			t.Errorf("%d more flows ended", n)
		}
	})
}

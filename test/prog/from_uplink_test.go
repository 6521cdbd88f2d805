package prog

import (
	"bytes"
	"net"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Every verdict of ec_from_uplink on a packet that belongs to no flow.
func TestFromUplinkVerdicts(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		change := func(from string, change func(*packet)) packet { return tcp(from, 4000, podA, 80, syn).with(change) }
		last := func(p *packet) { p.ttl = 1 }
		b.becomes(b.fromUplink, []outcome{
			{"world to pod", tcp(world, 4000, podA, 80, syn), "delivered"},
			{"world to pod outside the podCIDR", tcp(world, 4000, podC, 80, syn), "delivered"},
			{"world to pod, unknown protocol", change(world, func(p *packet) { p.proto, p.payload = 47, make([]byte, 16) }), "delivered"},
			{"world to pod, later fragment", change(world, func(p *packet) { p.fragment = 100 }), "delivered"},
			{"world to pod, last hop", change(world, last), "stack"},
			{"world to pod, IP options", change(world, func(p *packet) { p.options = true }), "stack"},
			{"other node's pod to pod", tcp(remote, 4000, podA, 80, syn), "delivered"},
			{"other node's pod to pod, last hop", change(remote, last), "stack"},
			{"other node to pod", tcp(node2IP, 4000, podA, 80, syn), "delivered"},
			{"native to pod", tcp(native, 4000, podA, 80, syn), "delivered"},
			{"to an address of nobody", tcp(world, 4000, noPod, 80, syn), "drop NO_ENDPOINT"},
			{"to the node", tcp(world, 4000, nodeIP, 22, syn), "stack"},
			{"to the node, a port of the range", tcp(world, 4000, nodeIP, 50000, syn), "stack"},
			{"to the node, ping", ping(world, 50000, nodeIP), "stack"},
			{"to the node, unknown protocol", change(world, func(p *packet) { p.dst, p.proto = nodeIP, 47 }), "stack"},
			{"to the node, later fragment", change(world, func(p *packet) { p.dst, p.fragment = nodeIP, 100 }), "drop FRAG_NOT_FOUND"},
			{"from one of our pods' addresses", tcp(podB, 4000, podA, 80, syn), "drop SPOOFED_SOURCE"},
			{"from our podCIDR", tcp(noPod, 4000, podA, 80, syn), "drop SPOOFED_SOURCE"},
			{"from a pod of ours outside the podCIDR", tcp(podC, 4000, podA, 80, syn), "drop SPOOFED_SOURCE"},
			{"from our node's address", tcp(nodeIP, 4000, podA, 80, syn), "drop SPOOFED_SOURCE"},
			{"to another host", tcp(world, 4000, remote, 80, syn), "stack"},
		})
	})
}

// What is not for this host's MAC, or no IP, or malformed, is the stack's, unchanged and unread.
func TestFromUplinkLeavesToStack(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		frame := func(to net.HardwareAddr) []byte {
			return tcp(world, 4000, podA, 80, syn).with(func(p *packet) { p.macTo = to }).bytes(b.family)
		}
		broken := frame(b.uplink.mac)
		broken[14] = 0x44
		disturbed := frame(b.uplink.mac)
		disturbed[each(f, 24, 14)] ^= 0x10 // or the version, where there is no checksum
		for name, frame := range map[string][]byte{
			"another host's": frame(net.HardwareAddr{2, 0, 0, 0, 0, 99}),
			"broadcast":      frame(net.HardwareAddr{255, 255, 255, 255, 255, 255}),
			"multicast":      frame(net.HardwareAddr{1, 0, 0x5e, 0, 0, 1}),
			"ARP":            arp(1, b.uplink.peer, world, nodeIP),
			"malformed":      broken,
			"wrong checksum": disturbed,
		} {
			r := b.run(wire.FromUplink, b.uplink.index, frame, nil)
			if r.what != "stack" || !bytes.Equal(r.in, r.frame) {
				t.Errorf("%s: outcome %q, frame changed: %v", name, r.what, !bytes.Equal(r.in, r.frame))
			}
		}
		b.empty()
	})
}

// A pod gets the packet of another node as it came, with its own MAC.
func TestFromUplinkDelivers(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		r := b.fromUplink(tcp(remote, 4000, podA, 80, syn)).is("delivered").flow("tcp " + remote + ":4000 > " + podA + ":80").valid()
		if l := b.pods[podA]; !bytes.Equal(r.frame[:6], l.peer) || !bytes.Equal(r.frame[6:12], l.mac) {
			t.Errorf("Ethernet header % x: want from %s to %s", r.frame[:12], l.mac, l.peer)
		}
		if ttl := r.view().ttl; ttl != 63 {
			t.Errorf("TTL %d, want 63", ttl)
		}
		b.empty() // a flow between pods needs no memory
	})
}

// The world opens a connection to a pod: it is recorded, and the replies leave with the pod's own address.
func TestWorldOpensFlow(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for _, p := range []packet{
			tcp(world, 4000, podA, 80, syn),
			udp(world, 4000, podA, 53),
			udp(world, 4000, podA, 53).with(func(p *packet) { p.noSum = true }),
			ping(world, 77, podA),
		} {
			r := b.fromUplink(p).is("delivered").valid()
			reply := p.replied()
			reply.flags = syn | ack
			out := b.fromPod(reply).is("forwarded").flow(reversed(r.view())).valid()
			if out.mark&mark == 0 {
				t.Error("reply carries no mark")
			}
		}
		b.count(0, 3)
		unknown := packet{proto: 132, src: world, dst: podA, payload: make([]byte, 12)}
		b.fromUplink(unknown).is("delivered")
		b.fromPod(unknown.replied()).is("forwarded").flow("132 " + podA + ":0 > " + world + ":0")
		b.count(0, 4)
		if got, err := b.conntrack.Get(b.tuple(wire.TCP, podA, 80, world, 4000)); err != nil || got.Ifindex != uint32(b.pods[podA].index) {
			t.Errorf("recorded %+v, %v", got, err)
		}
	})
}

// reversed is the flow of an answer to what the view shows.
func reversed(v view) string {
	v.src, v.dst, v.sport, v.dport = v.dst, v.src, v.dport, v.sport
	return v.String()
}

// The reply to a flow that came by one uplink leaves by the route, with the pod's address, also when that is another one.
func TestWorldOpensFlowByEitherUplink(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := tcp(world2, 4000, podA, 80, syn)
		b.fromUplink(p).is("delivered")
		reply := p.replied().with(func(p *packet) { p.flags = syn | ack })
		b.fromPod(reply).is("forwarded").flow("tcp " + podA + ":80 > " + world2 + ":4000").valid()
		b.arrive(b.other, tcp(world2, 4001, podA, 80, syn)).is("delivered")
		b.count(0, 2)
	})
}

// The world sends to a tuple that the pod already has masqueraded: the pod could not tell the replies apart.
func TestWorldCollidesWithMasqueraded(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromPod(tcp(podA, 40000, world, 80, syn)).is("forwarded")
		b.fromUplink(tcp(world, 80, podA, 40000, syn)).is("drop FLOW_COLLISION")
		b.fromUplink(tcp(world, 81, podA, 40000, syn)).is("delivered")
		b.count(1, 1)
	})
}

// The pod's own packets on a tuple that the world opened belong to that flow, all but a SYN of its own.
func TestPodSendsOnWorldsFlow(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromUplink(tcp(world, 80, podA, 40000, syn)).is("delivered")
		b.fromPod(tcp(podA, 40000, world, 80, ack)).is("forwarded").flow("tcp " + podA + ":40000 > " + world + ":80")
		b.count(0, 1)
	})
}

// A pod whose device record is missing gets nothing from the world that could not be recorded.
func TestWorldOpensFlowToHalfAPod(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		must(t, b.devices.Delete(devices.Key{Ifindex: uint32(b.pods[podA].index)}))
		b.fromUplink(tcp(world, 4000, podA, 80, syn)).is("drop NO_ENDPOINT")
		b.fromUplink(tcp(remote, 4000, podA, 80, syn)).is("delivered")
		b.empty()
	})
}

// An entry of the address's previous owner is none to the new one, and goes at the first touch.
func TestWorldsFlowOfEarlierOwner(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromUplink(tcp(world, 4000, podA, 80, syn)).is("delivered")
		b.giveAway(podA, podB)
		// The new owner never saw that connection: its answer is not the world's flow's.
		b.fromPodAt(podB, tcp(podA, 80, world, 4000, syn|ack)).is("drop NO_MAPPING")
		b.count(0, 0)
		b.fromUplink(tcp(world, 4000, podA, 80, syn)).is("delivered")
		b.fromPodAt(podB, tcp(podA, 80, world, 4000, syn|ack)).is("forwarded").flow("tcp " + podA + ":80 > " + world + ":4000")
	})
}

// A pod's own connection is masqueraded, though somebody has sent the pod a segment in the server's name before.
func TestPodConnectsWhereSomebodyClaimedAFlow(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, flags := range map[string]uint8{"ACK": ack, "SYN": syn} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f)
				b.fromUplink(tcp(world, 443, podA, 50000, flags)).is("delivered")
				b.count(0, 1)
				p := tcp(podA, 50000, world, 443, syn)
				r := b.fromPod(p).is("forwarded").flow("tcp " + nodeIP + ":50000 > " + world + ":443")
				b.count(1, 0)
				b.fromUplink(answer(r, p)).is("delivered")
				b.fromPod(p.with(func(p *packet) { p.flags = ack })).is("forwarded").flow("tcp " + nodeIP + ":50000 > " + world + ":443")
			})
		}
	})
}

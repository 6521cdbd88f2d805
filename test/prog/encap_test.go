package prog

import (
	"bytes"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// sized is the datagram with an IP packet of so many bytes.
func (f family) sized(p packet, ipLen int) packet {
	p.payload = make([]byte, ipLen-f.header()-8)
	return p
}

// What a pod sends to a node behind the tunnel, or to its pods, goes there unless the stack is needed.
func TestFromPodThroughTheTunnel(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for _, c := range []struct {
			name string
			p    packet
			want string
		}{
			{"to a pod", tcp(podA, 5000, beyond, 80, syn), "forwarded"},
			{"from a pod outside the podCIDR", tcp(podC, 5000, beyond, 80, syn), "forwarded"},
			{"to a pod, ping", ping(podA, 7, beyond), "forwarded"},
			{"to a pod, unknown protocol", sctp(podA, beyond), "forwarded"},
			{"to a pod, later fragment", udp(podA, 5000, beyond, 53).with(func(p *packet) { p.fragment = 100 }), "forwarded"},
			{"to the node", udp(podA, 5000, node5IP, 53), "forwarded"},
			{"as large as fits", f.sized(udp(podA, 5000, beyond, 53), tunnelMTU), "forwarded"},
			{"too large", f.sized(udp(podA, 5000, beyond, 53), tunnelMTU+1), each(f, "stack", "drop TOO_BIG")},
			{"to the node, too large", f.sized(udp(podA, 5000, node5IP, 53), tunnelMTU+1), each(f, "stack", "drop TOO_BIG")},
			{"last hop", udp(podA, 5000, beyond, 53).with(func(p *packet) { p.ttl = 1 }), "stack"},
			{"IP options", udp(podA, 5000, beyond, 53).with(func(p *packet) { p.options = true }), "stack"},
			{"to this node's address on the tunnel device", udp(podA, 5000, tunnelIP, 53), "stack"},
		} {
			b.answers = c.want == "drop TOO_BIG"
			r := b.fromPod(c.p)
			if r.what != c.want {
				t.Errorf("%s: outcome %q, want %q", c.name, r.what, c.want)
			}
			if r.what == "forwarded" && (r.view().ttl != 63 || !bytes.Equal(r.frame[:12], r.in[:12])) {
				t.Errorf("%s: TTL %d, Ethernet header % x", c.name, r.view().ttl, r.frame[:14])
			}
		}
		b.empty()
	})
}

// A packet that stands for many is judged by its segments, here too.
func TestSegmentsFitTheTunnel(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for segment, want := range map[int]string{tunnelMTU - f.header() - 20: "forwarded", tunnelMTU - f.header() - 19: each(f, "stack", "drop TOO_BIG")} {
			b.answers = want != "forwarded"
			p := tcp(podA, 5000, beyond, 80, ack)
			l := b.pods[podA]
			p.macTo, p.macFrom, p.payload = l.mac, l.peer, make([]byte, 3000)
			b.run(wire.FromPod, l.index, p.bytes(b.family), map[int]uint32{skbGSOSize: uint32(segment)}).is(want)
		}
	})
}

// A node that takes one Ethernet address alone gets that, also from a path that is kept.
func TestFromPodWritesTheInnerMAC(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPaths(time.Second))
		v := b.byTunnel(destinations.PodCIDR)
		v.MAC = wire.MAC{2, 0xaa, 0, 0, 0, 5}
		must(t, b.destinations.Put(b.key("10.244.5.0/24"), v))
		for range 2 {
			r := b.fromPod(udp(podA, 5000, beyond, 53)).is("forwarded")
			if !bytes.Equal(r.frame[:6], v.MAC[:]) {
				t.Errorf("left as % x", r.frame[:14])
			}
		}
	})
}

// Without the device there is no such way: the stack answers, or finds another.
func TestNoTunnelDevice(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		v, err := b.config.Get(config.Key{})
		must(t, err)
		v.TunnelIfindex = 0
		must(t, b.config.Put(config.Key{}, v))
		b.fromPod(udp(podA, 5000, beyond, 53)).is("drop NODE_OFF_LINK")
		b.fromPod(udp(podA, 5000, node5IP, 53)).is("drop NODE_OFF_LINK")
		b.fromPod(udp(podA, 5000, remote, 53)).is("forwarded")
	})
}

// Beside netfilter the same go through the tunnel as go straight to other nodes.
func TestThroughTheTunnelBesideNetfilter(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, besideNetfilter)
		b.netfilterKnows(b.tuple(wire.UDP, podA, 5000, beyond, 53))
		b.fromPod(udp(podA, 5000, beyond, 53)).is("stack")
		b.fromPod(udp(podA, 5001, beyond, 53)).is("forwarded")
		b.fromPod(udp(podA, 5000, node5IP, 53)).is("stack")
		b.fromPod(sctp(podA, beyond)).is("stack")
	})
}

// What the stack decides on does not go past it through the tunnel.
func TestStackDecidesBeforeTheTunnel(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.configure(config.RoutesToStack)
		b.leftToStack("routes", b.fromPod(udp(podA, 5000, beyond, 53)))
		b.leftToStack("routes, node", b.fromPod(udp(podA, 5000, node5IP, 53)))
		b.configure(0)
		b.giveToStack(beyond+"/32", destinations.ToStack|destinations.ByTunnel)
		b.leftToStack("policy", b.fromPod(udp(podA, 5000, beyond, 53)))
	})
}

// No pod gets a datagram to the port at which a node takes what other nodes send, whoever would carry it.
func TestPodsDoNotReachTheTunnelPort(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		plain := func(*packet) {}
		for name, c := range map[string]struct {
			change  func(*packet)
			prepare func(*bed)
			options []option
		}{
			"plain":           {change: plain},
			"kept path":       {change: plain, prepare: func(b *bed) { b.everywhere(53) }, options: []option{withPaths(time.Minute)}},
			"last hop":        {change: func(p *packet) { p.ttl = 1 }},
			"IP options":      {change: func(p *packet) { p.options = true }},
			"first fragment":  {change: func(p *packet) { p.fragment, p.payload = moreFragments, nil }},
			"too large":       {change: func(p *packet) { p.payload = make([]byte, mtu) }},
			"routes to stack": {change: plain, prepare: func(b *bed) { b.configure(config.RoutesToStack) }},
			"under a policy": {change: plain, prepare: func(b *bed) {
				for _, to := range nodes {
					b.giveToStack(to+"/32", destinations.ToStack)
				}
			}},
			"beside netfilter":     {change: plain, options: []option{besideNetfilter}},
			"without masquerading": {change: plain, options: []option{withoutMasquerade}},
		} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f, c.options...)
				b.answers = name == "too large"
				if c.prepare != nil {
					c.prepare(b)
				}
				for _, to := range nodes {
					b.fromPod(udp(podA, 5000, to, tunnelPort).with(c.change)).is("drop TUNNEL_PORT")
					if got := b.fromPod(udp(podA, 5000, to, tunnelPort+1).with(c.change)).what; got == "drop TUNNEL_PORT" {
						t.Errorf("to %s, another port: outcome %q", to, got)
					}
					if got := b.fromPod(tcp(podA, 5000, to, tunnelPort, syn).with(c.change)).what; got == "drop TUNNEL_PORT" {
						t.Errorf("to %s, TCP: outcome %q", to, got)
					}
				}
			})
		}
	})
}

// nodes are addresses of this node and of others, by every way.
var nodes = []string{nodeIP, nodeOtherIP, tunnelIP, node2IP, node5IP}

// everywhere sends a datagram from a pod to each node.
func (b *bed) everywhere(port uint16) {
	b.Helper()
	for _, to := range nodes {
		b.fromPod(udp(podA, 5000, to, port))
	}
}

// The world at that port may be a node that is not known to be one: it does not get a packet with this node's address.
// A datagram that keeps the pod's address harms nobody, so tunnels between pods work.
func TestNoMasqueradedFlowToTheTunnelPort(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromPod(udp(podA, 5000, world, tunnelPort)).is("drop TUNNEL_PORT")
		b.fromPod(udp(podA, 5000, world, tunnelPort).with(func(p *packet) { p.fragment = moreFragments })).is("drop TUNNEL_PORT")
		b.toUplink(udp(podA, 5000, world, tunnelPort)).is("drop TUNNEL_PORT")
		b.empty()
		b.fromPod(udp(podA, 5000, world, tunnelPort+1)).is("forwarded")
		b.fromPod(tcp(podA, 5000, world, tunnelPort, syn)).is("forwarded")
		b.fromPod(udp(podA, 5000, podB, tunnelPort)).is("delivered")
		for _, to := range []string{remote, beyond, native} {
			b.fromPod(udp(podA, 5000, to, tunnelPort)).is("forwarded")
		}
		b.fromUplink(udp(world, tunnelPort, podB, 53)).is("delivered")
		b.fromPod(udp(podB, 53, world, tunnelPort)).is("forwarded").flow("udp " + podB + ":53 > " + world + ":4789")
		b = newBed(t, f, withoutMasquerade)
		b.fromPod(udp(podA, 5000, world, tunnelPort)).is("forwarded").flow("udp " + podA + ":5000 > " + world + ":4789")
	})
}

// What a pod sends leaves in the tunnel as it was sent, with its DSCP, and ECN, on the outside.
func TestPodThroughTheTunnelOnTheWire(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		inEachFamily(t, func(t *testing.T, over family) {
			b := newBed(t, f)
			b.tunnelOver(over)
			b.attach(wire.ToTunnel, b.tunnel)
			b.attach(wire.FromPod, b.pods[podA].index)
			pod, far := b.linkTo("ecprpod0-p"), b.linkTo("ecprup-p")
			l := b.pods[podA]
			for to, tos := range map[string]uint8{beyond: 0xb8 | 1, node5IP: 0x28} {
				p := udp(podA, 5000, to, 53).with(func(p *packet) { p.tos, p.macTo, p.macFrom = tos, l.mac, l.peer })
				o := far.encapsulated("udp "+podA+":5000 > "+to+":53", func() { pod.send(p.bytes(f)) })
				o.is(t, over, tos, true)
				must(t, sumsValid(o.inner))
				if got := ttlAt.of(o.inner)[0]; got != 63 {
					t.Errorf("inner TTL %d, want 63", got)
				}
			}
			// ec_to_tunnel has passed them on with the key that they had.
			if got := b.counters(wire.ToTunnel)[traffic.Stack.String()].Packets; got == 0 {
				t.Error("nothing went through the tunnel device")
			}
		})
	})
}

package prog

import (
	"bytes"
	"net"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// configured are the ways in which what tunnels need must hold alike.
var configured = map[string][]option{"alone": nil, "beside netfilter": {besideNetfilter}, "without masquerading": {withoutMasquerade}}

// forwarded has the stack send a packet out of the first uplink that came in by that interface; 0 is the host itself.
func (b *bed) forwarded(p packet, from int) result {
	b.Helper()
	p.macTo, p.macFrom = b.uplink.peer, b.uplink.mac
	return b.run(wire.ToUplink, b.uplink.index, p.bytes(b.family), map[int]uint32{skbIngressIfindex: uint32(from)})
}

// What the stack forwards for a pod to a node behind the tunnel goes there, whatever kept it from a shorter way.
func TestStackForwardsIntoTheTunnel(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, options := range configured {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f, options...)
				l := b.pods[podA].index
				for _, p := range []packet{
					udp(podA, 5000, node5IP, 53), tcp(podA, 50000, node5IP, 80, syn), ping(podA, 7, node5IP), sctp(podA, node5IP),
					udp(podA, 5000, node5IP, 53).with(func(p *packet) { p.fragment = 100 }),
					udp(podA, 5000, node5IP, 53).with(func(p *packet) { p.ttl = 1 }), // the stack has counted the hop already
					udp(podA, 5000, node5IP, 53).with(func(p *packet) { p.options = true }),
					udp(podA, 5000, beyond, 53), // by somebody's route
				} {
					if r := b.forwarded(p, l).is("forwarded"); !bytes.Equal(r.in, r.frame) {
						t.Errorf("%s: changed to % x", describe(r.in), r.frame)
					}
				}
				b.forwarded(udp(podA, 5000, node5IP, 53), b.pods[podB].index).is("drop SPOOFED_SOURCE")
				for _, p := range []packet{udp(podA, 5000, remote, 53), udp(podA, 5000, node2IP, 53), udp(podA, 5000, native, 53), udp(nodeIP, 5000, node5IP, 53)} {
					b.leftToStack(describe(p.bytes(b.family)), b.forwarded(p, 0))
				}
				for _, to := range []string{node2IP, node5IP} {
					b.forwarded(udp(podA, 5000, to, tunnelPort), l).is("drop TUNNEL_PORT")
				}
				b.leftToStack("tunnel between pods", b.forwarded(udp(podA, 5000, remote, tunnelPort), l))
				b.empty()
			})
		}
	})
}

// Only the node itself sends to tunnels with its address. Its own outer packets are marked; of the others' it is known
// where they came in, whatever has given them its address.
func TestOnlyTheHostSendsToTunnels(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, options := range configured {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f, options...)
				for _, to := range []string{node2IP, node5IP, world} {
					for _, from := range []string{nodeIP, nodeOtherIP, tunnelIP} {
						p := udp(from, 50000, to, tunnelPort)
						b.forwarded(p, b.pods[podA].index).is("drop TUNNEL_PORT")
						b.forwarded(p, b.foreign.index).is("drop TUNNEL_PORT")
						b.forwarded(p.with(func(p *packet) { p.options = true }), b.foreign.index).is("drop TUNNEL_PORT")
						b.forwarded(p.with(func(p *packet) { p.fragment, p.id = moreFragments, 7 }), b.foreign.index).is("drop TUNNEL_PORT")
						b.forwarded(p.with(func(p *packet) { p.fragment, p.id = 1, 7 }), b.foreign.index).is("drop TUNNEL_PORT")
						b.leftToStack("the host's", b.forwarded(p, 0))
						b.leftToStack("another port", b.forwarded(udp(from, 40000, to, tunnelPort+1), b.foreign.index))
					}
					b.leftToStack("with its own address", b.forwarded(udp("172.17.0.2", 50000, to, tunnelPort), b.foreign.index))
					b.forwarded(udp(node2IP, 50000, to, tunnelPort), b.foreign.index).is("drop TUNNEL_PORT")
					b.leftToStack("by way of this node", b.forwarded(udp(node2IP, 50000, to, tunnelPort), b.other.index))
				}
				b.empty()
			})
		}
	})
}

// What other nodes send through the tunnel comes as their other packets do, whatever is inside.
func TestOuterPacketsComeByTheWayBack(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, options := range configured {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f, options...)
				b.bit(b.uplink, 0)
				b.bit(b.other, 1)
				must(t, b.destinations.Put(b.key(node2IP+"/32"),
					destinations.Value{Kind: destinations.Node, Node: b.addr(node2IP), Ifindex: uint32(b.uplink.index), Uplinks: 1}))
				p := udp(node2IP, 50000, nodeIP, tunnelPort)
				b.leftToStack("by the node's link", b.fromUplink(p))
				b.leftToStack("its first fragment", b.fromUplink(p.with(func(p *packet) { p.fragment, p.id = moreFragments, 6 })))
				b.leftToStack("a later one", b.fromUplink(p.with(func(p *packet) { p.fragment, p.id = 1, 6 })))
				if unknown := b.counters(wire.FromUplink)["drop FRAG_NOT_FOUND"]; unknown.Packets != 0 {
					t.Errorf("%d fragments are unknown", unknown.Packets)
				}
				for _, changed := range []packet{
					p, p.with(func(p *packet) { p.options = true }), p.with(func(p *packet) { p.fragment, p.id = moreFragments, 7 }),
					p.with(func(p *packet) { p.fragment, p.id = 1, 7 }),
				} {
					b.arrive(b.other, changed).is("drop WRONG_UPLINK")
				}
				for _, everybody := range []net.HardwareAddr{{255, 255, 255, 255, 255, 255}, {1, 0, 0x5e, 0, 0, 1}} {
					all := p.with(func(p *packet) { p.macTo = everybody })
					b.arrive(b.other, all).is("drop WRONG_UPLINK") // the kernel takes it as if it were for this host alone
					b.leftToStack("to all by the node's link", b.fromUplink(all))
				}
				b.leftToStack("to another host", b.arrive(b.other, p.with(func(p *packet) { p.macTo = net.HardwareAddr{2, 0, 0, 0, 0, 99} })))
				b.leftToStack("another port", b.arrive(b.other, udp(node2IP, 50000, nodeIP, tunnelPort+1)))
				b.leftToStack("the tunnel drops what is from no node", b.arrive(b.other, udp(world, 50000, nodeIP, tunnelPort)))
			})
		}
	})
}

// A flow may be older than the tunnel, and have the right to the port until then.
func TestOlderFlowToTheTunnelPort(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromPod(udp(podA, 5000, world, 53)).is("forwarded")
		own, err := b.snat.Get(b.tuple(wire.UDP, podA, 5000, world, 53))
		must(t, err)
		must(t, b.snat.Put(b.tuple(wire.UDP, podA, 5000, world, tunnelPort), own))
		b.fromPod(udp(podA, 5000, world, tunnelPort)).is("drop TUNNEL_PORT")
		b.toUplink(udp(podA, 5000, world, tunnelPort)).is("drop TUNNEL_PORT")
	})
}

// A node passes through the tunnel what it forwards for its pods, and nothing that others send in their names: the far end
// could not tell.
func TestOthersDoNotSendAsPodsThroughTheTunnel(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for _, pod := range []string{podA, podC} {
			p := udp(pod, 5000, beyond, 53)
			for _, from := range []int{b.uplink.index, b.foreign.index, b.pods[podB].index} {
				b.run(wire.ToTunnel, b.tunnel, p.bytes(b.family), map[int]uint32{skbIngressIfindex: uint32(from)}).is("drop SPOOFED_SOURCE")
			}
			b.run(wire.ToTunnel, b.tunnel, p.bytes(b.family), map[int]uint32{skbIngressIfindex: uint32(b.pods[pod].index)}).is("stack")
			b.toTunnel(p).is("stack")
		}
		b.empty()
	})
}

// Outer packets are no part of the port logic, though their source ports are from the range to masquerade to.
func TestOuterPacketsKeepTheirPorts(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		flow, err := b.reverse.Get(b.tuple(wire.UDP, nodeIP, 50000, world, 53))
		must(t, err)
		// As of a pod that has spoken to the port before it was the tunnel's.
		must(t, b.reverse.Put(b.tuple(wire.UDP, nodeIP, 50000, node5IP, tunnelPort), flow))
		b.leftToStack("leaving", b.forwarded(udp(nodeIP, 50000, node5IP, tunnelPort), 0))
		b.leftToStack("arriving", b.fromUplink(udp(node5IP, 50000, nodeIP, tunnelPort)))
	})
}

// The address of the tunnel device is the host's, whichever program meets it.
func TestTheTunnelDevicesAddress(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.leftToStack("from a pod", b.fromPod(udp(podA, 5000, tunnelIP, 53)))
		for _, from := range []string{remote, beyond, node2IP, world} {
			b.leftToStack("by an uplink, from "+from, b.fromUplink(udp(from, 5000, tunnelIP, 53)))
		}
		b.fromUplink(udp(tunnelIP, 5000, podA, 53)).is("drop SPOOFED_SOURCE")
		b.leftToStack("to the world", b.toUplink(udp(tunnelIP, 5000, world, 53)))
		b.leftToStack("to another node's pod", b.toUplink(udp(tunnelIP, 5000, remote, 53)))
		b.toTunnel(udp(tunnelIP, 5000, beyond, 53)).is("stack")
		b.fromTunnel(udp(beyond, 53, tunnelIP, 5000)).is("stack")
		b.empty()
	})
}

// A node that sends by tunnel and one that sends straight understand each other: each way is judged by itself.
func TestBothWaysAreTaken(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.comesFrom(node2IP, vni) // reached directly
		b.fromTunnel(udp(remote, 5000, podA, 53)).is("delivered")
		b.fromPod(udp(podA, 53, remote, 5000)).is("forwarded")
		b.fromUplink(udp(remote, 5000, podA, 53)).is("delivered")
		b.fromUplink(udp(beyond, 5000, podA, 53)).is("delivered") // behind the tunnel, for us
		b.fromUplink(udp(node5IP, 5000, podA, 53)).is("delivered")
		b.empty()
	})
}

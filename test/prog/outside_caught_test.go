package prog

import (
	"fmt"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// container is an address of a network of the host's own that is no pod's.
const container = "172.19.0.7"

// What the host's stack sends to a Service past every hook goes to a backend, and the stack gets the answer from the Service.
func TestCaught(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
			for end, want := range map[string]string{podB: "delivered", remote: "forwarded", beyond: "forwarded", node2IP: "forwarded", world2: "forwarded"} {
				for _, from := range []string{nodeIP, nodeOtherIP, container} {
					t.Run(fmt.Sprintf("%v %s to %s", proto, from, end), func(t *testing.T) {
						b := newBed(t, f, withServices)
						b.serve(vip, 80, proto, end+":8080").loadBalancer(external, 443, services.ExternalLocal)
						tellCaught(b, initial(proto, from, 50000, vip, 80), end, want)
						b.toUplink(initial(proto, from, 50000, external, 443)).is(want)
						b.count(2, 0)
						for k, v := range all(b, b.snat) {
							if v.Flags&flow.Host == 0 || v.Ifindex != 0 {
								t.Errorf("%v: %+v", k, v)
							}
						}
					})
				}
			}
		}
	})
}

// tellCaught has the host and a backend exchange packets.
func tellCaught(b *bed, p packet, end, want string) {
	b.Helper()
	for range 3 {
		r := b.toUplink(p).is(want).valid()
		if v := r.view(); v.dst != end || v.dport != 8080 || (want == "delivered" && (v.src != p.src || v.sport != p.sport)) {
			b.Fatalf("left as %v", v)
		}
		answered := map[bool]string{true: "delivered", false: "stack"}[end == podB || end == beyond]
		back := b.backFrom(end, r, p).is(answered).valid().flow(ends(p.proto, p.dst, p.dport, p.src, p.sport))
		if back.mark&mark == 0 {
			b.Error("an answer is not marked")
		}
	}
}

// backFrom is what a backend sends back to a packet as it left, wherever that seemed to come from.
func (b *bed) backFrom(end string, out result, p packet) result {
	b.Helper()
	v := out.view()
	r := p.replied().with(func(p *packet) {
		p.src, p.sport, p.dst, p.dport, p.seq, p.ack = v.dst, v.dport, v.src, v.sport, 5000, p.seq+1
		if p.proto == wire.TCP {
			p.flags = syn | ack
		}
	})
	return b.sentBack(end, end, r)
}

// Nothing leaves a node with the address of a Service.
func TestCaughtAndRefused(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		must(t, b.destinations.Put(f.key("10.96.0.0/16"), destinations.Value{Kind: destinations.Service}))
		b.serve(vip, 80, wire.UDP, nodeIP+":8080")
		b.toUplink(udp(nodeIP, 5000, vip2, 80)).is("drop NO_SERVICE")
		b.toUplink(packet{proto: 47, src: nodeIP, dst: vip2, raw: true, payload: make([]byte, 16)}).is("drop NO_SERVICE")
		b.toUplink(udp(nodeIP, 5000, vip, 80).with(func(p *packet) { p.fragment = 100 })).is("drop FRAG_NOT_FOUND")
		b.answers = true
		b.toUplink(udp(nodeIP, 5000, vip, 80)).is("drop NO_BACKEND").toldOutside(portUnreachable, 0) // its own stack is the backend
		b.empty()
		b.toUplink(tcp(nodeIP, 5000, vip, 81, syn)).is("drop NO_SERVICE_PORT").refuses(0, 1001, rst|ack)
		b.toUplink(udp(nodeIP, 5000, vip, 81)).is("drop NO_SERVICE_PORT").toldOutside(portUnreachable, 0)
		b.toUplink(ping(nodeIP, 7, vip)).is("answered").turned(ping(nodeIP, 7, vip).replied())
		b.toUplink(packet{proto: 47, src: nodeIP, dst: vip, raw: true, payload: make([]byte, 16)}).is("drop NO_SERVICE_PORT")
		b.answers = false
		b.leftToStack("another node's", b.toUplink(tcp(nodeIP, 5000, node2IP, 30080, syn)))
		b.leftToStack("the world's", b.toUplink(tcp(nodeIP, 5000, world, 80, syn)))
	})
}

// The stack would take no answer from an address of the node's own, so nothing is served that leaves to one.
func TestNothingCaughtToTheNodeItself(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
			b.serve(vip, 80, proto, remote+":8080").nodePort(30080, 0).loadBalancer(nodeOtherIP, 443, 0)
			for _, from := range []string{nodeIP, container, world2} {
				b.leftToStack("a NodePort", b.toUplink(initial(proto, from, 5000, nodeIP, 30080)))
				b.leftToStack("a load balancer's address", b.toUplink(initial(proto, from, 5000, nodeOtherIP, 443)))
			}
		}
		b.empty()
	})
}

// What the host asks from a port on which a Service answers is answered to the host; others who ask that port get the Service.
func TestHostOnANodePort(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		for _, port := range []uint16{30053, 50053} {
			b.serve(vip, 53, wire.UDP, podB+":53").nodePort(port, 0)
			b.serve(vip, 53, wire.TCP, podB+":53").nodePort(port, 0)
			for _, proto := range []wire.Protocol{wire.UDP, wire.TCP} {
				p := initial(proto, nodeIP, port, world, 53)
				b.leftToStack("a question", b.toUplink(p))
				for range 2 {
					r := p.replied()
					r.flags = syn | ack
					b.leftToStack("its answer", b.fromUplink(r))
				}
				b.fromUplink(initial(proto, world, 54, nodeIP, port)).is("delivered")
			}
		}
		b.toUplink(udp(nodeIP, 30054, world, 53)).is("stack")
		b.count(6, 0)
	})
}

// However much it asks from there, others have three tenths of the table.
func TestHostOnANodePortFillsNoTable(t *testing.T) {
	b := newBed(t, inIPv4, withServices, withTables(64, 64))
	b.serve(vip, 53, wire.UDP, podB+":53").nodePort(30053, 0)
	for port := range uint16(64) {
		b.leftToStack("a question", b.toUplink(udp(nodeIP, 30053, world, 1000+port)))
	}
	b.count(45, 0)
	for port := range uint16(8) {
		b.fromPod(udp(podA, 5000+port, world, 53)).is("forwarded")
	}
}

// What the host has sent from there is no flow to a Service, though it goes to the same backend.
func TestHostOnANodePortBesideAService(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, withPorts(50053, 50054))
		b.serve(vip, 53, wire.UDP, world+":53").nodePort(50053, 0).nodePort(50054, 0)
		b.leftToStack("straight", b.toUplink(udp(nodeIP, 50053, world, 53)))
		b.toUplink(udp(nodeIP, 50053, vip, 53)).is("drop SNAT_EXHAUSTED")
		b.count(1, 0)
	})
}

// What the stack sends on for others from such a port is not the node's, and holds no entry.
func TestOthersOnANodePort(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 53, wire.UDP, podB+":53").nodePort(30053, 0)
		for _, from := range []string{container, world2} {
			for range 2 {
				b.leftToStack("from "+from, b.toUplink(udp(from, 30053, world, 53)))
			}
		}
		b.empty()
	})
}

// Errors about what has been caught reach the stack, about what that has sent; they make no backend of the host.
func TestCaughtErrors(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for end, want := range map[string]string{podB: "delivered", remote: "forwarded", beyond: "forwarded", node2IP: "forwarded", world2: "forwarded"} {
			t.Run(end, func(t *testing.T) {
				b := newBed(t, f, withServices)
				b.serve(vip, 80, wire.UDP, end+":8080")
				p := udp(nodeIP, 50000, vip, 80).with(func(p *packet) { p.payload = make([]byte, 64) })
				out := b.toUplink(p).is(want)
				e := icmpError(end, out.view().src, 3, 3, out.frame, 20)
				answered := map[bool]string{true: "delivered", false: "stack"}[end == podB || end == beyond]
				checkError(t, "from "+end, b.sentBack(end, end, e).is(answered), e, vip, nodeIP, p.flowOf())
				if v, err := b.devices.Get(devices.Key{}); err != nil || v.Flags&devices.Backend != 0 {
					t.Errorf("the host is %v, error %v", v.Flags, err)
				}
			})
		}
	})
}

// What has been caught and does not fit is refused as the packet that the stack knows, also beside netfilter.
func TestCaughtTooBig(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, with := range []option{besideNetfilter, func(*config.NodeConfig) {}} {
			b := newBed(t, f, withServices, with)
			b.answers = true
			b.serve(vip, 80, wire.UDP, beyond+":8080")
			large := f.whole(udp(nodeIP, 5000, vip, 80)).with(func(p *packet) { p.payload = make([]byte, tunnelMTU-f.header()-8+1) })
			b.toUplink(large).is("drop TOO_BIG").toldOutside(kind{3, 4}, tunnelMTU)
		}
	})
}

// Nobody resets a connection of the host's own whose port a pod's flow has: it goes on when that has ended.
func TestHostIsNotReset(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.answers = true
		b.fromPod(tcp(podA, 50000, world, 80, syn)).is("forwarded")
		if r := b.toUplink(tcp(nodeIP, 50000, world, 80, ack)).is("drop NO_MAPPING"); r.answered() {
			t.Error("the host is answered")
		}
	})
}

// Anybody may have a Service claim an address of somebody else's. What the host and pods have with that goes on.
func TestClaimedAddress(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, claimed := range []string{node2IP, world} {
			b := newBed(t, f, withServices)
			for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
				b.serve(vip, 80, proto, podB+":8080").loadBalancer(claimed, 6443, 0)
			}
			b.answers = true
			b.leftToStack("a connection", b.toUplink(tcp(nodeIP, 40000, claimed, 6443, ack)))
			b.leftToStack("its end", b.toUplink(tcp(nodeIP, 40000, claimed, 6443, ack|fin)))
			b.leftToStack("an answer", b.toUplink(tcp(nodeIP, 443, claimed, 6443, syn|ack)))
			b.openUDP(nodeIP, 51820)
			b.leftToStack("a datagram of a socket", b.toUplink(udp(nodeIP, 51820, claimed, 6443)))
			b.empty()
			b.toUplink(tcp(nodeIP, 40000, claimed, 6443, syn)).is("delivered")
			b.toUplink(udp(nodeIP, 40000, claimed, 6443)).is(map[string]string{world: "delivered", node2IP: "stack"}[claimed])
		}
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.TCP, podB+":8080").loadBalancer(remote, 40000, 0)
		b.fromPod(tcp(podA, 8080, remote, 40000, syn|ack)).is("forwarded").flow(ends(wire.TCP, podA, 8080, remote, 40000))
		b.fromPod(tcp(podA, 8080, remote, 40000, ack)).is("forwarded").flow(ends(wire.TCP, podA, 8080, remote, 40000))
		b.openUDP(nodeIP, 51821)
		b.serve(vip, 53, wire.UDP, podB+":53")
		b.toUplink(udp(nodeIP, 51821, vip, 53)).is("delivered") // a ClusterIP is nobody else's
	})
}

// Nor does such a Service get what answers datagrams of the host's or of pods', which nothing but their ports tells from questions.
func TestAnswersAtClaimedAddresses(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		s := b.serve(vip, 53, wire.UDP, podC+":53").also(nodeIP, 123, 0)
		for _, claimed := range []string{remote, beyond, node2IP, world} {
			s.loadBalancer(claimed, 40000, 0)
		}
		b.toUplink(udp(nodeIP, 123, world, 123)).is("stack")
		b.leftToStack("what the host has asked from that port", b.fromUplink(udp(world, 123, nodeIP, 123)))
		b.fromUplink(udp(world2, 123, nodeIP, 123)).is("delivered")

		for i, from := range []string{world, beyond, podB} {
			port := 40000 + uint16(i)
			s.also(nodeIP, port, 0)
			b.dialUDPFrom(nodeIP, int(port), from, 53)
			for sport, want := range map[uint16]string{53: "stack", 54: "delivered"} {
				b.sentBack(from, from, udp(from, sport, nodeIP, port)).is(want)
			}
		}
		for _, to := range []string{remote, beyond, node2IP} {
			b.fromPod(udp(podA, 53, to, 40000)).is("forwarded").flow(ends(wire.UDP, podA, 53, to, 40000))
		}
		b.fromUplink(udp(world, 40000, podA, 53)).is("delivered")
		b.fromPod(udp(podA, 53, world, 40000)).is("forwarded").flow(ends(wire.UDP, podA, 53, world, 40000))
		b.fromPod(udp(podA, 54, world, 40000)).is("delivered")
	})
}

// A connection to an address of the node's that a Service claims, and where no NodePort answers, goes on.
func TestConnectionsToAClaimedAddress(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 22, wire.TCP, podC+":22").loadBalancer(nodeOtherIP, 22, 0)
		b.leftToStack("a segment", b.fromUplink(tcp(world, 5000, nodeOtherIP, 22, ack)))
		b.fromUplink(tcp(world, 5001, nodeOtherIP, 22, syn)).is("delivered")
	})
}

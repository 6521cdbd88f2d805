package prog

import (
	"fmt"
	"io"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Whoever asks a host port, on one address of the node or on any, talks to the pod, which sees who asks, and hears from the
// address that it has asked.
func TestHostPort(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
			for _, at := range []string{nodeIP, anyOwn} {
				for _, pod := range []string{podB, podC} {
					for _, client := range outsiders {
						t.Run(fmt.Sprintf("%v %s to %s of %s", proto, client, at, pod), func(t *testing.T) {
							b := newBed(t, f, withServices)
							b.hostPort(at, 80, proto, pod)
							tellNodePort(b, initial(proto, client, 5000, nodeIP, 80), pod, "delivered")
							b.hostPort(at, 53, proto, pod)
							p := initial(proto, podA, 5000, nodeIP, 53)
							b.back(b.fromPod(p).is("delivered").flow(ends(proto, podA, 5000, pod, 8080)), p).is("delivered").flow(ends(proto, nodeIP, 53, podA, 5000))
						})
					}
				}
			}
		}
	})
}

// A pod asks its own host port as if somebody else had it.
func TestHostPortOfItself(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
			b := newBed(t, f, withServices)
			b.hostPort(anyOwn, 80, proto, podA)
			p := initial(proto, podA, 5000, nodeIP, 80)
			r := b.fromPod(p).is("delivered")
			if v := r.view(); v.src != nodeIP || v.dst != podA || v.dport != 8080 {
				t.Errorf("came as %v", v)
			}
			b.back(r, p).is("delivered").flow(ends(proto, nodeIP, 80, podA, 5000))
		}
	})
}

// SCTP has host ports too: its ports stay as they are, since its sum covers them.
func TestHostPortOfSCTP(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		k := b.hostPortKey(anyOwn, 80, sctpProto)
		b.hostPort(anyOwn, 80, sctpProto, podB)
		v, err := b.hostPorts.Get(k)
		must(t, err)
		v.PodPort = wire.PortFrom(80)
		must(t, b.hostPorts.Put(k, v))
		p := sctp(world, nodeIP).with(func(p *packet) { copy(p.payload, []byte{0x13, 0x88, 0, 80}) })
		if v := b.fromUplink(p).is("delivered").view(); v.dst != podB {
			t.Errorf("came as %v", v)
		}
	})
}

// Of what an address has on one port the more specific comes first: a Service's own, a socket bound to that address, the host
// port of it, that of all addresses; and that before a NodePort, which has come later.
func TestHostPortOrder(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
			b := newBed(t, f, withServices)
			port := uint16(5000)
			want := func(what, pod string) {
				t.Helper()
				port++
				for _, ask := range []func(packet) result{b.fromUplink, func(p packet) result { p.src = podA; return b.fromPod(p) }} {
					p := initial(proto, world, port, nodeIP, 80)
					if r := ask(p); pod == "" {
						b.leftToStack(what, r)
					} else if r.is("delivered"); r.view().dst != pod {
						t.Errorf("%v: %s: came as %v", proto, what, r.view())
					}
				}
			}
			want("nothing", "")
			b.serve(vip, 80, proto, podB+":8080").nodePort(80, 0)
			want("a NodePort", podB)
			b.hostPort(anyOwn, 80, proto, podC)
			want("before it, the host port of all addresses", podC)
			must(t, b.services.Delete(services.NodePort(f.Family, wire.PortFrom(80), proto)))
			all := b.occupy(proto, "0.0.0.0", 80)
			want("of which a socket on all addresses is none", podC)
			must(t, all.Close())
			b.hostPort(nodeIP, 80, proto, podB)
			want("before that, the host port of the address", podB)
			b.occupy(proto, nodeIP, 80)
			want("but a socket on this address has it", "")
			must(t, b.hostPorts.Delete(b.hostPortKey(nodeIP, 80, proto)))
			want("whatever else there is", "")
			b.serve(vip2, 80, proto, podC+":8080").also(nodeIP, 80, 0)
			want("and the Service's own", podC)
		}
	})
}

// occupy has a socket of the node hold a port.
func (b *bed) occupy(proto wire.Protocol, address string, port int) io.Closer {
	b.Helper()
	if proto == wire.UDP {
		return b.openUDP(address, port)
	}
	return listen(b, address, port)
}

// Host ports are at the node's own addresses alone: at no other node's, at no Service's, though the node holds it, at none of
// loopback, and at none that is another's port or protocol.
func TestHostPortElsewhere(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		const cache, loopback = "169.254.20.10", "127.0.0.1"
		b := newBed(t, f, withServices)
		b.serve(vip, 53, wire.UDP, podB+":53")
		must(t, b.services.Put(services.Key{Address: b.addr(vip)}, services.Value{Flags: services.ClusterIP | services.Own}))
		for _, at := range []string{anyOwn, nodeIP, node2IP, vip, cache, external} {
			b.hostPort(at, 80, wire.UDP, podC)
		}
		for what, p := range map[string]packet{
			"another port":     udp(world, 5000, nodeIP, 81),
			"another protocol": tcp(world, 5000, nodeIP, 80, syn),
			"amid a flow":      tcp(world, 5000, nodeIP, 80, ack),
			"link's own":       udp(world, 5000, cache, 80),
			"nobody's":         udp(world, 5000, external, 80),
		} {
			b.leftToStack(what, b.fromUplink(p))
		}
		b.answers = true
		b.fromUplink(udp(world, 5000, vip, 80)).is("drop NO_SERVICE_PORT")
		b.answers = false
		b.fromPod(udp(podA, 5000, node2IP, 80)).is("forwarded").flow(ends(wire.UDP, podA, 5000, node2IP, 80))
		if f == inIPv4 {
			b.hostPort(loopback, 80, wire.UDP, podC)
			if r := b.fromUplink(udp(world, 5000, loopback, 80)); r.what == "delivered" {
				t.Error("a host port of loopback is reached by the link")
			}
		}
	})
}

// A host port ends with its pod, whatever is left of it in the map: a connection is reset, the rest is the stack's. Its successor
// gets what begins, and the datagrams, from wherever they come.
func TestHostPortEnds(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for client, ask := range map[string]func(*bed, packet) result{world: (*bed).fromUplink, podA: (*bed).fromPod} {
			b := newBed(t, f, withServices)
			for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
				b.hostPort(anyOwn, 80, proto, podB)
			}
			question, open := udp(client, 5000, nodeIP, 80), tcp(client, 5000, nodeIP, 80, syn)
			amid := open.with(func(p *packet) { p.flags, p.seq = ack, p.seq+1 })
			b.back(ask(b, question).is("delivered"), question)
			b.back(ask(b, open).is("delivered"), open)
			ask(b, amid).is("delivered")
			b.deletePod(podB)
			b.leftToStack("a datagram", ask(b, question))
			b.answers = true
			ask(b, amid).is("drop BACKEND_GONE")
			b.answers = false
			b.leftToStack("a new connection", ask(b, open.with(func(p *packet) { p.sport = 5001 })))
			for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
				b.hostPort(anyOwn, 80, proto, podC)
			}
			for _, p := range []packet{question, open} {
				if v := ask(b, p).is("delivered").view(); v.dst != podC {
					t.Errorf("came as %v", v)
				}
			}
		}
	})
}

// Whoever gets the address of a pod that had a host port does not get what was for that.
func TestHostPortsSuccessor(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
			b := newBed(t, f, withServices)
			b.hostPort(anyOwn, 80, proto, podB)
			p := initial(proto, world, 5000, nodeIP, 80)
			b.fromUplink(p).is("delivered")
			b.giveAway(podB, podC)
			for _, p := range []packet{p, initial(proto, world, 5001, nodeIP, 80)} {
				b.leftToStack("a packet", b.fromUplink(p))
			}
		}
	})
}

// No flow is masqueraded to a host port; one that has it from before lives on; and what the host itself asks from there is answered to it.
func TestHostPortIsNoPortToMasqueradeTo(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, withPorts(50000, 50002))
		before := udp(podA, 50000, world, 53)
		b.fromPod(before).is("forwarded").flow(ends(wire.UDP, nodeIP, 50000, world, 53))
		b.hostPort(anyOwn, 50000, wire.UDP, podB)
		b.hostPort(nodeIP, 50001, wire.UDP, podB)
		b.back(b.fromPod(before).is("forwarded").flow(ends(wire.UDP, nodeIP, 50000, world, 53)), before).is("delivered").flow(ends(wire.UDP, world, 53, podA, 50000))
		b.fromPod(udp(podC, 50001, world, 53)).is("forwarded").flow(ends(wire.UDP, nodeIP, 50002, world, 53))
		b.turnedAway(udp(podB, 50002, world, 53), "drop SNAT_EXHAUSTED")
		for _, port := range []uint16{50000, 50001} {
			p := udp(nodeIP, port, world2, 53)
			b.leftToStack("a question", b.toUplink(p))
			b.leftToStack("its answer", b.fromUplink(p.replied()))
			b.fromUplink(udp(world2, 54, nodeIP, port)).is("delivered")
		}
	})
}

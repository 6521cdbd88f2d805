package prog

import (
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// asks has a client outside the node send a packet, by whichever program sees it first here.
func (b *bed) asks(p packet) result {
	b.Helper()
	if b.family.within(b.ip(p.src), "10.244.5.0/24") {
		return b.fromTunnel(p)
	}
	return b.fromUplink(p)
}

// initial is the first packet of a flow of a protocol.
func initial(proto wire.Protocol, src string, sport uint16, dst string, dport uint16) packet {
	if proto == wire.TCP {
		return tcp(src, sport, dst, dport, syn)
	}
	return udp(src, sport, dst, dport)
}

// outsiders are the clients that are no pod of the node.
var outsiders = []string{world, node2IP, remote, beyond}

// Whoever asks a NodePort, wherever the backend is: on this node it sees the client, elsewhere the node; and the client hears
// from the address that it has asked.
func TestNodePort(t *testing.T) {
	wants := map[string]string{
		podB: "delivered", podC: "delivered", nodeIP: "stack",
		remote: "forwarded", beyond: "forwarded", node2IP: "forwarded", node5IP: "forwarded", native: "forwarded", world2: "forwarded",
	}
	inEachFamily(t, func(t *testing.T, f family) {
		for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
			t.Run(proto.String(), func(t *testing.T) {
				b := newBed(t, f, withServices) // one for all: each story ends with empty tables
				port := uint16(30080)
				for end, want := range wants {
					b.serve(vip, port, proto, end+":8080").nodePort(port, 0)
					for _, client := range outsiders {
						t.Logf("%s to %s", client, end) // the last one is the one that fails
						tellNodePort(b, initial(proto, client, 5000, nodeIP, port), end, want)
						if t.Failed() {
							return
						}
					}
					port++
				}
			})
		}
	})
}

// tellNodePort has a client and a backend exchange packets.
func tellNodePort(b *bed, p packet, end, want string) {
	b.Helper()
	here := want != "forwarded"
	for range 3 {
		r := b.asks(p).is(want).valid()
		v := r.view()
		if v.dst != end || v.dport != 8080 {
			b.Fatalf("left as %v", v)
		}
		if here && (v.src != p.src || v.sport != 5000) {
			b.Errorf("the client is not kept: %v", v)
		}
		if source := map[string]string{world2: nodeOtherIP}[end]; !here && (v.sport < 49152 || v.src != max(source, nodeIP)) {
			b.Errorf("left as %v", v)
		}
		answered := map[bool]string{false: "forwarded", true: "stack"}[end == nodeIP]
		back := b.back(r, p).is(answered).valid().flow(ends(p.proto, p.dst, p.dport, p.src, p.sport))
		if back.mark&mark == 0 {
			b.Error("an answer is not marked")
		}
	}
	b.count(1, 0)
	forward, reverse := b.pair(b.family.tuple(p.proto, p.src, p.sport, p.dst, p.dport))
	if forward.Ifindex != 0 || forward.Flags&flow.Service == 0 || reverse.State&flow.Packet == 0 || (forward.Flags&flow.Counted == 0) != here {
		b.Errorf("halves %+v and %+v", forward, reverse)
	}
	world, err := b.devices.Get(devices.Key{})
	must(b, err)
	if world.SnatFlows != 1 {
		b.Errorf("the world holds %d flows", world.SnatFlows)
	}
	if n := b.sweep(0, 86401e9, false); n != 1 {
		b.Errorf("%d flows ended", n)
	}
	b.empty()
}

// An address is asked only on the ports that Services have there, and only as long as they have them.
func TestNodePortUnknown(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.answers = true
		b.serve(vip, 80, wire.TCP, podB+":8080").nodePort(30080, 0)
		for what, p := range map[string]packet{
			"another port":            tcp(world, 5000, nodeIP, 30081, syn),
			"another protocol":        udp(world, 5000, nodeIP, 30080),
			"the middle of something": tcp(world, 5000, nodeIP, 30080, ack),
			"a RST":                   tcp(world, 5000, nodeIP, 30080, rst),
			"a ping":                  ping(world, 7, nodeIP),
			"another kind of packet":  {proto: 47, src: world, dst: nodeIP, raw: true, payload: make([]byte, 16)},
			"an address of nobody":    tcp(world, 5000, external, 30080, syn),
			"another node's":          tcp(world, 5000, node2IP, 30080, syn),
		} {
			b.leftToStack(what, b.fromUplink(p))
		}
		b.leftToStack("by the tunnel", b.fromTunnel(udp(beyond, 5000, nodeIP, 30080)))
		b.empty()
		b.fromUplink(tcp(world, 5000, nodeOtherIP, 30080, syn)).is("delivered")
		must(t, b.services.Delete(services.Key{Address: b.addr(nodeOtherIP)}))
		b.leftToStack("not where NodePorts answer", b.fromUplink(tcp(world, 5001, nodeOtherIP, 30080, syn)))
	})
}

// Where an address of the node is also a Service's own, that port is the Service's; NodePorts and the rest stay the node's.
func TestExternalIPOfTheNode(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.TCP, podB+":8080").nodePort(30080, 0)
		b.serve(vip2, 80, wire.TCP, podC+":8081").also(nodeIP, 443, 0).also(nodeIP, 30080, 0)
		b.fromUplink(tcp(world, 5000, nodeIP, 443, syn)).is("delivered").flow(ends(wire.TCP, world, 5000, podC, 8081))
		b.fromUplink(tcp(world, 5001, nodeIP, 30080, syn)).is("delivered").flow(ends(wire.TCP, world, 5001, podC, 8081))
		b.fromUplink(tcp(world, 5000, nodeOtherIP, 30080, syn)).is("delivered").flow(ends(wire.TCP, world, 5000, podB, 8080))
		b.leftToStack("another port", b.fromUplink(tcp(world, 5000, nodeIP, 22, syn)))
		must(t, b.services.Put(services.Key{Address: b.addr(nodeIP)}, services.Value{Flags: services.Node | services.Own | services.Answers}))
		b.leftToStack("a ping", b.fromUplink(ping(world, 7, nodeIP)))
		b.leftToStack("a pod's ping", b.fromPod(ping(podA, 7, nodeIP)))
	})
}

// Addresses that no node has, and ClusterIPs, are asked from outside as well.
func TestLoadBalancer(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.TCP, podB+":8080").loadBalancer(external, 443, 0)
		for at, port := range map[string]uint16{external: 443, vip: 80} {
			p := tcp(world, 5000+port, at, port, syn)
			r := b.fromUplink(p).is("delivered").flow(ends(wire.TCP, world, 5000+port, podB, 8080))
			b.back(r, p).is("forwarded").flow(ends(wire.TCP, at, port, world, 5000+port))
			b.answers = true
			b.fromUplink(ping(world, 7, at)).is("answered").turned(ping(world, 7, at).replied())
			b.answers = false
		}
		b.answers = true
		b.fromUplink(tcp(world, 5000, vip, 81, syn)).is("drop NO_SERVICE_PORT")
		b.fromUplink(tcp(world, 5000, external, 443, ack)).is("drop NO_MAPPING")
	})
}

// What routers send to a load balancer's address and no Service takes is not sent back to them; what begins here, or comes from
// other networks of the node, is the world's.
func TestLoadBalancerSendsNothingBack(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.TCP, podB+":8080").loadBalancer(external, 443, 0)
		must(t, b.services.Put(services.Key{Address: b.addr(external)}, services.Value{})) // no port has endpoints
		for what, p := range map[string]packet{
			"another port":            tcp(world, 5000, external, 80, syn),
			"the middle of something": tcp(world, 5000, external, 80, ack),
			"another protocol":        udp(world, 5000, external, 443),
			"a ping":                  ping(world, 7, external),
			"another kind of packet":  {proto: 47, src: world, dst: external, raw: true, payload: make([]byte, 16)},
		} {
			b.leftToStack(what, b.fromUplink(p)) // whose own the address may be
			for _, l := range []veth{b.uplink, b.other} {
				b.forwarded(p, l.index).is("drop NO_SERVICE")
			}
			p.src = nodeIP
			b.leftToStack(what, b.forwarded(p, 0))
			p.src = container
			b.leftToStack(what, b.forwarded(p, b.foreign.index))
		}
		b.forwarded(tcp(world, 5000, external, 443, syn), b.uplink.index).is("delivered")
		for _, there := range []string{remote, node2IP} {
			b.serve(vip2, 80, wire.TCP, podB+":8080").loadBalancer(there, 443, 0)
			b.leftToStack("to who has the address", b.forwarded(tcp(world, 5000, there, 80, syn), b.uplink.index))
		}
		b.leftToStack("to the node", b.forwarded(tcp(world, 5000, nodeOtherIP, 80, syn), b.uplink.index))
		b.leftToStack("to others", b.forwarded(tcp(world, 5000, world2, 80, syn), b.uplink.index))
	})
}

// Whoever asks from outside gets the endpoints of this node where the external policy says so, other nodes' pods as well; this node's pods, all.
func TestExternalTrafficPolicyLocal(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		s := b.serve(vip, 80, wire.UDP, remote+":8080").nodePort(30080, services.ExternalLocal)
		b.fromUplink(udp(world, 5000, nodeIP, 30080)).is("drop NO_LOCAL_BACKEND")
		b.fromUplink(udp(node2IP, 5000, nodeIP, 30080)).is("drop NO_LOCAL_BACKEND")
		b.fromUplink(udp(remote, 5000, nodeIP, 30080)).is("drop NO_LOCAL_BACKEND")
		b.fromTunnel(udp(beyond, 5000, nodeIP, 30080)).is("drop NO_LOCAL_BACKEND")
		b.fromPod(udp(podA, 5000, nodeIP, 30080)).is("forwarded")
		b.fromUplink(udp(world, 5000, vip, 80)).is("forwarded")
		near := s.add(podB + ":8080")
		s.block(s.all, []uint32{near})
		for port := range uint16(20) {
			b.fromUplink(udp(world, 5000+port, nodeIP, 30080)).is("delivered").flow(ends(wire.UDP, world, 5000+port, podB, 8080))
		}
	})
}

// loadBalancerSourceRanges say who may ask, pods included; a NodePort of the same Service is everybody's.
func TestSourceRanges(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		s := b.serve(vip, 80, wire.UDP, podB+":8080").nodePort(30080, 0).loadBalancer(external, 443, services.Ranges)
		b.fromUplink(udp(world, 5000, external, 443)).is("drop SOURCE_RANGE")
		b.fromPod(udp(podA, 5000, external, 443)).is("drop SOURCE_RANGE")
		b.fromUplink(udp(world, 5000, nodeIP, 30080)).is("delivered")
		for _, name := range []string{world + "/32", podA + "/32"} {
			k := f.key(name)
			must(t, b.ranges.Put(services.RangeKey{PrefixLen: 32 + k.PrefixLen, Set: s.set, Source: k.Prefix}, services.Range{Set: s.set}))
		}
		b.fromUplink(udp(world, 5000, external, 443)).is("delivered")
		b.fromPod(udp(podA, 5000, external, 443)).is("delivered")
		b.fromUplink(udp(world2, 5000, external, 443)).is("drop SOURCE_RANGE")
	})
}

// Pods ask NodePorts of their own node as other Services, and those of other nodes there.
func TestNodePortAskedByPods(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.TCP, remote+":8080").nodePort(30080, 0)
		p := tcp(podA, 5000, nodeIP, 30080, syn)
		b.back(b.fromPod(p).is("forwarded").flow(ends(wire.TCP, podA, 5000, remote, 8080)), p).is("delivered").flow(ends(wire.TCP, nodeIP, 30080, podA, 5000))
		b.fromPod(tcp(podA, 5000, node2IP, 30080, syn)).is("forwarded").flow(ends(wire.TCP, podA, 5000, node2IP, 30080))
		b.fromUplink(tcp(node2IP, 30080, podA, 5000, syn|ack)).is("delivered")
		b.fromPod(tcp(podA, 5000, node5IP, 30080, syn)).is("forwarded")
		b.fromTunnel(tcp(node5IP, 30080, podA, 5000, syn|ack)).is("delivered").flow(ends(wire.TCP, node5IP, 30080, podA, 5000))
		for what, p := range map[string]packet{
			"another port":     tcp(podA, 5000, nodeIP, 22, syn),
			"an answer":        tcp(podA, 22, nodeIP, 30080, ack),
			"another protocol": udp(podA, 5000, nodeIP, 30080),
			"a later fragment": udp(podA, 5000, nodeIP, 53).with(func(p *packet) { p.fragment = 100 }),
			"a ping":           ping(podA, 7, nodeIP),
		} {
			b.leftToStack(what, b.fromPod(p))
		}
		b.count(1, 0)
	})
}

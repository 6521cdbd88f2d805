package prog

import (
	"fmt"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// yields leaves what is new to a Service of the family to kube-proxy.
func (b *bed) yields(f family) { b.configure(each(f, config.YieldsIPv4, config.YieldsIPv6)) }

// newYieldingBed is a node that still has kube-proxy's rules.
func newYieldingBed(t *testing.T, f family) *bed {
	t.Helper()
	b := newBed(t, f, withServices, besideNetfilter)
	b.answers = true
	b.yields(f)
	return b
}

// While kube-proxy has a family's Services, whatever may be new to one is netfilter's: also what has no backend, no port, or may not ask.
func TestYields(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newYieldingBed(t, f)
		b.serve(vip, 80, wire.TCP, podB+":8080").nodePort(30080, 0).loadBalancer(external, 443, services.Ranges).also(nodeOtherIP, 81, 0)
		b.serve(vip, 53, wire.UDP, podB+":53").nodePort(30053, services.ExternalLocal)
		b.declare(vip2, 80, wire.TCP, services.ClusterIP)
		for what, to := range map[string]packet{
			"a SYN":                      tcp(podA, 5000, vip, 80, syn),
			"a segment of no flow":       tcp(podA, 5000, vip, 80, ack),
			"a datagram":                 udp(podA, 5000, vip, 53),
			"a port that no Service has": tcp(podA, 5000, vip, 81, syn),
			"one without backends":       tcp(podA, 5000, vip2, 80, syn),
			"a ping":                     ping(podA, 7, vip),
			"another protocol":           sctp(podA, vip),
			"a NodePort":                 tcp(podA, 5000, nodeIP, 30080, syn),
			"without a local backend":    udp(podA, 5000, nodeIP, 30053),
			"out of its ranges":          tcp(podA, 5000, external, 443, syn),
			"an external IP of the node": tcp(podA, 5000, nodeOtherIP, 81, syn),
			"in a service CIDR":          udp(podA, 5000, "10.96.7.7", 53),
		} {
			b.leftToStack("from a pod: "+what, b.fromPod(to))
			for _, from := range []string{world, node2IP, remote} {
				to.src = from
				b.leftToStack("from "+from+": "+what, b.fromUplink(to))
			}
		}
		b.leftToStack("a fragment", b.fromPod(udp(podA, 5000, vip, 53).with(func(p *packet) { p.fragment = 100 })))
		b.leftToStack("by the tunnel", b.fromTunnel(tcp(beyond, 5000, nodeIP, 30080, syn)))
		b.leftToStack("the host's own", b.toUplink(tcp(nodeIP, 5000, external, 443, syn)))
		b.empty()
	})
}

// The other family's Services are served as ever.
func TestYieldsOneFamily(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newYieldingBed(t, f)
		b.yields(f.opposite())
		b.serve(vip, 80, wire.TCP, podB+":8080").nodePort(30080, 0)
		b.fromPod(tcp(podA, 5000, vip, 80, syn)).is("delivered")
		b.fromUplink(tcp(world, 5000, nodeIP, 30080, syn)).is("delivered")
		b.fromPod(tcp(podA, 5000, vip, 81, syn)).is("drop NO_SERVICE_PORT")
		b.fromPod(udp(podA, 5000, "10.96.7.7", 53)).is("drop NO_SERVICE")
		b.fromPod(ping(podA, 7, vip)).is("answered")
	})
}

// Flows that are known go on in both directions, whoever has opened them and wherever their backend is.
func TestYieldsNoFlow(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
			for end, want := range map[string]string{podB: "delivered", nodeIP: "stack", remote: "forwarded", beyond: "forwarded", world2: "forwarded"} {
				t.Run(fmt.Sprintf("%v to %s", proto, end), func(t *testing.T) {
					b := newYieldingBed(t, f)
					b.configure(0)
					b.serve(vip, 80, proto, end+":8080").nodePort(30080, 0)
					pods, outside := initial(proto, podA, 5000, vip, 80), initial(proto, world, 5000, nodeIP, 30080)
					fromHost := initial(proto, container, 5000, vip, 80)
					first := []view{b.fromPod(pods).view(), b.fromUplink(outside).is(want).view()}
					caught := end != nodeIP
					if caught {
						b.toUplink(fromHost).is(want)
					}
					b.yields(f)
					for range 2 {
						pods.flags, outside.flags, fromHost.flags = ack, ack, ack
						for i, r := range []result{b.fromPod(pods), b.fromUplink(outside).is(want)} {
							if v := r.view(); v.String() != first[i].String() {
								t.Errorf("left as %v, was %v", v, first[i])
							}
						}
						b.back(b.fromUplink(outside), outside).flow(ends(proto, nodeIP, 30080, world, 5000))
						if end != nodeIP && end != world2 { // whose answers to pods walk the stack
							b.back(b.fromPod(pods), pods).is("delivered").flow(ends(proto, vip, 80, podA, 5000))
						}
						if caught {
							b.backFrom(end, b.toUplink(fromHost).is(want), fromHost).flow(ends(proto, vip, 80, container, 5000))
						}
					}
				})
			}
		}
	})
}

// A flow ends as ever, and what comes after its end is netfilter's: a datagram whose backend answers no more, and a SYN on a pair
// that has ended.
func TestYieldsAtTheEnd(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for what, send := range map[string]func(*bed, packet) result{"pod": (*bed).fromPod, "outside": (*bed).fromUplink} {
			t.Run(what, func(t *testing.T) {
				b := newYieldingBed(t, f)
				b.configure(0)
				src := map[string]string{"pod": podA, "outside": world}[what]
				s, u := b.serve(vip, 80, wire.TCP, podB+":8080"), b.serve(vip, 53, wire.UDP, podB+":53")
				for port := range uint16(3) {
					send(b, tcp(src, 5000+port, vip, 80, syn)).is("delivered")
				}
				send(b, udp(src, 5000, vip, 53)).is("delivered")
				b.yields(f)
				u.stop()
				b.leftToStack("a datagram", send(b, udp(src, 5000, vip, 53)))
				b.count(3, 0)

				// One that the backend has refused.
				b.fromPod(tcp(podB, 8080, src, 5000, rst|ack).with(func(p *packet) { p.ack = 1001 }))
				b.leftToStack("a SYN after a RST", send(b, tcp(src, 5000, vip, 80, syn)))
				b.count(2, 0)
				s.swap(podC + ":8080")
				s.gone(1)
				send(b, tcp(src, 5001, vip, 80, ack)).is("delivered")
				b.deletePod(podB)
				send(b, tcp(src, 5001, vip, 80, ack)).is("drop BACKEND_GONE")
				b.leftToStack("a SYN after its backend", send(b, tcp(src, 5002, vip, 80, syn)))
				b.configure(0)
				send(b, tcp(src, 5003, vip, 80, syn)).is("delivered")
			})
		}
	})
}

// Host ports are pods' own, and served all the same, by their order: a Service's own frontend on the address comes first.
func TestYieldsNoHostPort(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newYieldingBed(t, f)
		for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
			b.hostPort(anyOwn, 80, proto, podB)
			b.hostPort(nodeIP, 443, proto, podB)
			b.hostPort(nodeIP, 444, proto, podB)
			b.serve(vip, 80, proto, podC+":8080").nodePort(80, 0).also(nodeIP, 444, 0)
			for _, port := range []uint16{80, 443} {
				for _, p := range []packet{initial(proto, world, 5000+port, nodeIP, port), initial(proto, beyond, 5000+port, nodeIP, port)} {
					b.back(b.asks(p).is("delivered").flow(ends(proto, p.src, p.sport, podB, 8080)), p).is("forwarded").flow(ends(proto, nodeIP, port, p.src, p.sport))
				}
				p := initial(proto, podA, 5000+port, nodeIP, port)
				b.back(b.fromPod(p).is("delivered").flow(ends(proto, podA, p.sport, podB, 8080)), p).is("delivered").flow(ends(proto, nodeIP, port, podA, p.sport))
			}
			b.leftToStack("the Service's own", b.fromUplink(initial(proto, world, 5000, nodeIP, 444)))
		}
		b.fromUplink(tcp(world, 6000, nodeIP, 80, syn)).is("delivered")
		b.deletePod(podB)
		b.fromUplink(tcp(world, 6000, nodeIP, 80, ack)).is("drop BACKEND_GONE")
	})
}

// What leaves with a ClusterIP as its destination netfilter was to translate, and has not. Nobody else could.
func TestYieldsAtTheUplink(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, known := range []bool{true, false} {
			b := newYieldingBed(t, f)
			if !known { // no ServiceCIDR says what the address is
				must(t, b.destinations.Delete(f.key("10.96.0.0/16")))
			}
			b.serve(vip, 80, wire.TCP, podB+":8080")
			for _, p := range []packet{tcp(podA, 5000, vip, 80, syn), tcp(nodeIP, 5000, vip, 80, syn), tcp(world, 5000, vip, 80, syn), udp(podA, 5000, vip, 81)} {
				if r := b.toUplink(p).is("drop NO_SERVICE"); r.answered() {
					t.Errorf("%s is answered", describe(r.in))
				}
			}
			b.toUplink(tcp(podA, 50000, world, 80, syn)).is("stack").flow(ends(wire.TCP, nodeIP, 50000, world, 80))
		}
	})
}

// A masqueraded flow to an address that is a Service's ends when Services are served, and not before.
func TestYieldsMasqueradedFlows(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newYieldingBed(t, f)
		b.serve(vip, 80, wire.TCP, podB+":8080").loadBalancer(external, 443, 0)
		must(t, b.destinations.Put(f.key(external+"/32"), destinations.Value{Kind: destinations.World}))
		p := tcp(podA, 50000, external, 443, syn)
		b.toUplink(p).is("stack").flow(ends(wire.TCP, nodeIP, 50000, external, 443))
		b.leftToStack("while it yields", b.fromPod(p))
		b.count(1, 0)
		b.configure(0)
		b.fromPod(p).is("delivered")
		b.count(1, 0)
	})
}

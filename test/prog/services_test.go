package prog

import (
	"fmt"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// ends is a flow of a protocol as text.
func ends(proto wire.Protocol, src string, sport uint16, dst string, dport uint16) string {
	return view{proto: proto, src: src, dst: dst, sport: sport, dport: dport}.String()
}

// back is what the far end sends back to a packet as it left, by whichever program sees it first.
func (b *bed) back(out result, p packet) result {
	b.Helper()
	v := out.view()
	r := p.replied()
	r.src, r.sport, r.dst, r.dport, r.seq, r.ack = v.dst, v.dport, v.src, v.sport, 5000, p.seq+1
	if p.proto == wire.TCP {
		r.flags = syn | ack
	}
	switch {
	case b.pods[r.src].index != 0:
		return b.fromPod(r)
	case r.src == nodeIP && b.family.within(b.ip(r.dst), "10.244.5.0/24"):
		return b.toTunnel(r)
	case r.src == nodeIP:
		return b.toUplink(r)
	case b.family.within(b.ip(r.src), "10.244.5.0/24"):
		return b.fromTunnel(r)
	default:
		return b.fromUplink(r)
	}
}

// A pod talks to a Service, wherever its backend is, and hears from the Service.
func TestServiceFlow(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
			for where, c := range map[string]struct{ end, what string }{
				"on this node":                    {podB, "delivered"},
				"on this node, outside its CIDR":  {podC, "delivered"},
				"on another node":                 {remote, "forwarded"},
				"on another node, by the tunnel":  {beyond, "forwarded"},
				"another node":                    {node2IP, "forwarded"},
				"what is never masqueraded":       {native, "forwarded"},
				"in the world, which masquerades": {world, "forwarded"},
			} {
				t.Run(fmt.Sprintf("%v %s", proto, where), func(t *testing.T) {
					b := newBed(t, f, withServices)
					b.serve(vip, 80, proto, c.end+":8080")
					p := udp(podA, 5000, vip, 80)
					if proto == wire.TCP {
						p = tcp(podA, 5000, vip, 80, syn)
					}
					flows := each(f, 1, 1)
					for range 3 {
						r := b.fromPod(p).is(c.what).valid()
						v := r.view()
						if v.dst != c.end || v.dport != 8080 {
							t.Fatalf("left as %v", v)
						}
						if c.end != world && (v.src != podA || v.sport != 5000) {
							t.Errorf("left as %v", v)
						}
						b.back(r, p).is("delivered").valid().flow(ends(proto, vip, 80, podA, 5000))
					}
					if c.end == world {
						flows = 2
					}
					b.count(flows, 0)
					forward, reverse := b.pair(f.tuple(proto, podA, 5000, vip, 80))
					if forward.State&flow.Packet == 0 || reverse.State&flow.Packet == 0 {
						t.Errorf("states %v and %v", forward.State, reverse.State)
					}
				})
			}
		}
	})
}

// Without the constant nothing of this is there.
func TestServicesOff(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		must(t, b.destinations.Delete(f.key("10.96.0.0/16")))
		b.serve(vip, 80, wire.TCP, podB+":8080")
		b.fromPod(tcp(podA, 50000, vip, 80, syn)).is("forwarded").flow(ends(wire.TCP, nodeIP, 50000, vip, 80))
	})
}

// Backends on the node itself are the stack's, which gets the packet as one to them.
func TestServiceOfTheHost(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 443, wire.TCP, nodeIP+":6443")
		b.fromPod(tcp(podA, 5000, vip, 443, syn)).is("stack").flow(ends(wire.TCP, podA, 5000, nodeIP, 6443)).valid()
		b.fromPod(tcp(podA, 5000, vip, 443, syn).with(func(p *packet) { p.ttl = 1 })).is("stack")
		b.count(1, 0)
	})
}

// Nobody on the way to a backend in the world knows the pod: that the TTL runs out here, only the program can say.
func TestServiceInTheWorldTTL(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.answers = true
		b.serve(vip, 443, wire.TCP, world+":6443")
		b.fromPod(tcp(podA, 5000, vip, 443, syn).with(func(p *packet) { p.ttl = 1 })).is("drop SERVICE_TTL")
		b.fromPod(tcp(podA, 5000, vip, 443, syn).with(func(p *packet) { p.ttl = 2 })).is("forwarded")
	})
}

// A pod that is its own backend hears its request from the Service, and its answer as well.
func TestServiceToItself(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, pod := range []string{podA, podC} {
			b := newBed(t, f, withServices)
			b.answers = true
			b.serve(vip, 80, wire.TCP, pod+":8080")
			p := tcp(pod, 5000, vip, 80, syn)
			for range 2 {
				b.fromPod(p).is("delivered").valid().flow(ends(wire.TCP, vip, 5000, pod, 8080))
				answer := tcp(pod, 8080, vip, 5000, syn|ack)
				b.fromPod(answer).is("delivered").valid().flow(ends(wire.TCP, vip, 80, pod, 5000))
			}
			b.fromPod(p.with(func(p *packet) { p.ttl = 1 })).is("drop SERVICE_TTL")
			b.fromPod(p.with(func(p *packet) { p.options = true })).is("drop SERVICE_OPTIONS")
			b.count(1, 0)
		}
	})
}

// What no Service has: refused at a ClusterIP, elsewhere left to whoever has the address.
func TestServiceUnknownPort(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.answers = true
		b.serve(vip, 80, wire.TCP, podB+":8080")
		b.declare(external, 80, wire.TCP, 0)
		b.fromPod(tcp(podA, 5000, vip, 81, syn)).is("drop NO_SERVICE_PORT")
		b.fromPod(udp(podA, 5000, vip, 80)).is("drop NO_SERVICE_PORT")
		b.fromPod(tcp(podA, 50000, external, 81, syn)).is("forwarded").flow(ends(wire.TCP, nodeIP, 50000, external, 81))
		b.fromPod(tcp(podA, 5000, external, 80, syn)).is("drop NO_BACKEND")
		b.count(1, 0)
	})
}

// What is in a range of Services' addresses and no frontend is nobody.
func TestServiceUnknownAddress(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.TCP, podB+":8080")
		must(t, b.destinations.Put(f.key("10.96.0.0/16"), destinations.Value{Kind: destinations.Service}))
		b.fromPod(tcp(podA, 5000, vip2, 80, syn)).is("drop NO_SERVICE")
		b.fromPod(ping(podA, 5000, vip2)).is("drop NO_SERVICE")
		b.fromPod(tcp(podA, 5000, vip, 80, syn)).is("delivered")
	})
}

// Without a backend, or a local one where only local ones count.
func TestServiceWithoutBackends(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.answers = true
		s := b.serve(vip, 53, wire.UDP)
		b.fromPod(udp(podA, 5000, vip, 53)).is("drop NO_BACKEND")
		must(t, b.services.Put(s.key, services.Value{Set: s.set, Flags: services.Local}))
		b.fromPod(udp(podA, 5000, vip, 53)).is("drop NO_BACKEND")
		far, near := s.add(remote+":53"), s.add(podB+":53")
		s.block([]uint32{far}, nil)
		b.fromPod(udp(podA, 5000, vip, 53)).is("drop NO_LOCAL_BACKEND")
		s.block([]uint32{far}, []uint32{near})
		for port := range uint16(20) {
			b.fromPod(udp(podA, 5000+port, vip, 53)).is("delivered").flow(ends(wire.UDP, podA, 5000+port, podB, 53))
		}
		// A pod that is gone before the agent knows.
		b.deletePod(podB)
		b.fromPod(udp(podA, 6000, vip, 53)).is("drop NO_BACKEND")
	})
}

// Many flows are spread over the backends evenly.
func TestServiceChoice(t *testing.T) {
	b := newBed(t, inIPv4, withServices)
	const flows = 1200
	b.serve(vip, 53, wire.UDP, remote+":1", remote+":2", remote+":3")
	count := make(map[uint16]int)
	for port := range uint16(flows) {
		count[b.fromPod(udp(podA, 5000+port, vip, 53)).is("forwarded").view().dport]++
	}
	for end, n := range count {
		if n < flows/3-120 || n > flows/3+120 { // more than seven standard deviations
			t.Errorf("%d of %d flows to the backend with port %d", n, flows, end)
		}
	}
	if len(count) != 3 {
		t.Errorf("%d backends were chosen", len(count))
	}
}

// UDP chooses anew as soon as its backend no longer serves; TCP goes on, and only a SYN chooses.
func TestServiceBackendServesNoMore(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.answers = true
		u, c := b.serve(vip, 53, wire.UDP, podB+":53"), b.serve(vip2, 80, wire.TCP, podB+":80")
		query, segment := udp(podA, 5000, vip, 53), tcp(podA, 5000, vip2, 80, syn)
		b.fromPod(query).is("delivered")
		b.back(b.fromPod(segment).is("delivered"), segment).is("delivered")
		b.fromPod(tcp(podA, 5001, vip2, 80, syn)).is("delivered") // nobody answers this one
		u.swap(remote + ":53")
		c.swap(remote + ":80")
		b.fromPod(query).is("forwarded").flow(ends(wire.UDP, podA, 5000, remote, 53))
		segment.flags = ack
		b.fromPod(segment).is("delivered").flow(ends(wire.TCP, podA, 5000, podB, 80))
		b.fromPod(tcp(podA, 5001, vip2, 80, syn)).is("forwarded").flow(ends(wire.TCP, podA, 5001, remote, 80))
		b.count(3, 0)
		u.stop()
		b.fromPod(query).is("drop NO_BACKEND")
		u.swap(podB + ":53")
		b.fromPod(query).is("delivered")
		u.swap()
		u.withdraw()
		b.fromPod(query).is("drop NO_SERVICE_PORT")
		b.fromPod(segment).is("delivered")
		// A connection that is closed, and another one from its port.
		segment.flags = fin | ack
		b.fromPod(segment).is("delivered")
		b.fromPod(tcp(podA, 5000, vip2, 80, syn)).is("forwarded").flow(ends(wire.TCP, podA, 5000, remote, 80))
		b.count(2, 0)
	})
}

// UDP goes on to a backend that no set names any more as long as that answers; what begins goes to another.
func TestServiceBackendAnswers(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		s := b.serve(vip, 53, wire.UDP, podB+":53").nodePort(30053, 0)
		old := s.all[0]
		query, outside := udp(podA, 5000, vip, 53), udp(world, 5000, nodeIP, 30053)
		b.fromPod(query).is("delivered")
		b.fromUplink(outside).is("delivered")
		s.swap(remote + ":53")
		s.linger(old)
		b.fromPod(query).is("delivered").flow(ends(wire.UDP, podA, 5000, podB, 53))
		b.fromUplink(outside).is("delivered").flow(ends(wire.UDP, world, 5000, podB, 53))
		b.fromPod(udp(podA, 5001, vip, 53)).is("forwarded").flow(ends(wire.UDP, podA, 5001, remote, 53))
		s.gone(old)
		s.linger(old) // another one, which has its number
		b.fromPod(query).is("forwarded").flow(ends(wire.UDP, podA, 5000, remote, 53))
		b.fromUplink(outside).is("forwarded")
	})
}

// TCP is reset once its backend is known to be gone.
func TestServiceBackendGone(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, c := range map[string]struct {
			end  string
			lose func(b *bed, s *served, sent result)
			want string
		}{
			"no endpoint here": {podB, func(b *bed, _ *served, _ result) { b.deletePod(podB) }, "drop BACKEND_GONE"},
			"no slice has it":  {remote, func(_ *bed, s *served, _ result) { s.gone(s.all[0]) }, "forwarded"},
			"no slice has it, nor any node": {remote, func(b *bed, s *served, _ result) {
				s.gone(s.all[0])
				must(b, b.destinations.Delete(b.key("10.244.2.0/24")))
			}, "drop BACKEND_GONE"},
			"its node says so": {remote, func(b *bed, _ *served, sent result) {
				b.fromUplink(icmpError(node2IP, podA, 3, 1, sent.frame, 8)).is("delivered")
			}, "drop BACKEND_GONE"},
			"another says so": {remote, func(b *bed, _ *served, sent result) {
				b.fromUplink(icmpError(gatewayIP, podA, 3, 1, sent.frame, 8)).is("delivered")
			}, "forwarded"},
		} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f, withServices)
				b.answers = true
				s := b.serve(vip, 80, wire.TCP, c.end+":8080")
				p := tcp(podA, 5000, vip, 80, syn)
				sent := b.fromPod(p)
				b.back(sent, p).is("delivered")
				c.lose(b, s, sent)
				p.flags = ack
				b.fromPod(p).is(c.want)
			})
		}
	})
}

// One port of a client to three Services of one backend and to the backend itself, in any order: four flows.
func TestServicesOfOneBackend(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, end := range []string{podB, remote, world} {
			for first := range 4 {
				t.Run(fmt.Sprintf("%s from %d", end, first), func(t *testing.T) {
					b := newBed(t, f, withServices)
					to := []string{vip, vip2, vip3, end}
					for _, v := range to[:3] {
						b.serve(v, 80, wire.UDP, end+":80")
					}
					for round := range 2 { // a datagram straight to the backend, of no socket, is known only from the second time on
						seen := make(map[uint16]string)
						for i := range to {
							p := udp(podA, 50000, to[(first+i)%4], 80)
							r := b.fromPod(p).valid()
							if v := r.view(); (seen[v.sport] != "" && round > 0) || v.dst != end {
								t.Errorf("to %s: left as %v, beside %v", p.dst, v, seen)
							} else {
								seen[v.sport] = p.dst
							}
						}
					}
					for i := range to {
						p := udp(podA, 50000, to[i], 80)
						b.back(b.fromPod(p), p).is("delivered").flow(ends(wire.UDP, to[i], 80, podA, 50000)).valid()
					}
				})
			}
		}
	})
}

// A pod's flow is no other's: the next owner of its address finds none.
func TestServiceGenerations(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.answers = true
		s := b.serve(vip, 80, wire.TCP, remote+":8080")
		p := tcp(podA, 5000, vip, 80, syn)
		r := b.fromPod(p).is("forwarded")
		b.giveAway(podA, podB)
		b.fromUplink(tcp(remote, 8080, podA, 5000, syn|ack)).is("delivered").flow(ends(wire.TCP, remote, 8080, podA, 5000))
		b.fromPodAt(podB, p.with(func(p *packet) { p.flags = ack })).is("drop NO_MAPPING")
		b.fromPodAt(podB, p).is("forwarded").flow(r.view().String())
		b.count(1, 0)
		// A number of a backend that another Service's has got.
		s.set1(s.all[0], func(v *backends.Value) { v.Set++ })
		b.fromPodAt(podB, p).is("drop NO_BACKEND")
	})
}

// A pair that is lost in part is restored by the other half, with both ends.
func TestServiceRestored(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.TCP, remote+":8080")
		p := tcp(podA, 5000, vip, 80, syn)
		b.back(b.fromPod(p), p)
		key := f.tuple(wire.TCP, podA, 5000, vip, 80)
		forward, _ := b.pair(key)
		must(t, b.reverse.Delete(reverseKey(key, forward)))
		b.age(2e9)
		p.flags = ack
		b.fromPod(p).is("forwarded")
		b.pair(key)
		must(t, b.snat.Delete(key))
		b.age(2e9)
		b.fromUplink(tcp(remote, 8080, podA, 5000, ack)).is("delivered").flow(ends(wire.TCP, vip, 80, podA, 5000))
		b.fromPod(p).is("forwarded")
		restored, _ := b.pair(key)
		if restored.FarAddress != forward.FarAddress || restored.Set != forward.Set || restored.Backend != forward.Backend || restored.Generation != forward.Generation {
			t.Errorf("restored %+v, was %+v", restored, forward)
		}
		b.count(1, 0)
	})
}

// Flows to Services end as masqueraded ones do, both halves at once.
func TestServiceLifetimes(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.TCP, remote+":8080")
		b.serve(vip, 53, wire.UDP, remote+":53")
		p := tcp(podA, 5000, vip, 80, syn)
		b.back(b.fromPod(p), p)
		b.fromPod(p.with(func(p *packet) { p.flags, p.ack = ack, 5001 }))
		u := udp(podA, 5000, vip, 53)
		b.fromPod(u)
		if n := b.sweep(0, 61e9, false); n != 1 {
			t.Errorf("after a minute %d flows went", n)
		}
		b.count(1, 0)
		if n := b.sweep(0, 86401e9, false); n != 1 {
			t.Errorf("after a day %d flows went", n)
		}
		b.empty()
	})
}

package prog

import (
	"bytes"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// away are backends, each by what becomes of a packet to it.
var away = map[string]string{podB: "delivered", nodeIP: "stack", remote: "forwarded", beyond: "forwarded", node2IP: "forwarded", world2: "forwarded"}

// Errors about what a client has sent reach it as if they were about that, whoever they come from; if from the backend, from
// the address that was asked.
func TestOutsideErrorsToClient(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
			for end, want := range away {
				t.Run(fmt.Sprintf("%v to %s", proto, end), func(t *testing.T) {
					b := newBed(t, f, withServices)
					b.serve(vip, 80, proto, end+":8080").nodePort(30080, 0)
					p := initial(proto, world, 5000, nodeIP, 30080).with(func(p *packet) { p.payload = bytes.Repeat([]byte{7}, 64) })
					out := b.fromUplink(p).is(want)
					for what, k := range icmpErrors {
						for _, beyond := range []int{8, 20, 1000} {
							for from, seen := range map[string]string{end: nodeIP, "192.0.2.1": "192.0.2.1"} {
								e := icmpError(from, out.view().src, k[0], k[1], out.frame, beyond)
								if from != end && want != "forwarded" {
									continue
								}
								answered := map[bool]string{true: "stack", false: "forwarded"}[end == nodeIP]
								checkError(t, what+" from "+from, b.sentBack(end, from, e).is(answered), e, seen, world, p.flowOf())
							}
						}
					}
					b.count(1, 0)
				})
			}
		}
	})
}

// sentBack has somebody on the way to a backend send a packet.
func (b *bed) sentBack(end, from string, p packet) result {
	b.Helper()
	switch {
	case b.pods[end].index != 0:
		return b.fromPod(p)
	case end == nodeIP:
		return b.toUplink(p)
	case from == beyond:
		return b.fromTunnel(p)
	}
	return b.fromUplink(p)
}

// Errors about what a Service has answered reach the backend, about what that has sent, from whom it knows.
func TestOutsideErrorsFromClient(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for end, want := range away {
			t.Run(end, func(t *testing.T) {
				b := newBed(t, f, withServices)
				b.serve(vip, 80, wire.UDP, end+":8080").nodePort(30080, 0)
				p := udp(world, 5000, nodeIP, 30080).with(func(p *packet) { p.payload = bytes.Repeat([]byte{7}, 64) })
				out := b.fromUplink(p).is(want)
				in := b.back(out, p)
				for what, k := range icmpErrors {
					for _, beyond := range []int{8, 20, 1000} {
						for _, from := range []string{world, "192.0.2.1"} {
							e := icmpError(from, nodeIP, k[0], k[1], in.frame, beyond)
							seen := from
							if want == "forwarded" || from == world {
								seen = out.view().src
							}
							checkError(t, what+" from "+from, b.fromUplink(e).is(want), e, seen, end, reversed(out.view()))
						}
					}
				}
			})
		}
	})
}

// Of errors about nothing of ours, the stack knows what they are worth; and of redirects.
func TestOutsideErrorsOfNobody(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.UDP, remote+":8080").nodePort(30080, 0)
		p := udp(world, 5000, nodeIP, 30080)
		out := b.fromUplink(p).is("forwarded")
		in := b.back(out, p)
		b.leftToStack("about another flow", b.fromUplink(icmpError(world, nodeIP, 3, 3, udp(nodeIP, 30080, world, 5001).bytes(f), 8)))
		b.leftToStack("to another address", b.fromUplink(icmpError(world, nodeOtherIP, 3, 3, in.frame, 8)))
		if f == inIPv4 {
			b.leftToStack("a redirect", b.fromUplink(icmpError(gatewayIP, nodeIP, 5, 1, in.frame, 8)))
		}
		b.fromUplink(icmpError(podA, nodeIP, 3, 3, in.frame, 8)).is("drop SPOOFED_SOURCE")
		b.fromPod(icmpError(podA, world, 3, 3, udp(world, 5000, podA, 8080).bytes(f), 8)).is("drop NO_MAPPING")
	})
}

// Fragments of questions and answers go the way of their datagrams.
func TestOutsideFragments(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for end, want := range away {
			t.Run(end, func(t *testing.T) {
				b := newBed(t, f, withServices)
				b.serve(vip, 53, wire.UDP, end+":5353").nodePort(30053, 0)
				p := udp(world, 5000, nodeIP, 30053).with(func(p *packet) { p.payload, p.id = bytes.Repeat([]byte("long"), 1000), 77 })
				if end == beyond && f == inIPv6 { // whose fragments do not fit the tunnel
					return
				}
				v := passed(b, p, b.fromUplink, want)
				if v.dst != end || v.dport != 5353 {
					t.Errorf("left as %v", v)
				}
				r := p.replied()
				r.src, r.sport, r.dst, r.dport = v.dst, v.dport, v.src, v.sport
				got := passed(b, r, func(p packet) result { return b.sentBack(end, end, p) }, map[bool]string{true: "stack", false: "forwarded"}[end == nodeIP])
				if got.String() != ends(wire.UDP, nodeIP, 30053, world, 5000) {
					t.Errorf("came back as %q", got)
				}
				lone := udp(world, 5000, nodeIP, 30053).with(func(p *packet) { p.fragment, p.id = 100, 78 })
				b.fromUplink(lone).is("drop FRAG_NOT_FOUND") // which the stack gets, as it may be its own
			})
		}
	})
}

// A flow takes no port of the node on which a Service answers, nor one of a socket or of a pod's flow.
func TestOutsidePorts(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, withPorts(50000, 50003))
		s := b.serve(vip, 80, wire.UDP, world+":53").nodePort(30080, 0)
		for _, taken := range []uint16{50000, 50002} {
			s.nodePort(taken, 0)
		}
		b.fromPod(udp(podA, 50001, world, 53)).is("forwarded").flow(ends(wire.UDP, nodeIP, 50001, world, 53))
		for range 2 {
			b.fromUplink(udp(world2, 5000, nodeIP, 30080)).is("forwarded").flow(ends(wire.UDP, nodeIP, 50003, world, 53))
		}
		b.fromUplink(udp(world2, 5001, nodeIP, 30080)).is("drop SNAT_EXHAUSTED")
		b.turnedAway(udp(podB, 5001, world, 53), "drop SNAT_EXHAUSTED")
		b.fromPod(udp(podB, 5001, "198.51.100.8", 53)).is("forwarded")
	})
}

// Two ways of one client to one backend of this node are two flows, and both get their answers.
func TestOutsideBesideStraightFlow(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for end, want := range map[string]string{podB: "delivered", nodeIP: "stack"} {
			b := newBed(t, f, withServices)
			b.serve(vip, 80, wire.UDP, end+":8080").nodePort(30080, 0)
			b.serve(vip2, 80, wire.UDP, end+":8080").nodePort(30081, 0)
			straight := udp(world, 5000, end, 8080)
			b.fromUplink(straight).is(want)
			seen := make(map[uint16]bool)
			for _, port := range []uint16{30080, 30081} {
				p := udp(world, 5000, nodeIP, port)
				r := b.fromUplink(p).is(want)
				if seen[r.view().sport] || (end == podB && r.view().sport == 5000) {
					t.Errorf("left as %v", r.view())
				}
				seen[r.view().sport] = true
				b.back(r, p).flow(ends(wire.UDP, nodeIP, port, world, 5000))
			}
			r := b.fromUplink(straight).is(want)
			if end == nodeIP && seen[r.view().sport] {
				t.Errorf("what goes straight to the backend has left as %v", r.view())
			}
			b.back(r, straight).flow(ends(wire.UDP, end, 8080, world, 5000))
		}
	})
}

// What goes straight to a pod from where its client has asked a Service is refused: the pod could not tell the two apart.
func TestOutsideStraightFlowBeside(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.UDP, podB+":8080").nodePort(30080, 0)
		b.fromUplink(udp(world, 5000, nodeIP, 30080)).is("delivered")
		b.fromUplink(udp(world, 5000, podB, 8080)).is("drop FLOW_COLLISION")
		b.fromUplink(udp(world, 5001, podB, 8080)).is("delivered")
		b.asks(udp(remote, 5000, nodeIP, 30080)).is("delivered")
		b.asks(udp(beyond, 5000, nodeIP, 30080)).is("delivered")
		b.asks(udp(remote, 5001, podB, 8080)).is("delivered")
	})
}

// Pods and nodes talk straight to backends: who asks a Service with their address stops none of that, nor turns an answer away.
func TestOutsideStraightFlowGoesFirst(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		for _, proto := range []wire.Protocol{wire.UDP, wire.TCP} {
			b.serve(vip, 80, proto, podB+":8080").nodePort(30080, 0)
			for _, client := range []string{remote, beyond, node2IP} {
				spoofed, straight := initial(proto, client, 5000, nodeIP, 30080), initial(proto, client, 5000, podB, 8080)
				for range 2 {
					b.asks(spoofed).is("delivered")
					b.back(b.asks(straight).is("delivered"), straight).is("forwarded").flow(ends(proto, podB, 8080, client, 5000))
				}
			}
		}
		spoofed := tcp(world, 5000, nodeIP, 30080, syn)
		b.fromUplink(spoofed).is("delivered")
		b.fromUplink(tcp(world, 5000, podB, 8080, syn)).is("delivered")
	})
}

// A ClusterIP is not for whom it is translated for elsewhere.
func TestOutsideClusterIPOfOtherNodes(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.UDP, podB+":8080", remote+":8080")
		for _, client := range []string{remote, node2IP} {
			b.fromUplink(udp(client, 5000, vip, 80)).is("drop SPOOFED_SOURCE")
		}
		b.empty()
	})
}

// A connection that its backend has ended leaves its tuple to one that goes straight to the pod.
func TestOutsideStraightFlowAfterwards(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, client := range []string{world, remote, beyond} {
			b := newBed(t, f, withServices)
			b.serve(vip, 80, wire.TCP, podB+":8080").nodePort(30080, 0)
			straight := tcp(client, 5000, podB, 8080, syn)
			p := tcp(client, 5000, nodeIP, 30080, syn)
			b.back(b.asks(p).is("delivered"), p).is("forwarded")
			b.asks(p.with(func(p *packet) { p.flags, p.seq, p.ack = ack, p.seq+1, 5001 })).is("delivered")
			b.asks(straight).is("drop FLOW_COLLISION")
			b.asks(p.with(func(p *packet) { p.flags, p.seq, p.ack = ack|fin, p.seq+1, 5001 })).is("delivered")
			b.asks(straight).is("drop FLOW_COLLISION") // anybody may have sent that
			b.fromPod(tcp(podB, 8080, client, 5000, ack|fin).with(func(p *packet) { p.seq, p.ack = 5001, 1002 })).is("forwarded")
			b.asks(straight).is("delivered")
			b.fromPod(tcp(podB, 8080, client, 5000, syn|ack)).is("forwarded").flow(ends(wire.TCP, podB, 8080, client, 5000))
		}
	})
}

// What a pod sends itself takes its own way, whatever its answers take.
func TestOutsideWayIsNoPath(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, withPaths(time.Second))
		b.serve(vip, 80, wire.UDP, podB+":8080").nodePort(30080, 0)
		b.fromUplink(udp(node5IP, 5000, nodeIP, 30080)).is("delivered")
		for range 2 {
			long := udp(podB, 8080, node5IP, 5000).with(func(p *packet) { p.payload = make([]byte, mtu-f.header()-8) })
			b.fromPod(f.whole(long)).is("forwarded").flow(ends(wire.UDP, nodeIP, 30080, node5IP, 5000))
			b.answers = true
			b.fromPod(f.whole(long).with(func(p *packet) { p.sport = 8081 })).is("drop TOO_BIG") // for the tunnel
			b.answers = false
		}
	})
}

// A datagram leaves a backend that serves no longer; a connection stays, and is reset once its backend is gone.
func TestOutsideBackendsChange(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.answers = true
		u := b.serve(vip, 53, wire.UDP, remote+":53").nodePort(30053, 0)
		c := b.serve(vip, 80, wire.TCP, podB+":80").nodePort(30080, 0)
		query, segment := udp(world, 5000, nodeIP, 30053), tcp(world, 5000, nodeIP, 30080, syn)
		b.fromUplink(query).is("forwarded")
		b.back(b.fromUplink(segment).is("delivered"), segment).is("forwarded")
		u.swap(podB + ":53")
		c.swap(remote + ":80")
		b.fromUplink(query).is("delivered").flow(ends(wire.UDP, world, 5000, podB, 53))
		segment.flags = ack
		b.fromUplink(segment).is("delivered").flow(ends(wire.TCP, world, 5000, podB, 80))
		b.count(2, 0)
		b.deletePod(podB)
		b.fromUplink(segment).is("drop BACKEND_GONE").refuses(2000, 0, rst)
		b.fromUplink(query).is("drop SERVICE_ROUTE")
		b.fromUplink(query).is("drop NO_BACKEND")
		b.fromUplink(tcp(world, 5000, nodeIP, 30080, syn)).is("forwarded")
		must(t, b.services.Delete(services.Key{Address: b.addr(anyOwn), Port: wire.PortFrom(30080), Proto: wire.TCP}))
		b.fromUplink(segment).is("forwarded")
	})
}

// Who is refused pushes out no record of others.
func TestOutsideAffinityOfTheRefused(t *testing.T) {
	b := newBed(t, inIPv4, withServices, withTables(64, 64))
	b.serve(vip, 53, wire.UDP, podB+":53").nodePort(30053, 0).keeps(60)
	for i := range 64 {
		b.fromUplink(udp("198.51.100."+strconv.Itoa(1+i), 5000, nodeIP, 30053))
	}
	if n := len(all(b, b.clients)); n != 56 {
		t.Errorf("%d clients keep a backend, want the 56 whose flows have room", n)
	}
}

// A client outside keeps its backend, if the Service asks for that, as long as it is told to.
func TestOutsideAffinity(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		s := b.serve(vip, 53, wire.UDP, remote+":1", remote+":2", remote+":3", remote+":4").nodePort(30053, 0).keeps(60)
		end := b.fromUplink(udp(world, 5000, nodeIP, 30053)).is("forwarded").view().dport
		for port := range uint16(20) {
			if got := b.fromUplink(udp(world, 6000+port, nodeIP, 30053)).is("forwarded").view().dport; got != end {
				t.Fatalf("port %d, was %d", got, end)
			}
		}
		for k, v := range all(b, b.clients) {
			if k.Client != b.addr(world) || k.Set != s.set {
				t.Errorf("%+v keeps %+v", k, v)
			}
			v.LastSeen = past(v.LastSeen, time.Minute)
			must(t, b.clients.Put(k, v))
		}
		others := 0
		for port := range uint16(20) {
			if b.fromUplink(udp(world, 7000+port, nodeIP, 30053)).view().dport != end {
				others++
			}
		}
		if others != 0 && others != 20 {
			t.Errorf("%d of 20 flows went elsewhere", others)
		}
	})
}

// Beside netfilter what opens a flow is ours.
func TestOutsideBesideNetfilter(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, besideNetfilter)
		for end, want := range away {
			b.serve(vip, 80, wire.TCP, end+":8080").nodePort(30080, 0).loadBalancer(external, 80, 0)
			p := tcp(world, 5000, nodeIP, 30080, syn)
			b.back(b.fromUplink(p).is(want), p).flow(ends(wire.TCP, nodeIP, 30080, world, 5000))
			b.sweep(0, 86401e9, false)
		}
	})
}

// Beside netfilter a flow is its own only if it translates it: it knows every flow that has passed the stack, also one from
// before the Service, and one that leaves the node untranslated.
func TestOutsideOfWhatNetfilterKnows(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, besideNetfilter)
		b.serve(vip, 80, wire.UDP, remote+":8080").nodePort(30080, 0)
		b.netfilterKnows(b.tuple(wire.UDP, world, 5000, nodeIP, 30080))
		b.fromUplink(udp(world, 5000, nodeIP, 30080)).is("forwarded")
		b.netfilterKnows(b.tuple(wire.UDP, nodeIP, 5000, vip, 80))
		b.toUplink(udp(nodeIP, 5000, vip, 80)).is("forwarded")
	})
}

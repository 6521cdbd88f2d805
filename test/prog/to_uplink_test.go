package prog

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Every verdict of ec_to_uplink on a packet that belongs to no flow; all are passed on but for two.
func TestToUplinkVerdicts(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for _, c := range []struct {
			name    string
			p       packet
			want    string
			touched bool
		}{
			{"pod to world", udp(podA, 5000, world, 53), "stack", true},
			{"pod to world, last hop", udp(podB, 5000, world, 53).with(func(p *packet) { p.ttl = 1 }), "stack", true},
			{"pod to world, IP options", udp(podB, 5001, world, 53).with(func(p *packet) { p.options = true }), "stack", true},
			{"pod to other node's pod", udp(podA, 5000, remote, 53), "stack", false},
			{"pod to other node", udp(podA, 5000, node2IP, 53), "stack", false},
			{"pod to native", udp(podA, 5000, native, 53), "stack", false},
			{"pod to multicast", udp(podA, 5000, nowhere, 53), "stack", false},
			{"pod to world, unknown protocol", packet{proto: 47, src: podA, dst: world, payload: make([]byte, 8)}, "drop UNKNOWN_PROTOCOL", true},
			{"pod to world, no flow", tcp(podA, 5000, world, 80, ack), "drop NO_MAPPING", true},
			{"nobody's pod address to world", udp(noPod, 5000, world, 53), "drop SPOOFED_SOURCE", false},
			{"nobody's pod address to native", udp(noPod, 5000, native, 53), "stack", false},
			{"node to world", udp(nodeIP, 5000, world, 53), "stack", false},
			{"node to world, a port of the range", udp(nodeIP, 50000, world, 53), "stack", false},
			{"node to pod", udp(nodeIP, 50000, remote, 53), "stack", false},
			{"node, unknown protocol", packet{proto: 47, src: nodeIP, dst: world, payload: make([]byte, 8)}, "stack", false},
			{"forwarded for others", udp("172.17.0.2", 50000, world, 53), "stack", false},
		} {
			b.answers = slices.Contains(answerable, c.want)
			r := b.toUplink(c.p)
			if r.what != c.want || bytes.Equal(r.in, r.frame) == c.touched {
				t.Errorf("%s: outcome %q, changed %v; want %q, %v", c.name, r.what, !bytes.Equal(r.in, r.frame), c.want, c.touched)
			}
		}
	})
}

// What carries our mark has been dealt with: not a byte of it is looked at, a pod's source included.
func TestToUplinkMarked(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for _, p := range []packet{udp(podA, 5000, world, 53), udp(noPod, 5000, world, 53), udp(nodeIP, 50000, world, 53)} {
			for _, other := range []uint32{0, 0x4000} {
				r := b.run(wire.ToUplink, b.uplink.index, p.bytes(b.family), map[int]uint32{skbMark: mark | other}).is("stack")
				if !bytes.Equal(r.in, r.frame) || r.mark != mark|other {
					t.Errorf("%s: changed, or mark %#x", describe(r.in), r.mark)
				}
			}
		}
		b.empty()
		// Others' bits are not ours.
		r := b.run(wire.ToUplink, b.uplink.index, udp(podA, 5000, world, 53).bytes(b.family), map[int]uint32{skbMark: 0x4000}).is("stack")
		if r.view().src != nodeIP {
			t.Error("a packet with another's mark left with the pod's address")
		}
	})
}

// A flow that the stack forwards stays with the stack, in both directions, whatever the shortcut could do.
func TestFlowViaStack(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, p := range map[string]packet{
			"TCP":  tcp(podA, 5000, world, 80, syn),
			"UDP":  udp(podA, 5000, world, 53),
			"ping": ping(podA, 5000, world),
		} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f)
				out := b.toUplink(p).is("stack").valid()
				if v := out.view(); v.src != nodeIP || v.sport < 49152 || v.ttl != 64 {
					t.Fatalf("left as %v with TTL %d", v, v.ttl)
				}
				for _, m := range []*snat.Map{b.snat, b.reverse} {
					for k, v := range all(b, m) {
						if v.Flags&^flow.Counted != flow.ViaStack {
							t.Errorf("%v: flags %v", k, v.Flags)
						}
					}
				}
				want := reversed(view{proto: p.proto, src: podA, dst: world, sport: p.sport, dport: p.dport})
				in := b.fromUplink(answer(out, p)).is("stack").flow(want).valid()
				if ttl := in.view().ttl; ttl != 64 {
					t.Errorf("the stack gets the reply with TTL %d", ttl)
				}
				next := p.with(func(p *packet) { p.flags = ack })
				b.fromPod(next).is("stack")
				b.toUplink(next).is("stack").flow(out.view().String()).valid()

				// Errors about it go the same way.
				e := b.fromUplink(icmpError("192.0.2.1", nodeIP, 3, 4, out.frame, 8)).is("stack")
				checkError(t, "from the world", e, icmpError("192.0.2.1", nodeIP, 3, 4, out.frame, 8), "192.0.2.1", podA, p.flowOf())
				own := icmpError(podA, world, 3, 3, in.frame, 8)
				b.fromPod(own).is("stack")
				if v := b.toUplink(own).is("stack").view(); v.src != nodeIP {
					t.Errorf("the pod's error left as %v", v)
				}
				b.count(1, 0)
			})
		}
	})
}

// A flow of the shortcut whose packet the stack had to take this once is still that flow.
func TestShortcutFlowMeetsStack(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := tcp(podA, 5000, world, 80, syn)
		out := b.fromPod(p).is("forwarded")
		odd := p.with(func(p *packet) { p.flags, p.options = ack, true })
		b.fromPod(odd).is("stack")
		b.toUplink(odd).is("stack").flow(out.view().String())
		b.fromUplink(answer(out, p)).is("delivered")
		b.count(1, 0)
	})
}

// A flow that the world opened and the stack carries keeps the pod's address.
func TestWorldsFlowViaStack(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromUplink(udp(world, 4000, podA, 53)).is("delivered")
		b.toUplink(udp(podA, 53, world, 4000)).is("stack").flow("udp " + podA + ":53 > " + world + ":4000")
		b.toUplink(udp(podA, 53, world, 4001)).is("stack").flow("udp " + nodeIP + ":" + port(b, podA, 53, 4001) + " > " + world + ":4001")
	})
}

// port is the one that a pod's UDP flow to the world was given.
func port(b *bed, pod string, sport, dport uint16) string {
	b.Helper()
	forward, _ := b.pair(b.tuple(wire.UDP, pod, sport, world, dport))
	return forward.ToPort.String()
}

// Without an address on the uplink nothing of a pod's leaves for the world.
func TestToUplinkWithoutAddress(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := udp(podA, 5000, world, 53)
		b.run(wire.ToUplink, b.bare.index, p.bytes(b.family), nil).is("drop NO_SNAT_ADDRESS")
		b.run(wire.ToUplink, b.foreign.index, p.bytes(b.family), nil).is("drop NO_SNAT_ADDRESS")
		b.empty()
	})
}

// A socket of the node that no lookup found sends from a port that a pod has: the node's flow gives way, and both get
// their replies.
func TestNodeFlowGivesWay(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, c := range map[string]struct{ pod, node packet }{
			"TCP":  {tcp(podA, 50000, world, 80, syn), tcp(nodeIP, 50000, world, 80, syn)},
			"UDP":  {udp(podA, 50000, world, 53), udp(nodeIP, 50000, world, 53)},
			"ping": {ping(podA, 50000, world), ping(nodeIP, 50000, world)},
		} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f)
				pods := b.fromPod(c.pod).is("forwarded")
				nodes := b.toUplink(c.node).is("stack").valid()
				if v := nodes.view(); v.src != nodeIP || v.sport == 50000 || v.sport < 49152 {
					t.Fatalf("the node's flow left as %v", v)
				}
				b.toUplink(c.node.with(func(p *packet) { p.flags = ack })).is("stack").flow(nodes.view().String()).valid()
				b.fromUplink(answer(nodes, c.node)).is("stack").flow(reversed(describeView(c.node))).valid()
				b.fromUplink(answer(pods, c.pod)).is("delivered").flow(reversed(describeView(c.pod))).valid()
				e := icmpError("192.0.2.1", nodeIP, 3, 4, nodes.frame, 8)
				checkError(t, "about the node's", b.fromUplink(e).is("stack"), e, "192.0.2.1", nodeIP, c.node.flowOf())
				b.count(2, 0)
			})
		}
	})
}

func describeView(p packet) view {
	return view{proto: p.proto, src: p.src, dst: p.dst, sport: p.sport, dport: p.dport}
}

// The node's fragments follow their first.
func TestNodeFlowGivesWayInFragments(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		var out []result
		for _, f := range fragmented(b, udp(nodeIP, 50000, world, 53).with(func(p *packet) { p.payload, p.id = make([]byte, 4000), 9 })) {
			out = append(out, b.toUplink(f).is("stack"))
		}
		whole := joined(b, out)
		must(t, sumsValid(whole))
		if v, err := read(whole); err != nil || v.sport == 50000 {
			t.Errorf("left as %v, %v", v, err)
		}
	})
}

// Another connection of the node, from a port that no pod has towards that destination, is left alone.
func TestNodeFlowLeftAlone(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		for _, p := range []packet{
			udp(nodeIP, 50000, world, 54), udp(nodeIP, 50000, world2, 53), udp(nodeIP, 50001, world, 53),
			udp(nodeOtherIP, 50000, world, 53), tcp(nodeIP, 50000, world, 53, syn),
		} {
			if r := b.toUplink(p).is("stack"); !bytes.Equal(r.in, r.frame) {
				t.Errorf("%s: was changed", describe(r.in))
			}
		}
		b.count(1, 0)
	})
}

// While builds change, two programs may stand behind each other: what the first has translated the second lets pass, both
// ways, as if it were not there.
func TestTwoProgramsBehindEachOther(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		again := func(d wire.Direction, r result) {
			t.Helper()
			second := b.run(d, b.uplink.index, r.frame, map[int]uint32{skbMark: r.mark}).is("stack")
			if !bytes.Equal(second.in, second.frame) {
				t.Errorf("%v: the second made of %s: %s", d, describe(second.in), describe(second.frame))
			}
		}
		for _, p := range []packet{tcp(podA, 50000, world, 80, syn), udp(podA, 5000, world, 53), ping(podA, 50000, world)} {
			out := b.toUplink(p).is("stack")
			again(wire.ToUplink, out)
			in := b.fromUplink(answer(out, p)).is("stack")
			again(wire.FromUplink, in)
			e := b.toUplink(icmpError(podA, world, 3, 3, in.frame, 8)).is("stack")
			again(wire.ToUplink, e)
			again(wire.FromUplink, b.fromUplink(icmpError(world, nodeIP, 3, 3, out.frame, 8)).is("stack"))
		}
		p := tcp(nodeIP, 50000, world, 80, syn)
		out := b.toUplink(p).is("stack")
		again(wire.ToUplink, out)
		again(wire.FromUplink, b.fromUplink(answer(out, p)).is("stack"))
		b.count(4, 0)
	})
}

// The port that the node's flow was given is no port for the node's next one either.
func TestNodeFlowGivesWayToNodeFlow(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		first := udp(nodeIP, 50000, world, 53)
		moved := b.toUplink(first).is("stack")
		second := udp(nodeIP, moved.view().sport, world, 53)
		out := b.toUplink(second).is("stack").valid()
		if out.view().sport == second.sport {
			t.Errorf("two flows of the node left as %v", out.view())
		}
		b.fromUplink(answer(moved, first)).is("stack").flow(reversed(describeView(first)))
		b.fromUplink(answer(out, second)).is("stack").flow(reversed(describeView(second)))
		b.count(3, 0)
	})
}

// The host's stack writes an error about an answer that was translated for it: the world reads of the packet that it sent.
func TestErrorOfTheStackAboutAnAnswer(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, p := range opened() {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f)
				out := b.toUplink(p).is("stack")
				back := answer(out, p).with(func(a *packet) { a.payload = p.payload })
				in := b.fromUplink(back).is("stack")
				before := all(b, b.snat)
				for what, kind := range icmpErrors {
					for _, beyond := range []int{8, 20, 1000} {
						e := icmpError(nodeIP, world, kind[0], kind[1], in.frame, beyond)
						e.rest = 1400
						r := b.toUplink(e).is("stack")
						checkError(t, fmt.Sprintf("%s, %d bytes", what, beyond), r, e, nodeIP, world, back.flowOf())
						if r.mark&mark == 0 {
							t.Error("another build's program would take it for one to translate")
						}
					}
				}
				same(t, before, all(b, b.snat))
			})
		}
	})
}

// The same for a flow of the node's that gave way to a pod's.
func TestErrorOfTheStackAboutItsOwnFlow(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		p := udp(nodeIP, 50000, world, 53)
		back := answer(b.toUplink(p).is("stack"), p)
		in := b.fromUplink(back).is("stack")
		e := icmpError(nodeIP, world, 3, 3, in.frame, 8)
		checkError(t, "port unreachable", b.toUplink(e).is("stack"), e, nodeIP, world, back.flowOf())
	})
}

// Errors about nothing that was translated leave as they are, and so does what others than the host quote.
func TestErrorsOfTheStackLeftAlone(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromUplink(udp(world, 4000, podA, 53)).is("delivered")
		p := udp(podA, 50000, world, 53)
		in := b.fromUplink(answer(b.fromPod(p).is("forwarded"), p)).is("delivered")
		for name, e := range map[string]packet{
			"the world's own flow": icmpError(nodeIP, world, 11, 0, udp(world, 4000, podA, 53).bytes(b.family), 8),
			"no flow":              icmpError(nodeIP, world, 3, 3, udp(world, 4000, nodeIP, 50007).bytes(b.family), 8),
			"quoted fragment":      icmpError(nodeIP, world, 11, 1, udp(world, 4000, nodeIP, 50007).with(func(p *packet) { p.fragment = 8 }).bytes(b.family), 8),
			"a container's":        icmpError("172.17.0.2", world, 3, 3, in.frame, 8),
		} {
			if r := b.toUplink(e); r.what != "stack" || !bytes.Equal(r.in, r.frame) {
				t.Errorf("%s: outcome %q, changed %v", name, r.what, !bytes.Equal(r.in, r.frame))
			}
		}
	})
}

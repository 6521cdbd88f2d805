package prog

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Errors about what a pod has sent to a Service reach it as if they were about that, whoever they come from.
func TestServiceErrorsToClient(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
			for _, end := range []string{podB, remote, world} {
				t.Run(fmt.Sprintf("%v %s", proto, end), func(t *testing.T) {
					b := newBed(t, f, withServices)
					b.serve(vip, 80, proto, end+":8080")
					p := udp(podA, 5000, vip, 80)
					if proto == wire.TCP {
						p = tcp(podA, 5000, vip, 80, syn)
					}
					p.payload = bytes.Repeat([]byte{7}, 64)
					out := b.fromPod(p).valid()
					for what, kind := range icmpErrors {
						for _, beyond := range []int{8, 20, 1000} {
							for from, seen := range map[string]string{end: vip, "192.0.2.1": "192.0.2.1"} {
								if end == podB && from != podB {
									continue
								}
								e := icmpError(from, out.view().src, kind[0], kind[1], out.frame, beyond)
								send := b.fromUplink
								if from == podB {
									send = b.fromPod
								}
								checkError(t, fmt.Sprintf("%s, %d bytes, from %s", what, beyond, from), send(e).is("delivered"), e, seen, podA, p.flowOf())
							}
						}
					}
				})
			}
		}
	})
}

// Errors of a pod about what a Service has answered reach the backend, about what that has sent.
func TestServiceErrorsFromClient(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for end, want := range map[string]string{podB: "delivered", remote: "forwarded", world: "forwarded"} {
			t.Run(end, func(t *testing.T) {
				b := newBed(t, f, withServices)
				b.serve(vip, 80, wire.UDP, end+":8080")
				p := udp(podA, 5000, vip, 80)
				p.payload = bytes.Repeat([]byte{7}, 64)
				out := b.fromPod(p)
				in := b.back(out, p).is("delivered")
				inner := reversed(out.view())
				for what, kind := range icmpErrors {
					for _, beyond := range []int{8, 20, 1000} {
						e := icmpError(podA, vip, kind[0], kind[1], in.frame, beyond)
						checkError(t, fmt.Sprintf("%s, %d bytes", what, beyond), b.fromPod(e).is(want), e, out.view().src, end, inner)
					}
				}
			})
		}
	})
}

// The errors of a pod to itself are about what it has received, in either direction.
func TestServiceErrorsToItself(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.UDP, podA+":8080")
		p := udp(podA, 5000, vip, 80)
		there := b.fromPod(p).is("delivered")
		e := icmpError(podA, vip, 3, 3, there.frame, 1000)
		checkError(t, "about the question", b.fromPod(e).is("delivered"), e, vip, podA, p.flowOf())
		back := udp(podA, 8080, vip, 5000)
		here := b.fromPod(back).is("delivered")
		e = icmpError(podA, vip, 3, 3, here.frame, 1000)
		checkError(t, "about the answer", b.fromPod(e).is("delivered"), e, vip, podA, back.flowOf())
	})
}

// Fragments go the way of their datagram, there and back, and those that nobody knows are the pod's to judge.
func TestServiceFragments(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for end, want := range map[string]string{podB: "delivered", remote: "forwarded", world: "forwarded"} {
			t.Run(end, func(t *testing.T) {
				b := newBed(t, f, withServices)
				b.serve(vip, 53, wire.UDP, end+":5353")
				p := udp(podA, 5000, vip, 53).with(func(p *packet) { p.payload, p.id = bytes.Repeat([]byte("long"), 1000), 77 })
				v := passed(b, p, b.fromPod, want)
				if v.dst != end || v.dport != 5353 {
					t.Errorf("left as %v", v)
				}
				r := p.replied()
				r.src, r.sport, r.dst, r.dport = v.dst, v.dport, v.src, v.sport
				send := b.fromUplink
				if end == podB {
					send = b.fromPod
				}
				if got := passed(b, r, send, "delivered").String(); got != ends(wire.UDP, vip, 53, podA, 5000) {
					t.Errorf("came back as %q", got)
				}
				if end != world { // there, it is nobody's
					last := fragmented(b, r.with(func(p *packet) { p.id++ }))[1]
					if got := send(last).is("delivered").view(); got.src != end {
						t.Errorf("a later fragment that nobody knows came from %s", got.src)
					}
				}
			})
		}
	})
}

// What is left to a pod's own checksums: datagrams that have none, and headers of SCTP.
func TestServiceWithoutChecksums(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 53, wire.UDP, remote+":5353")
		b.serve(vip2, 80, wire.Protocol(132), remote+":80")
		p := udp(podA, 5000, vip, 53).with(func(p *packet) { p.noSum = true })
		r := b.fromPod(p).is("forwarded").flow(ends(wire.UDP, podA, 5000, remote, 5353))
		if r.view().transportResidue() != "no checksum" {
			t.Error("a datagram without a checksum left with one")
		}
		s := packet{proto: 132, src: podA, dst: vip2, raw: true, payload: []byte{19, 136, 0, 80, 1, 2, 3, 4, 5, 6, 7, 8, 1, 0, 0, 4}}
		out := b.fromPod(s).is("forwarded")
		if v := out.view(); v.src != podA || v.dst != remote || !bytes.Equal(v.l4, s.payload) {
			t.Errorf("left from %s to %s with % x", v.src, v.dst, v.l4)
		}
		s.src, s.dst, s.payload[0], s.payload[1], s.payload[2], s.payload[3] = remote, podA, 0, 80, 19, 136
		if v := b.fromUplink(s).is("delivered").view(); v.src != vip2 || v.dst != podA || !bytes.Equal(v.l4, s.payload) {
			t.Errorf("came back from %s to %s with % x", v.src, v.dst, v.l4)
		}
		b.count(2, 0)
	})
}

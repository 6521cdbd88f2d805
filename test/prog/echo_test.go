package prog

import (
	"bytes"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// echoes says whether a request came back as its reply, which differs in its type, the addresses and what follows from them.
func (r result) echoes(p packet) bool {
	r.b.Helper()
	r.is("answered")
	l := r.b.pods[p.src]
	reply := p.replied()
	reply.macTo, reply.macFrom = l.peer, l.mac
	return bytes.Equal(r.frame, reply.bytes(r.b.family))
}

// A ping of a Service that has endpoints comes back at once, whatever its headers, and never leaves the node.
func TestEcho(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.TCP, remote+":8080")
		b.declare(external, 80, wire.TCP, services.Answers).swap(remote + ":8080")
		for _, to := range []string{vip, external} {
			p := ping(podA, 7, to)
			for name, p := range map[string]packet{
				"plain":           p,
				"odd":             p.with(func(p *packet) { p.payload = []byte("odd") }),
				"empty":           p.with(func(p *packet) { p.payload = nil }),
				"large":           p.with(func(p *packet) { p.payload = bytes.Repeat([]byte{0xff, 0xa5}, 700) }),
				"identifier 0":    p.with(func(p *packet) { p.sport = 0 }),
				"identifier ffff": p.with(func(p *packet) { p.sport = 0xffff }),
				"with options":    p.with(func(p *packet) { p.options = true }),
				"last hop":        p.with(func(p *packet) { p.ttl = 1 }),
				"behind headers":  chained(p, each(f, 0, 8)),
				"atomic fragment": p.with(func(p *packet) { p.atomic = f == inIPv6 }),
			} {
				if !b.fromPod(p).echoes(p) {
					t.Errorf("%s, to %s: no right reply", name, to)
				}
			}
		}
		b.empty()
	})
}

// So does one of 64 KiB, in as many fragments as it was sent in, from which the pod puts the reply together.
func TestEchoOfFragments(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.TCP, remote+":8080")
		p := ping(podA, 7, vip).with(func(p *packet) { p.payload, p.id = bytes.Repeat([]byte("0123456789abcde"), 4367), 77 })
		v := passed(b, p, b.fromPod, "answered")
		if v.src != vip || v.dst != podA || v.dport != 7 || !bytes.Equal(v.l4[8:], p.payload) {
			t.Errorf("came back as %v, with %d bytes", v, len(v.l4))
		}
		for _, piece := range fragmented(b, p)[1:] { // the same again, and of another datagram, whose first was not seen
			b.fromPod(piece).is("answered")
			b.fromPod(piece.with(func(p *packet) { p.id = 78 })).is("drop FRAG_NOT_FOUND")
		}
	})
}

// What is no request is not turned round, or two who think they are asked could go on for ever; nor is one that nobody would answer.
func TestNoEcho(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.TCP, remote+":8080")
		b.declare(vip2, 80, wire.TCP, services.ClusterIP)
		b.declare(external, 80, wire.TCP, 0).swap(remote + ":8080")
		b.answers = true
		pong := ping(podA, 7, vip).replied().with(func(p *packet) { p.src, p.dst = podA, vip })
		b.fromPod(pong).is("drop NO_SERVICE_PORT")
		for i, p := range fragmented(b, pong.with(func(p *packet) { p.payload, p.id = make([]byte, 4000), 80 })) {
			if r := b.fromPod(p).is("drop NO_SERVICE_PORT"); i > 0 && r.answered() {
				t.Error("a later fragment was answered")
			}
		}
		b.fromPod(packet{proto: wire.ICMP, src: podA, dst: vip, sport: 7, icmpType: 13}).is("drop NO_SERVICE_PORT")
		b.fromPod(ping(podA, 7, vip2)).is("drop NO_SERVICE_PORT").says(portUnreachable)
		b.answers = false
		b.fromPod(ping(podA, 7, external)).is("forwarded") // as if there were no Service
		b.fromPod(ping(podA, 7, vip).with(func(p *packet) { p.src = podB; p.macTo = nil })).is("answered")
		b.fromPodAt(podB, ping(podA, 7, vip)).is("drop SPOOFED_SOURCE")
	})
}

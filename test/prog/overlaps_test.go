package prog

import (
	"bytes"
	"slices"
	"testing"

	"github.com/gopacket/gopacket/layers"
)

// first and later are pieces of a datagram, of which nothing else is sent.
func first(p packet, id uint32) packet {
	p.fragment, p.id, p.payload = moreFragments, id, make([]byte, 24)
	return p
}

func later(p packet, id uint32) packet {
	p.fragment, p.id, p.payload = 4, id, make([]byte, 24)
	return p
}

// Two datagrams with one identification in turn, or two firsts of one: a later piece goes where the last first went, and never
// with another's translation.
func TestIdentificationUsedTwice(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromUplink(udp(world, 4000, podA, 53)).is("delivered")
		masqueraded, recorded := udp(podA, 50000, world, 53), udp(podA, 53, world, 4000)
		for range 2 {
			for p, src := range map[*packet]string{&masqueraded: nodeIP, &recorded: podA} {
				b.fromPod(first(recorded, 5)).is("forwarded")
				for _, piece := range []packet{first(*p, 5), later(*p, 5), later(*p, 5)} {
					if got := b.fromPod(piece).is("forwarded").view().src; got != src {
						t.Errorf("%s: left from %s, want %s", describe(piece.bytes(f)), got, src)
					}
				}
			}
		}
		b.fromPod(udp(podB, 50001, world, 53)).is("forwarded")
		for _, to := range []string{podA, podB, podA} {
			back := udp(world, 53, nodeIP, map[string]uint16{podA: 50000, podB: 50001}[to])
			for _, piece := range []packet{first(back, 5), later(back, 5)} {
				if got := b.fromUplink(piece).is("delivered").view().dst; got != to {
					t.Errorf("arrived at %s, want %s", got, to)
				}
			}
		}
	})
}

// A later piece that overlaps the header of the first changes what its receiver makes of the datagram, but not whose it is.
func TestFragmentOverlapsHeader(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := first(tcp(podA, 50000, world, 80, syn), 5)
		out := b.fromPod(p).is("forwarded")
		over := p.with(func(p *packet) { p.fragment, p.payload = moreFragments|1, bytes.Repeat([]byte{0xff}, 16) })
		v := b.fromPod(over).is("forwarded").view()
		if v.src != nodeIP || !bytes.Equal(v.l4, over.payload) {
			t.Errorf("left from %s as % x", v.src, v.l4)
		}
		back := first(answer(out, p), 6)
		b.fromUplink(back).is("delivered")
		over = back.with(func(p *packet) { p.fragment, p.payload = moreFragments|1, over.payload })
		v = b.fromUplink(over).is("delivered").view()
		if v.dst != podA || !bytes.Equal(v.l4, over.payload) {
			t.Errorf("came to %s as % x", v.dst, v.l4)
		}
		b.count(1, 0)
	})
}

// A first piece that ends inside the header has no ports, or no flags: where a program needs those, no piece passes.
func TestTinyFirstFragments(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		id := uint32(0)
		nodes := []string{nodeIP, node2IP, node5IP} // whose tunnel port is guarded
		for name, c := range map[string]struct {
			p     packet
			size  int
			needs func(w way) bool
		}{
			"TCP without flags":         {tcp("", 50000, "", 80, syn), 8, func(w way) bool { return w.masqueraded || w.src == world }},
			"TCP without its end":       {tcp("", 50000, "", 80, syn), 20, func(way) bool { return false }},
			"UDP without payload":       {udp("", 50000, "", 53), 8, func(way) bool { return false }},
			"UDP without anything":      {udp("", 50000, "", 53), 0, func(w way) bool { return w.masqueraded || w.src == world || slices.Contains(nodes, w.dst) }},
			"ping without payload":      {ping("", 50000, ""), 8, func(way) bool { return false }},
			"ping without anything":     {ping("", 50000, ""), 0, func(w way) bool { return !w.forwarded || w.masqueraded }},
			"unknown protocol, nothing": {packet{proto: 47}, 0, func(way) bool { return false }},
		} {
			for _, w := range ways {
				id++
				p := first(w.turned(c.p), id)
				whole, err := read(p.bytes(f))
				must(t, err)
				want, after := w.want, w.want
				switch {
				case c.p.proto == 47 && w.masqueraded:
					want, after = "drop UNKNOWN_PROTOCOL", "drop UNKNOWN_PROTOCOL"
				case c.needs(w):
					want = "drop INVALID"
					if w.masqueraded {
						after = "drop FRAG_NOT_FOUND"
					}
				}
				tiny := p.with(func(p *packet) { p.raw, p.payload = true, whole.l4[:c.size] })
				b.answers = slices.Contains(answerable, want)
				if r := w.by(b, tiny); r.what != want {
					t.Errorf("%s %s: outcome %q, want %q", name, w.name, r.what, want)
				}
				if r := w.by(b, later(p, p.id)); r.what != after {
					t.Errorf("%s %s: outcome %q of a later piece, want %q", name, w.name, r.what, after)
				}
			}
		}
	})
}

// No stack sends an ICMP error in pieces, and of a piece nobody can tell what it quotes: where errors are judged the first is
// dropped, and the rest is nobody's.
func TestFragmentedErrors(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for id, w := range ways {
			p := icmpError(w.src, w.dst, 3, 1, udp(w.dst, 53, w.src, 50000).bytes(f), 8)
			p.fragment, p.id = moreFragments, uint32(id)
			want, after := "drop INVALID", w.want
			if w.forwarded && !w.masqueraded {
				want = w.want
			}
			if w.masqueraded {
				after = "drop FRAG_NOT_FOUND"
			}
			if r := w.by(b, p); r.what != want {
				t.Errorf("%s: outcome %q, want %q", w.name, r.what, want)
			}
			if r := w.by(b, later(p, p.id)); r.what != after {
				t.Errorf("%s: outcome %q of a later piece, want %q", w.name, r.what, after)
			}
		}
		b.empty()
		out := b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		e := icmpError(world, nodeIP, 3, 1, out.frame, 8).with(func(p *packet) { p.fragment, p.id = moreFragments, 5 })
		b.fromUplink(e).is("drop INVALID")
		b.fromUplink(later(e, 5)).is("drop FRAG_NOT_FOUND") // which the stack gets
	})
}

// Of an ICMP message without an identifier nothing leaves, not even by the flow of a ping whose identifier is 0.
func TestFragmentedICMPOfAnUnknownKind(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := first(ping(podA, 0, world), 5)
		b.fromPod(p).is("forwarded")
		p.icmpType, p.id = layers.ICMPv4TypeTimestampRequest, 6
		b.turnedAway(p, "drop UNKNOWN_PROTOCOL")
		b.fromPod(later(p, 6)).is("drop FRAG_NOT_FOUND")
	})
}

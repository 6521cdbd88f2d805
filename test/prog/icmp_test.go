package prog

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// The errors that a flow may meet, by ICMP type and code.
var icmpErrors = map[string][2]uint8{
	"fragmentation needed": {3, 4},
	"host unreachable":     {3, 1},
	"port unreachable":     {3, 3},
	"time exceeded":        {11, 0},
	"parameter problem":    {12, 0},
}

// opened are first packets of flows of every kind that an error may be about.
func opened() map[string]packet {
	long := bytes.Repeat([]byte{7}, 64)
	return map[string]packet{
		"TCP":                  tcp(podA, 1024, world, 80, syn).with(func(p *packet) { p.payload = long }),
		"TCP, port kept":       tcp(podA, 50001, world, 80, syn).with(func(p *packet) { p.payload = long }),
		"UDP":                  udp(podA, 1024, world, 53).with(func(p *packet) { p.payload = long }),
		"UDP without checksum": udp(podA, 1024, world, 53).with(func(p *packet) { p.payload, p.noSum = long, true }),
		"ping":                 ping(podA, 1024, world).with(func(p *packet) { p.payload = long }),
	}
}

// A router or the server answers a masqueraded packet with an error: the pod gets it as if it were about the packet that
// it sent, to the last checksum, however much of it is quoted.
func TestICMPErrorFromWorld(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, p := range opened() {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f)
				out := b.fromPod(p).is("forwarded")
				for what, kind := range icmpErrors {
					for _, beyond := range []int{8, 20, 1000} {
						e := icmpError("192.0.2.1", nodeIP, kind[0], kind[1], out.frame, beyond)
						e.rest = 1400
						r := b.fromUplink(e).is("delivered")
						checkError(t, fmt.Sprintf("%s, %d bytes", what, beyond), r, e, "192.0.2.1", podA, p.flowOf())
					}
				}
			})
		}
	})
}

// The pod answers what reached it with an error: the world gets it as if the node had answered.
func TestICMPErrorFromPod(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, p := range opened() {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f)
				out := b.fromPod(p).is("forwarded")
				back := answer(out, p).with(func(a *packet) { a.payload = p.payload })
				in := b.fromUplink(back).is("delivered")
				for what, kind := range icmpErrors {
					for _, beyond := range []int{8, 20, 1000} {
						e := icmpError(podA, world, kind[0], kind[1], in.frame, beyond)
						r := b.fromPod(e).is("forwarded")
						checkError(t, fmt.Sprintf("%s, %d bytes", what, beyond), r, e, nodeIP, world, back.flowOf())
					}
				}
			})
		}
	})
}

// flowOf is the flow of the packet as view.String gives it.
func (p packet) flowOf() string {
	return view{proto: p.proto, src: p.src, dst: p.dst, sport: p.sport, dport: p.dport}.String()
}

// checkError looks at every field of a translated error that may or may not have changed.
func checkError(t *testing.T, name string, r result, sent packet, src, dst, inner string) {
	t.Helper()
	v := r.view()
	if v.src != src || v.dst != dst {
		t.Errorf("%s: from %s to %s; want from %s to %s", name, v.src, v.dst, src, dst)
	}
	quoted, err := v.quoted()
	must(t, err)
	if quoted.String() != inner {
		t.Errorf("%s: about %q, want %q", name, quoted, inner)
	}
	if res := v.residues(); res.IP != 0 || res.Transport != uint16(0) || res.InnerIP != 0 {
		t.Errorf("%s: wrong checksums: %+v", name, res)
	}
	if k := v.kind(kind{sent.icmpType, sent.icmpCode}); !bytes.Equal(v.l4[:2], k[:]) || binary.BigEndian.Uint16(v.l4[6:]) != sent.rest {
		t.Errorf("%s: ICMP header % x", name, v.l4[:8])
	}
	if len(quoted.ip) == quoted.total() && quoted.transportResidue() != uint16(0) {
		if quoted.transportResidue() != "no checksum" {
			t.Errorf("%s: quoted packet's transport checksum is wrong by %v", name, quoted.transportResidue())
		}
	}
}

// An error about a flow that the world opened passes as it is, both ways.
func TestICMPErrorOfWorldsFlow(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		in := b.fromUplink(udp(world, 4000, podA, 53)).is("delivered")
		r := b.fromPod(icmpError(podA, world, 3, 3, in.frame, 8)).is("forwarded")
		if v := r.view(); v.src != podA {
			t.Errorf("the pod's error left as %v", v)
		}
		out := b.fromPod(udp(podA, 53, world, 4000)).is("forwarded")
		r = b.fromUplink(icmpError("192.0.2.1", podA, 11, 0, out.frame, 8)).is("delivered")
		if q, err := r.view().quoted(); err != nil || q.String() != "udp "+podA+":53 > "+world+":4000" {
			t.Errorf("the world's error is about %v, %v", q, err)
		}
		b.count(0, 1)
	})
}

// Errors about nothing that we know: the pod's are dropped, since they would show its address, the world's are the stack's.
func TestICMPErrorOfNoFlow(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		stray := udp(world, 4000, podA, 53)
		for name, c := range map[string]struct {
			change func([]byte)
			want   string
		}{
			"no such flow":      {func([]byte) {}, "drop NO_MAPPING"},
			"another family's":  {func(q []byte) { q[0] ^= 0x20 }, "drop FORGED_ERROR"},
			"quoted options":    {func(q []byte) { q[0] ^= each[byte](f, 3, 0) }, "drop NO_MAPPING"}, // 6 words
			"quoted fragment":   {func(q []byte) { copy(q[6:], each(f, []byte{0, 3}, q[6:8])) }, "drop NO_MAPPING"},
			"unknown protocol":  {func(q []byte) { q[each(f, 9, 6)] = 47 }, "drop NO_MAPPING"},
			"another direction": {func(q []byte) { copy(q[each(f, 12, 8):], slices.Concat(f.netIP(podA), f.netIP(world))) }, "drop FORGED_ERROR"},
		} {
			e := icmpError(podA, world, 3, 3, stray.bytes(b.family), 8)
			c.change(e.quote)
			if r := b.fromPod(e); r.what != c.want {
				t.Errorf("%s, from the pod: outcome %q", name, r.what)
			}
			e.src, e.dst = world, nodeIP
			if r := b.fromUplink(e); r.what != "stack" || !bytes.Equal(r.in, r.frame) {
				t.Errorf("%s, from the world: outcome %q", name, r.what)
			}
		}
		e := icmpError(podA, world, 3, 3, stray.bytes(b.family), 8)
		e.quote = e.quote[:f.header()+7]
		b.fromPod(e).is("drop NO_MAPPING")
		b.empty()
	})
}

// ICMP messages without an identifier that can be rewritten are no part of an echo flow, also not of the one with identifier 0.
func TestICMPOfAnUnknownKind(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		timestamp := func(p *packet) { p.icmpType = layers.ICMPv4TypeTimestampRequest }
		for _, id := range []uint16{0, 7} {
			b := newBed(t, f)
			p := ping(podA, id, world)
			r := b.fromPod(p).is("forwarded")
			for _, other := range []packet{p.with(timestamp), ping(podA, 7, world).with(timestamp)} {
				b.turnedAway(other, "drop UNKNOWN_PROTOCOL")
				b.toUplink(other).is("drop UNKNOWN_PROTOCOL")
			}
			quote := r.frame
			quote[ethernet+f.header()] = f.kind(kind{layers.ICMPv4TypeTimestampRequest})[0]
			e := b.fromUplink(icmpError(world, nodeIP, 3, 3, quote, 8)).is("stack")
			if !bytes.Equal(e.in, e.frame) {
				t.Errorf("identifier %d: an error about no flow was changed", id)
			}
			b.count(1, 0)
		}
	})
}

// What lies behind the IP packet in a frame is no part of a quoted packet, and no checksum covers it.
func TestICMPErrorWithTrailer(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := tcp(podA, 1024, world, 80, syn)
		out := b.fromPod(p).is("forwarded")
		e := icmpError("192.0.2.1", nodeIP, 11, 0, out.frame, 8)
		e.macTo = b.uplink.mac
		frame := append(e.bytes(b.family), 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
		r := b.run(wire.FromUplink, b.uplink.index, frame, nil).is("delivered")
		checkError(t, "with a trailer", r, e, "192.0.2.1", podA, p.flowOf())
		if got := r.frame[len(r.frame)-12:]; !bytes.Equal(got, frame[len(frame)-12:]) {
			t.Errorf("the trailer became % x", got)
		}
		e.quote = e.quote[:f.header()+4] // its ports lie behind the packet
		frame = append(e.bytes(b.family), make([]byte, 12)...)
		b.run(wire.FromUplink, b.uplink.index, frame, nil).is("stack")
	})
}

// A quoted UDP checksum that comes to zero is written as all ones: zero would say that there is none.
func TestICMPErrorQuotedUDPChecksum(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := udp(podA, 1024, world, 53)
		out := b.fromPod(p).is("forwarded")
		// Change the payload until the checksum of the packet as the pod sent it would come to zero.
		v := out.view()
		quote := bytes.Clone(v.ip)
		podSum := binary.BigEndian.Uint16(p.bytes(f)[ethernet+f.header()+6:])
		datagram := quote[f.header():]
		worldSum := binary.BigEndian.Uint16(datagram[6:])
		binary.BigEndian.PutUint16(datagram[6:], fold(uint32(worldSum)+uint32(^podSum)))
		binary.BigEndian.PutUint16(datagram[8:], fold(uint32(binary.BigEndian.Uint16(datagram[8:]))+uint32(podSum)))
		e := packet{proto: wire.ICMP, src: world, dst: nodeIP, icmpType: 3, icmpCode: 3, quote: quote}
		r := b.fromUplink(e).is("delivered")
		inner, err := r.view().quoted()
		must(t, err)
		if got := binary.BigEndian.Uint16(inner.l4[6:]); got != 0xffff {
			t.Errorf("quoted checksum %#x, want 0xffff", got)
		}
	})
}

// An error reaches only the pod whose flow it is about, though another has the address now.
func TestICMPErrorOfEarlierOwner(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		out := b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		b.giveAway(podA, podB)
		r := b.fromUplink(icmpError(world, nodeIP, 3, 3, out.frame, 8)).is("stack")
		if !bytes.Equal(r.in, r.frame) {
			t.Error("an error about an earlier owner's flow was translated")
		}
	})
}

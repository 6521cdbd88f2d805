package prog

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// sctpProto is the number of SCTP.
const sctpProto = wire.Protocol(132)

// The errors about what has been sent to a Service.
var (
	hostUnreachable = kind{3, 1}
	portUnreachable = kind{3, 3}
	timeExceeded    = kind{11, 0}
)

// errorFrom is the error of a kind that a pod gets from an address about a frame that it has sent.
func (b *bed) errorFrom(k kind, from, pod string, sent []byte) []byte {
	v, err := read(sent)
	must(b, err)
	e, l := b.tooBig(sent[:ethernet+len(v.ip)], 0), b.pods[pod] // without what pads the frame
	e.icmpType, e.icmpCode = k[0], k[1]
	e.src, e.dst, e.macTo, e.macFrom = from, pod, l.peer, l.mac
	return e.bytes(b.family)
}

// says asserts that a dropped packet's pod gets an error about it from the address to which it has sent it.
func (r result) says(k kind) {
	r.b.Helper()
	sent, err := read(r.in)
	must(r.b, err)
	if want := r.b.errorFrom(k, sent.dst, sent.src, r.in); !r.answered() || !bytes.Equal(r.frame, want) {
		r.b.Errorf("%s: told\n% x, want\n% x", describe(r.in), r.frame, want)
	}
}

// turnedAway has a pod send what is not masqueraded, of which the node tells it.
func (b *bed) turnedAway(p packet, what string) {
	b.Helper()
	defer func(before bool) { b.answers = before }(b.answers)
	b.answers = true
	r := b.fromPod(p).is(what)
	if b.Family == wire.IPv4 && p.fragment&^(moreFragments|dontFragment) != 0 { // RFC 1122, section 3.2.2
		if r.answered() {
			b.Errorf("%s: an error about a later fragment", describe(r.in))
		}
		return
	}
	if want := b.errorFrom(hostUnreachable, nodeIP, p.src, r.in); !r.answered() || !bytes.Equal(r.frame, want) {
		b.Errorf("%s: told\n% x, want\n% x", describe(r.in), r.frame, want)
	}
}

// refuses asserts that a dropped segment is answered by a RST from where it was sent to, with these numbers.
func (r result) refuses(seq, ackSeq uint32, flags byte) {
	r.b.Helper()
	sent, err := read(r.in)
	must(r.b, err)
	if !r.answered() {
		r.b.Fatalf("%s: no RST", describe(r.in))
	}
	r.flow(reversed(sent)).valid()
	v := r.view()
	got := [2]uint32{binary.BigEndian.Uint32(v.l4[4:]), binary.BigEndian.Uint32(v.l4[8:])}
	if len(r.frame) != ethernet+r.b.header()+20 || v.ttl != 64 || got != [2]uint32{seq, ackSeq} || v.l4[13] != flags {
		r.b.Errorf("%s: %d bytes, TTL %d, numbers %d, flags %#x", describe(r.in), len(r.frame), v.ttl, got, v.l4[13])
	}
	if want := slices.Concat(r.in[6:12], r.in[:6]); !bytes.Equal(r.frame[:12], want) {
		r.b.Errorf("%s: a RST for % x, want % x", describe(r.in), r.frame[:12], want)
	}
}

// refusals are the ways in which a Service refuses what is sent to this address and port.
func (b *bed) refusals() map[string]struct {
	address string
	port    uint16
} {
	for _, proto := range []wire.Protocol{wire.TCP, wire.UDP, sctpProto} {
		b.declare(vip, 80, proto, services.ClusterIP)
		b.declare(external, 80, proto, 0)
	}
	return map[string]struct {
		address string
		port    uint16
	}{"drop NO_BACKEND": {vip, 80}, "drop NO_SERVICE_PORT": {vip, 81}}
}

// What a Service has no endpoints or no port for is refused at once, as the host that had its address would, to the last byte.
func TestRefused(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.answers = true
		for why, at := range b.refusals() {
			for name, p := range map[string]packet{
				"UDP":               udp(podA, 5000, at.address, at.port),
				"UDP of odd length": udp(podA, 5000, at.address, at.port).with(func(p *packet) { p.payload = []byte("odd") }),
				"empty UDP":         udp(podA, 5000, at.address, at.port).with(func(p *packet) { p.payload = nil }),
				"much UDP":          udp(podA, 5000, at.address, at.port).with(func(p *packet) { p.payload = make([]byte, 1400) }),
				"SCTP":              sctp(podA, at.address).with(func(p *packet) { copy(p.payload, []byte{0x13, 0x88, 0, byte(at.port)}) }),
			} {
				b.fromPod(p).is(why).says(portUnreachable)
				for odd, p := range map[string]packet{
					"with options":    p.with(func(p *packet) { p.options = true }),
					"last hop":        p.with(func(p *packet) { p.ttl = 1 }),
					"behind headers":  chained(p, each(f, 0, 8)),
					"first fragment":  p.with(func(p *packet) { p.fragment = moreFragments }),
					"not to be split": f.whole(p),
				} {
					if r := b.fromPod(p).is(why); !r.answered() {
						t.Errorf("%s %s: not answered", name, odd)
					} else {
						r.says(portUnreachable)
					}
				}
			}
			for flags, want := range map[byte]struct {
				seq, ack uint32
				flags    byte
			}{syn: {0, 1001, rst | ack}, syn | fin: {0, 1002, rst | ack}} {
				p := tcp(podA, 5000, at.address, at.port, flags)
				b.fromPod(p).is(why).refuses(want.seq, want.ack, want.flags)
				b.fromPod(p.with(func(p *packet) { p.options = true })).is(why).refuses(want.seq, want.ack, want.flags)
				b.fromPod(chained(p, each(f, 0, 8))).is(why).refuses(want.seq, want.ack, want.flags)
				data := p.with(func(p *packet) { p.payload = make([]byte, 1200) })
				b.fromPod(data).is(why).refuses(want.seq, want.ack+1200, want.flags)
			}
		}
		b.fromPod(ping(podA, 7, vip)).is("drop NO_SERVICE_PORT").says(portUnreachable)
		b.fromPod(packet{proto: 253, src: podA, dst: vip}).is("drop NO_SERVICE_PORT").says(portUnreachable)
		b.fromPod(tcp(podA, 5000, external, 80, syn)).is("drop NO_BACKEND").refuses(0, 1001, rst|ack)
		b.fromPod(udp(podA, 5000, external, 80)).is("drop NO_BACKEND").says(portUnreachable)
		b.fromPod(tcp(podA, 5000, vip, 81, ack)).is("drop NO_SERVICE_PORT").refuses(2000, 0, rst)
		b.empty()
	})
}

// What has been sent for no answer, and what has no endpoint for this node's pods alone, is dropped in silence.
func TestNotRefused(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		for why, at := range b.refusals() {
			for name, p := range map[string]packet{
				"RST":      tcp(podA, 5000, at.address, 81, rst),
				"RST, ACK": tcp(podA, 5000, at.address, 81, rst|ack),
			} {
				if r := b.fromPod(p).is("drop NO_SERVICE_PORT"); r.answered() {
					t.Errorf("%s was answered", name)
				}
			}
			large := udp(podA, 5000, at.address, at.port).with(func(p *packet) { p.payload, p.id = make([]byte, 4000), 9 })
			b.answers = true
			for i, p := range fragmented(b, large) {
				if r := b.fromPod(p).is(why); r.answered() != (i == 0) {
					t.Errorf("fragment %d: answered: %v", i, r.answered())
				}
			}
			b.answers = false
		}
		lone := udp(podA, 5000, vip, 80).with(func(p *packet) { p.fragment, p.id = 100, 10 })
		b.fromPod(lone).is("drop FRAG_NOT_FOUND")
		about := icmpError(podA, vip, 3, 3, udp(vip, 80, podA, 5000).bytes(f), 16)
		b.fromPod(about).is("drop NO_SERVICE")
		b.fromPod(tcp(podA, 5000, "10.96.7.7", 80, syn)).is("drop NO_SERVICE")
		b.serve(vip, 90, wire.TCP, remote+":8080").restrict()
		b.fromPod(tcp(podA, 5000, vip, 90, syn)).is("drop NO_LOCAL_BACKEND")
		b.fromPod(tcp(podA, 5000, external, 81, syn)).is("forwarded") // such an address is the Service's by its ports only
	})
}

// A connection whose backend is gone is reset by what its socket expects next from the other end.
func TestResetOfAGoneBackend(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.TCP, podB+":8080")
		p := tcp(podA, 5000, vip, 80, syn)
		b.fromPod(p).is("delivered").flow("tcp " + podA + ":5000 > " + podB + ":8080").valid()
		back := tcp(podB, 8080, podA, 5000, syn|ack)
		b.fromPod(back).is("delivered").flow("tcp " + vip + ":80 > " + podA + ":5000").valid()
		data := p.with(func(p *packet) { p.flags, p.seq, p.ack, p.payload = ack, 1001, 7777, make([]byte, 900) })
		b.fromPod(data).is("delivered")
		must(t, b.endpoints.Delete(endpoints.Key{Address: b.addr(podB)}))
		b.answers = true
		b.fromPod(data).is("drop BACKEND_GONE").refuses(7777, 0, rst)
	})
}

// What a pod sends to itself by a Service with its last hop, nobody but a program may answer: from the Service's address.
func TestLastHopToItself(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.TCP, podA+":8080")
		b.serve(vip, 53, wire.UDP, podA+":5353")
		b.answers = true
		for _, p := range []packet{
			tcp(podA, 5000, vip, 80, syn), udp(podA, 5000, vip, 53),
			udp(podA, 5001, vip, 53).with(func(p *packet) { p.noSum, p.payload = f == inIPv4, make([]byte, 1001) }),
		} {
			p.ttl = 1
			b.fromPod(p).is("drop SERVICE_TTL").says(timeExceeded)
			b.fromPod(p).is("drop SERVICE_TTL").says(timeExceeded) // also of a flow that is known
		}
	})
}

// tellsFromService asserts that the pod that has sent a packet to a Service is told by that how large it may be.
func (r result) tellsFromService(mtu int) {
	r.b.Helper()
	r.is("drop TOO_BIG")
	want, l := r.b.tooBig(r.in, mtu), r.b.pods[podA]
	want.src, want.dst, want.macTo, want.macFrom = vip, podA, l.peer, l.mac
	if want := want.bytes(r.b.family); !bytes.Equal(r.frame, want) {
		r.b.Errorf("%s: told\n% x, want\n% x", describe(r.in), r.frame, want)
	}
}

// A packet to a Service that does not fit its way to the backend: the pod is told by the Service, of the packet as it was sent.
func TestTooBigForTheWayToABackend(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		for i, to := range []string{remote, beyond, world} {
			way := map[string]int{beyond: tunnelMTU}[to]
			if way == 0 {
				way = mtu
			}
			port := uint16(80 + i)
			for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
				b.serve(vip, port, proto, fmt.Sprint(to, ":", 8080+i))
			}
			b.answers = true
			for _, p := range []packet{
				tcp(podA, 5000, vip, port, syn), udp(podA, 5000, vip, port),
				udp(podA, 5001, vip, port).with(func(p *packet) { p.noSum = f == inIPv4 }),
			} {
				header := f.header() + map[wire.Protocol]int{wire.TCP: 20, wire.UDP: 8}[p.proto]
				large := f.whole(p).with(func(p *packet) { p.payload = make([]byte, way-header+1) })
				b.fromPod(large).tellsFromService(way)
				large.payload = large.payload[1:]
				b.fromPod(large).is("forwarded")
			}
			b.answers = false
		}
		l := b.pods[podA]
		p := f.whole(tcp(podA, 6000, vip, 81, syn)).with(func(p *packet) { p.payload, p.macTo, p.macFrom = make([]byte, 3000), l.mac, l.peer })
		b.answers = true
		b.run(wire.FromPod, l.index, p.bytes(f), map[int]uint32{skbGSOSize: uint32(mtu - f.header() - 20)}).tellsFromService(tunnelMTU)
	})
}

// A pod is refused a hundred times at once and a hundred times a second, and its connections as often again, whatever others get.
func TestRefusalsAreLimited(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.refusals()
		b.answers = true
		refused := func(p packet, packets int) (n int) {
			for i := range packets {
				p.sport = uint16(10000 + i)
				if b.fromPod(p).is("drop NO_BACKEND").answered() {
					n++
				}
			}
			return n
		}
		within := func(name string, started time.Time, got int) {
			if most := 102 + int(time.Since(started)/(10*time.Millisecond)); got < 100 || got > most {
				t.Errorf("%s: refused %d times; want 100 to %d", name, got, most)
			}
		}
		started := time.Now()
		within("UDP", started, refused(udp(podA, 5000, vip, 80), 200))
		within("TCP after that", started, refused(tcp(podA, 5000, vip, 80, syn), 200))
		if got := refused(udp(podB, 5000, vip, 80), 50); got != 50 {
			t.Errorf("another pod was refused %d of 50 times", got)
		}
		b.outlast(1200 * time.Millisecond)
		if refused(udp(podA, 5000, vip, 80), 1) != 1 {
			t.Error("not refused after a pause")
		}
	})
}

// What the kernel has still to do for the packet, its checksum or its segments, nobody does for the answer.
func TestRefusedOnTheWire(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.refusals()
		b.serve(vip, 82, wire.UDP, podA+":8080")
		b.attach(wire.FromPod, b.pods[podA].index)
		pod, l := b.linkTo("ecprpod0-p"), b.pods[podA]
		must(t, offloading(pod.socket))
		l4 := ethernet + f.header()
		none := make([]byte, vnetHeader)
		for name, c := range map[string]struct {
			p         packet
			start, at int
			says      kind
		}{
			"UDP":                  {udp(podA, 5000, vip, 80), l4, l4 + 6, portUnreachable},
			"UDP, much":            {udp(podA, 5000, vip, 80).with(func(p *packet) { p.payload = make([]byte, 1000) }), l4, l4 + 6, portUnreachable},
			"inside":               {udp(podA, 5000, vip, 80).with(func(p *packet) { p.payload = make([]byte, 1000) }), l4 + 700, l4 + 716, portUnreachable},
			"last hop":             {udp(podA, 5000, vip, 82).with(func(p *packet) { p.ttl = 1 }), 0, 0, timeExceeded},
			"last hop, unfinished": {udp(podA, 5000, vip, 82).with(func(p *packet) { p.ttl = 1 }), l4, l4 + 6, timeExceeded},
		} {
			c.p.macTo, c.p.macFrom = l.mac, l.peer
			frame := c.p.bytes(f)
			sent := append(bytes.Clone(none), frame...)
			if c.start > 0 {
				sent = pending(frame, c.start, c.at)
			}
			want := append(bytes.Clone(none), b.errorFrom(c.says, vip, podA, frame)...)
			if !pod.waits(func(got []byte) bool { return bytes.Equal(got, want) }, func() { pod.send(sent) }) {
				t.Errorf("%s: not told", name)
			}
		}
		for name, segment := range map[string]int{"SYN": 0, "segments": 1000} {
			p := tcp(podA, 5000, vip, 80, syn).with(func(p *packet) { p.macTo, p.macFrom = l.mac, l.peer })
			if segment > 0 {
				p.payload = make([]byte, 5000)
			}
			sent := pending(p.bytes(f), l4, l4+16)
			if segment > 0 {
				sent[1] = each[byte](f, 1, 4) // VIRTIO_NET_HDR_GSO_TCPV4, TCPV6
				binary.NativeEndian.PutUint16(sent[2:], uint16(l4+20))
				binary.NativeEndian.PutUint16(sent[4:], uint16(segment))
			}
			if !pod.waits(func(got []byte) bool {
				v, err := read(got[vnetHeader:])
				return err == nil && bytes.Equal(got[:vnetHeader], none) && v.String() == reversed(view{proto: wire.TCP, src: podA, dst: vip, sport: 5000, dport: 80}) &&
					v.l4[13] == rst|ack && binary.BigEndian.Uint32(v.l4[8:]) == uint32(1001+len(p.payload)) && sumsValid(got[vnetHeader:]) == nil
			}, func() { pod.send(sent) }) {
				t.Errorf("%s: not refused", name)
			}
		}
	})
}

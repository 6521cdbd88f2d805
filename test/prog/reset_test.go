package prog

import (
	"bytes"
	"encoding/binary"
	"net"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// A segment of no flow is answered by the RST that the host at the other end would send (RFC 9293, section 3.10.7.1), by either
// program that may see it, and counted once.
func TestResetOfUnknownConnection(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, c := range map[string]struct {
			p        packet
			seq, ack uint32
			flags    byte
		}{
			"ACK":             {tcp(podA, 5000, world, 80, ack), 2000, 0, rst},
			"data":            {tcp(podA, 5000, world, 80, ack).with(func(p *packet) { p.payload = make([]byte, 1400) }), 2000, 0, rst},
			"FIN":             {tcp(podA, 5000, world, 80, fin|ack), 2000, 0, rst},
			"FIN without ACK": {tcp(podA, 5000, world, 80, fin).with(func(p *packet) { p.payload = make([]byte, 9) }), 0, 1010, rst | ack},
			"nothing":         {tcp(podA, 5000, world, 80, 0), 0, 1000, rst | ack},
		} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f)
				b.answers = true
				for _, send := range []func(packet) result{b.fromPod, b.toUplink} {
					r := send(c.p).is("drop NO_MAPPING")
					if !r.reset() {
						t.Fatal("no RST")
					}
					r.flow("tcp " + world + ":80 > " + podA + ":5000").valid()
					v := r.view()
					seq, ackSeq := binary.BigEndian.Uint32(v.l4[4:]), binary.BigEndian.Uint32(v.l4[8:])
					if len(r.frame) != ethernet+f.header()+20 || len(v.l4) != 20 || v.ttl != 64 || seq != c.seq || ackSeq != c.ack || v.l4[13] != c.flags {
						t.Errorf("%d bytes, TTL %d, sequence number %d, acknowledgement %d, flags %#x", len(r.frame), v.ttl, seq, ackSeq, v.l4[13])
					}
					l := b.pods[podA]
					if to, from := net.HardwareAddr(r.frame[:6]), net.HardwareAddr(r.frame[6:12]); !bytes.Equal(to, l.peer) || !bytes.Equal(from, l.mac) {
						t.Errorf("from %v to %v, want from %v to %v", from, to, l.mac, l.peer)
					}
				}
				b.empty()
			})
		}
	})
}

// The packet may be larger than what a program sees at once, have options, or be cut into segments later.
func TestResetOfOddSegments(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.answers = true
		large := tcp(podA, 5000, world, 80, ack).with(func(p *packet) { p.payload = make([]byte, 3500) })
		frame := func(p packet) []byte {
			l := b.pods[podA]
			p.macTo, p.macFrom = l.mac, l.peer
			return p.bytes(b.family)
		}
		r := b.run(wire.FromPod, b.pods[podA].index, frame(large), map[int]uint32{skbGSOSize: 1400}).is("drop NO_MAPPING")
		if !r.reset() || len(r.frame) != ethernet+f.header()+20 {
			t.Errorf("segments: a frame of %d bytes", len(r.frame))
		}
		r = b.toUplink(large.with(func(p *packet) { p.options = true })).is("drop NO_MAPPING")
		if !r.reset() || len(r.frame) != ethernet+f.header()+20 {
			t.Errorf("IP options: a frame of %d bytes", len(r.frame))
		}
	})
}

// What is no segment of a connection is never answered, nor is a RST.
func TestNoReset(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := tcp(podA, 5000, world, 80, ack)
		for name, p := range map[string]packet{
			"RST":      tcp(podA, 5000, world, 80, rst),
			"RST, ACK": tcp(podA, 5000, world, 80, rst|ack),
			"SYN, ACK": tcp(podA, 5000, world, 80, syn|ack),
			"fragment": p.with(func(p *packet) { p.fragment, p.payload = moreFragments, make([]byte, 64) }),
			"pong":     ping(podA, 7, world).replied().with(func(p *packet) { p.src, p.dst = podA, world }),
			"error":    icmpError(podA, world, 3, 3, tcp(world, 80, podA, 5000, ack).bytes(b.family), 20),
		} {
			for _, send := range []func(packet) result{b.fromPod, b.toUplink} {
				if r := send(p).is("drop NO_MAPPING"); r.reset() {
					t.Errorf("%s was answered", name)
				}
			}
		}
		// The node's own, whose port a pod has.
		b.fromPod(tcp(podA, 50000, world, 80, syn)).is("forwarded")
		if r := b.toUplink(tcp(nodeIP, 50000, world, 80, ack)).is("drop NO_MAPPING"); r.reset() {
			t.Error("the node's segment was answered")
		}
	})
}

// Where a flow may be all the same, TCP is left to try again.
func TestNoResetWhereAFlowMayBe(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := tcp(podA, 50000, world, 80, ack)
		b.configure(config.FlowsMove)
		if r := b.fromPod(p).is("drop NO_MAPPING"); r.reset() {
			t.Error("answered while flow tables move")
		}
		b.configure(0)
		b.fromPod(p.with(func(p *packet) { p.flags = syn })).is("forwarded")
		out := b.tuple(wire.TCP, podA, 50000, world, 80)
		forward, reverse := b.pair(out)
		must(t, b.snat.Put(out, snat.Value{ToAddress: forward.ToAddress, ToPort: forward.ToPort, Ifindex: forward.Ifindex}))
		if r := b.fromPod(p).is("drop NO_MAPPING"); r.reset() {
			t.Error("answered while its entry is being removed")
		}
		must(t, b.snat.Delete(out))
		reverse.LastSeen = 0
		must(t, b.reverse.Put(reverseKey(out, forward), reverse))
		if r := b.fromPod(p).is("drop NO_MAPPING"); r.reset() {
			t.Error("answered while its other half is being removed")
		}
		// Another pod's flow, on the port that this one would keep, says nothing of this one's.
		if r := b.fromPod(tcp(podB, 50000, world, 80, ack)).is("drop NO_MAPPING"); !r.reset() {
			t.Error("another pod's flow keeps a segment from being answered")
		}
		// A pod whose record is gone just now has nobody to answer.
		must(t, b.devices.Delete(devices.Key{Ifindex: uint32(b.pods[podC].index)}))
		if r := b.toUplink(tcp(podC, 50000, world, 80, ack)).is("drop NO_MAPPING"); r.reset() {
			t.Error("answered without the pod's record")
		}
	})
}

// A pod gets a hundred at once and a hundred a second, whatever others get.
func TestResetsAreLimited(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		resets := func(pod string, segments int) (n int) {
			for i := range segments {
				if b.fromPod(tcp(pod, uint16(1000+i), world, 80, ack)).is("drop NO_MAPPING").reset() {
					n++
				}
			}
			return n
		}
		started := time.Now()
		got := resets(podA, 400)
		// The programs' clock moves in ticks, so that it may be one further on.
		if most := 102 + int(time.Since(started)/(10*time.Millisecond)); got < 100 || got > most {
			t.Errorf("%d of 400 segments were answered; want 100 to %d", got, most)
		}
		if got := resets(podB, 50); got != 50 {
			t.Errorf("of another pod's 50 segments %d were answered", got)
		}
		b.outlast(50 * time.Millisecond)
		if resets(podA, 1) != 1 {
			t.Error("no RST after a pause")
		}
	})
}

// A pod whose DEL has begun is answered with nothing, and nobody else in its place.
func TestNoResetForAnother(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromPod(tcp(podC, 50000, world, 80, syn)).is("forwarded")
		must(t, b.endpoints.Delete(endpoints.Key{Address: b.addr(podC)}))
		b.fromPod(tcp(podB, 6000, world, 81, syn)).is("forwarded") // leaves its owner in the scratch record
		if r := b.toUplink(tcp(podC, 50000, world, 80, ack)); r.reset() {
			t.Errorf("a RST to %x", r.frame[:6])
		}
	})
}

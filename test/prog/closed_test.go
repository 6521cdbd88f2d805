package prog

import (
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// closings say how a connection ends, and whether its port is another pod's at once.
var closings = map[string]struct {
	story func(b *bed, o opener)
	free  bool
}{
	"established": {func(b *bed, o opener) { o.established(b) }, false},
	"exact RST of the opener": {func(b *bed, o opener) {
		o.established(b)
		o.opens(b, segment(ack, 1001, 5001, 10))
		o.closes(b, segment(ack, 5001, 1011, 0))
		o.opens(b, segment(rst, 1011, 0, 0))
	}, true},
	"RST of the opener behind data that may be lost": {func(b *bed, o opener) {
		o.established(b)
		o.opens(b, segment(ack, 1001, 5001, 10))
		o.opens(b, segment(rst, 1011, 0, 0))
	}, false},
	"RST of the opener in front of data": {func(b *bed, o opener) {
		o.established(b)
		o.opens(b, segment(ack, 1001, 5001, 10))
		o.opens(b, segment(rst, 1001, 0, 0))
	}, false},
	"RST of the opener after one that was not exact": {func(b *bed, o opener) {
		o.established(b)
		o.opens(b, segment(ack, 1001, 5001, 10))
		o.opens(b, segment(rst, 1001, 0, 0))
		o.opens(b, segment(rst, 1011, 0, 0))
	}, false},
	"exact RST of the server": {func(b *bed, o opener) {
		o.established(b)
		o.closes(b, segment(ack, 5001, 1001, 1))
		o.opens(b, segment(ack, 1001, 5002, 0))
		o.closes(b, segment(rst, 5002, 0, 0))
	}, true},
	"RST of the server behind data that was not acknowledged": {func(b *bed, o opener) {
		o.established(b)
		o.closes(b, segment(ack, 5001, 1001, 1))
		o.closes(b, segment(rst, 5002, 0, 0))
	}, false},
	"forged RST behind forged data": {func(b *bed, o opener) {
		o.established(b)
		o.closes(b, segment(ack, 5001+1<<19, 1001, 0))
		o.closes(b, segment(rst, 5001+1<<19, 0, 0))
		o.closes(b, segment(rst, 5001+1<<19, 0, 0))
		o.opens(b, segment(ack, 1001, 5001, 10))
		o.closes(b, segment(ack, 5001, 1011, 0))
		o.closes(b, segment(rst, 5001+1<<19, 0, 0))
	}, false},
	"forged RST before the opener has acknowledged anything": {func(b *bed, o opener) {
		o.opens(b, segment(syn, 1000, 0, 0))
		o.closes(b, segment(ack, 0, 1001, 0))
		o.closes(b, segment(rst, 0, 0, 0))
	}, false},
	"RST that may be forged": {func(b *bed, o opener) {
		o.established(b)
		o.closes(b, segment(ack, 5001, 1001, 10))
		o.closes(b, segment(rst, 5010, 0, 0))
	}, false},
	"exact RST, and it goes on": {func(b *bed, o opener) {
		o.established(b)
		o.closes(b, segment(rst, 5001, 0, 0))
		o.closes(b, segment(ack, 5001, 1001, 10))
		o.opens(b, segment(ack, 1001, 5011, 0))
	}, false},
	"refused": {func(b *bed, o opener) {
		o.opens(b, segment(syn, 1000, 0, 0))
		o.closes(b, segment(rst|ack, 0, 1001, 0))
	}, true},
	"the opener first": {func(b *bed, o opener) {
		o.established(b)
		o.opens(b, segment(fin|ack, 1001, 5001, 0))
		o.closes(b, segment(ack, 5001, 1002, 0))
		o.closes(b, segment(fin|ack, 5001, 1002, 0))
		o.opens(b, segment(ack, 1002, 5002, 0))
	}, true},
	"the opener first, without the last ACK": {func(b *bed, o opener) {
		o.established(b)
		o.opens(b, segment(fin|ack, 1001, 5001, 0))
		o.closes(b, segment(fin|ack, 5001, 1002, 0))
	}, false},
	"the server first": {serverFirst, false},
	"both at once": {func(b *bed, o opener) {
		o.established(b)
		o.opens(b, segment(fin|ack, 1001, 5001, 0))
		o.closes(b, segment(fin|ack, 5001, 1001, 0))
		o.opens(b, segment(ack, 1002, 5002, 0))
		o.closes(b, segment(fin|ack, 5001, 1002, 0)) // once more
		o.closes(b, segment(ack, 5002, 1002, 0))
	}, false},
}

func serverFirst(b *bed, o opener) {
	o.established(b)
	o.closes(b, segment(fin|ack, 5001, 1001, 0))
	o.opens(b, segment(fin|ack, 1001, 5002, 0))
	o.closes(b, segment(ack, 5002, 1002, 0))
}

// A port is another pod's at once if the server has certainly forgotten its connection, and not before.
func TestPortOfClosedConnection(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, c := range closings {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f, withPorts(60000, 60000))
				c.story(b, openers[2])
				other := tcp(podB, 2000, world, 80, syn).with(func(p *packet) { p.seq = 1 << 20 })
				if !c.free {
					b.turnedAway(other, "drop SNAT_EXHAUSTED")
				} else {
					b.fromPod(other).is("forwarded")
				}
				b.age(20 * time.Second)
				b.answers = true
				if !c.free && b.fromPod(other).what == "forwarded" && (name == "established" || name == "the server first") {
					t.Error("another pod has the port of a connection that the server remembers")
				}
			})
		}
	})
}

// A port on which the server waits is the same pod's for a SYN that the server takes, and for no other SYN.
func TestPortOfServerThatWaits(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPorts(60000, 60000))
		serverFirst(b, openers[2])
		again := tcp(podA, 2000, world, 80, syn)
		for _, seq := range []uint32{1, 1001, 1002, 1002 + 1<<31} {
			b.turnedAway(again.with(func(p *packet) { p.seq = seq }), "drop SNAT_EXHAUSTED")
		}
		b.fromPod(udp(podA, 2000, world, 80)).is("forwarded")
		b.fromPod(again.with(func(p *packet) { p.seq = 1003 })).is("forwarded").flow(ends(wire.TCP, nodeIP, 60000, world, 80))
	})
}

// Of a pod at its limit towards a server the stalest datagrams give way to new ones, and no connection, stream or other pod's flow does.
func TestDatagramsGiveWay(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPorts(60000, 60099), withPaths(time.Second))
		stream := udp(podA, 1, world, 53)
		out := b.fromPod(stream).is("forwarded")
		b.age(time.Second)
		b.fromUplink(answer(out, stream)).is("delivered")
		others := udp(podB, 1, world, 53)
		b.fromPod(others).is("forwarded")
		for i := range uint16(1000) {
			p := udp(podA, 2+i, world, 53)
			r := b.fromPod(p).is("forwarded")
			if i%2 == 0 {
				b.fromUplink(answer(r, p)).is("delivered")
			}
		}
		b.pair(b.tuple(wire.UDP, podA, 1, world, 53))
		b.pair(b.tuple(wire.UDP, podB, 1, world, 53))
		if n := len(all(b, b.snat)); n < 64 || n > 74 || b.portsCounted() != uint32(2*n) {
			t.Errorf("%d flows and %d counts", n, b.portsCounted())
		}
	})
}

// Short connections of each kind from a pod to one server never want for a port, and each port is one connection's that the server takes.
func TestShortConnections(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPorts(60000, 60063), withTables(1024, 64), withPaths(time.Second))
		remembered := map[uint16]uint32{} // the end of the connection for which the server waits, by the port
		for i := range uint32(600) {
			seq := i * 0x5bd1e995
			p := tcp(podA, uint16(1+i), world, 80, syn).with(func(p *packet) { p.seq = seq })
			out := b.fromPod(p).is("forwarded")
			port := out.view().sport
			if end, waits := remembered[port]; waits && int32(seq-end) <= 0 {
				t.Fatalf("connection %d has port %d, and the server does not take it", i, port)
			}
			delete(remembered, port)
			b.fromUplink(answer(out, p)).is("delivered")
			pod := func(flags uint8, off, got uint32) {
				b.fromPod(p.with(func(p *packet) { p.flags, p.seq, p.ack = flags, seq+off, got })).is("forwarded")
			}
			server := func(flags uint8, sent, got uint32) {
				b.fromUplink(answer(out, p).with(func(p *packet) { p.flags, p.seq, p.ack = flags, sent, seq+got })).is("delivered")
			}
			pod(ack, 1, 5001)
			switch i % 4 {
			case 0:
				pod(rst, 1, 0)
			case 1:
				server(rst, 5001, 0)
			case 2:
				pod(fin|ack, 1, 5001)
				server(fin|ack, 5001, 2)
				pod(ack, 2, 5002)
			default:
				server(fin|ack, 5001, 1)
				pod(fin|ack, 1, 5002)
				server(ack, 5002, 2)
				remembered[port] = seq + 2
			}
		}
	})
}

package prog

import (
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// outsideOpeners are those that anybody may be who sends with whatever source.
var outsideOpeners = []opener{
	openers[1],
	{
		name: "to a backend here", table: usage.Snat,
		opens: func(b *bed, p packet) result {
			p.src, p.sport, p.dst, p.dport = world, 50000, nodeIP, 30080
			return b.fromUplink(p).is("delivered")
		},
		closes: func(b *bed, p packet) result {
			p.src, p.sport, p.dst, p.dport = podB, 8080, world, 50000
			return b.fromPod(p).is("forwarded")
		},
	},
	{
		name: "to a backend elsewhere", table: usage.Snat,
		opens: func(b *bed, p packet) result {
			p.src, p.sport, p.dst, p.dport = world, 50000, nodeIP, 30081
			return b.fromUplink(p).is("forwarded")
		},
		closes: func(b *bed, p packet) result {
			flow, err := b.snat.Get(b.tuple(p.proto, world, 50000, nodeIP, 30081))
			must(b, err)
			p.src, p.sport, p.dst, p.dport = remote, 8080, nodeIP, flow.ToPort.Host()
			return b.fromUplink(p).is("forwarded")
		},
	},
}

// Who has not seen what the other side has sent keeps no flow longer than a SYN does, whatever else it sends; who has seen it does.
func TestBlindSegments(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, o := range outsideOpeners {
			t.Run(o.name, func(t *testing.T) {
				for what, blind := range map[string]packet{
					"no flags":                    segment(0, 1001, 5001, 0),
					"another number acknowledged": segment(ack, 1001, 5002, 0),
					"an older one":                segment(ack, 1001, 5000, 0),
					"a FIN":                       segment(fin, 1001, 5001, 0),
					"a FIN with such a number":    segment(fin|ack, 1001, 5002, 0),
				} {
					b := newBed(t, f, withServices)
					b.serve(vip, 80, wire.TCP, podB+":8080").nodePort(30080, 0)
					b.serve(vip2, 80, wire.TCP, remote+":8080").nodePort(30081, 0)
					o.opens(b, segment(syn, 1000, 0, 0))
					o.closes(b, segment(syn|ack, 5000, 1001, 0))
					o.opens(b, blind)
					_, last := b.seen()
					if b.sweepAt(o.table, last+uint64(opening)+1, false) != 1 {
						t.Errorf("%s keeps the flow", what)
					}
					o.established(b)
					o.lives(b, day)
				}
			})
		}
	})
}

// A client of a Service keeps no flow for long that costs it nothing.
func TestLifetimesOutside(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		datagram := packet{proto: wire.UDP}
		for what, c := range map[string]struct {
			story func(b *bed, o opener)
			want  time.Duration
		}{
			"a datagram": {func(b *bed, o opener) { o.opens(b, datagram) }, 30 * time.Second},
			"answered at once": {func(b *bed, o opener) {
				o.opens(b, datagram)
				o.closes(b, datagram)
				o.closes(b, datagram)
			}, 30 * time.Second},
			"answered again": {func(b *bed, o opener) {
				o.opens(b, datagram)
				o.closes(b, datagram)
				b.age(2 * time.Second)
				o.closes(b, datagram)
			}, 3 * time.Minute},
			"a SYN":        {func(b *bed, o opener) { o.opens(b, segment(syn, 1000, 0, 0)) }, 20 * time.Second},
			"a connection": {func(b *bed, o opener) { o.established(b) }, day},
			"closed by the backend": {func(b *bed, o opener) {
				o.established(b)
				o.closes(b, segment(fin|ack, 5001, 1001, 0))
				o.opens(b, segment(ack, 1001, 5002, 0))
			}, halfClosed},
			"closed by the client": {func(b *bed, o opener) {
				o.established(b)
				o.opens(b, segment(fin|ack, 1001, 5001, 0))
			}, halfClosed},
		} {
			for _, o := range outsideOpeners[1:] {
				t.Run(what+" "+o.name, func(t *testing.T) {
					b := newBed(t, f, withServices)
					for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
						b.serve(vip, 80, proto, podB+":8080").nodePort(30080, 0)
						b.serve(vip2, 80, proto, remote+":8080").nodePort(30081, 0)
					}
					c.story(b, o)
					o.lives(b, c.want)
				})
			}
		}
	})
}

// A connection that its backend has closed and its client has not lives as long as a pod's, and under pressure half a minute. Once it
// has ended, the client and the backend each hear so by their next segment, as by a keepalive.
func TestHalfClosedOutside(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, o := range outsideOpeners[1:] {
			t.Run(o.name, func(t *testing.T) {
				b := newBed(t, f, withServices)
				b.serve(vip, 80, wire.TCP, podB+":8080").nodePort(30080, 0)
				b.serve(vip2, 80, wire.TCP, remote+":8080").nodePort(30081, 0)
				story := func() (asked, answered packet) {
					o.established(b)
					out := o.opens(b, segment(ack, 1001, 5001, 0)).view()
					o.closes(b, segment(fin|ack, 5001, 1001, 0))
					in, err := read(o.opens(b, segment(ack, 1001, 5002, 0)).in)
					must(t, err)
					return tcp(world, 50000, in.dst, in.dport, ack), tcp(out.dst, out.dport, out.src, out.sport, ack)
				}
				story()
				o.livesUnder(b, true, 30*time.Second)
				story()
				o.livesUnder(b, false, halfClosed)
				asked, answered := story()
				b.sweep(o.table, 2*halfClosed, false)
				b.empty()
				b.answers = true
				b.leftToStack("the client's", b.fromUplink(asked)) // no socket has the NodePort: the stack answers with a RST
				if answered.src == podB {
					b.fromPod(answered).is("drop NO_MAPPING").refuses(2000, 0, rst)
				} else {
					b.leftToStack("the backend's", b.fromUplink(answered))
				}
			})
		}
	})
}

package prog

import (
	"fmt"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// many are so many endpoints of pods on another node, and these.
func many(port uint16, n int, more ...string) []string {
	var ends []string
	for i := range n {
		ends = append(ends, fmt.Sprintf("10.244.2.%d:%d", 100+i, port))
	}
	return append(ends, more...)
}

// servers are a Service's backends here and on another node, with the outcome of a client's packet and the way of the reply.
var servers = []struct {
	at, want string
	back     func(*bed, packet) result
}{{podB, "delivered", (*bed).fromPod}, {remote, "forwarded", (*bed).fromUplink}}

// A flow that netfilter has translated goes on to its backend, past netfilter in both directions.
func TestTakenOver(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, end := range servers {
			b := newBed(t, f, withServices, besideNetfilter)
			all := many(8080, 15, end.at+":8080")
			for _, c := range []struct {
				p packet
				s *served
			}{
				{tcp(podA, 5000, vip, 80, ack), b.serve(vip, 80, wire.TCP, all...)},
				{udp(podA, 5000, vip, 53), b.serve(vip, 53, wire.UDP, all...)},
			} {
				p := c.p
				known := func() {
					b.netfilterHas(b.tuple(p.proto, podA, 5000, vip, p.dport), seenReply, translation{ctaNATDestination, end.at, 8080})
				}
				known()
				for i := range 3 {
					if i == 2 { // a packet that netfilter was just seeing has renewed its entry
						known()
					}
					b.fromPod(p).is(end.want).flow(fmt.Sprintf("%v %s:5000 > %s:8080", p.proto, podA, end.at)).valid()
					r := p.replied().with(func(r *packet) { r.src, r.sport = end.at, 8080 })
					end.back(b, r).is("delivered").flow(fmt.Sprintf("%v %s:%d > %s:5000", p.proto, vip, p.dport, podA)).valid()
				}
				v, err := b.snat.Get(b.tuple(p.proto, podA, 5000, vip, p.dport))
				must(t, err)
				if want := c.s.all[15]; v.Backend != want || v.Generation != 1 {
					t.Errorf("%v: backend %d of generation %d, want %d", p.proto, v.Backend, v.Generation, want)
				}
			}
			b.count(2, 0)
		}
	})
}

// Of a backend that serves no more, TCP goes on all the same, and a datagram goes to another one.
func TestTakenOverFromAnEndedBackend(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, besideNetfilter)
		b.serve(vip, 80, wire.TCP, "10.244.2.100:8080")
		b.serve(vip, 53, wire.UDP, "10.244.2.100:8080")
		for _, p := range []packet{tcp(podA, 5000, vip, 80, ack), udp(podA, 5000, vip, 53)} {
			b.netfilterHas(b.tuple(p.proto, podA, 5000, vip, p.dport), seenReply, translation{ctaNATDestination, remote, 8080})
		}
		for range 2 {
			b.fromPod(tcp(podA, 5000, vip, 80, ack)).is("forwarded").flow("tcp " + podA + ":5000 > " + remote + ":8080")
			b.fromPod(udp(podA, 5000, vip, 53)).is("forwarded").flow("udp " + podA + ":5000 > 10.244.2.100:8080")
		}
		b.fromUplink(tcp(remote, 8080, podA, 5000, ack)).is("delivered").flow("tcp " + vip + ":80 > " + podA + ":5000")
	})
}

// A SYN of a connection that netfilter has begun goes where the first went. One after replies opens another connection.
func TestTakenOverSyn(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, besideNetfilter)
		b.serve(vip, 80, wire.TCP, many(8080, 15, remote+":8080")...)
		b.serve(vip, 81, wire.TCP, "10.244.2.100:8080")
		b.serve(vip, 82, wire.TCP, remote+":8080")
		for port, c := range map[uint16]struct {
			status uint32
			to     string
		}{80: {0, remote}, 81: {seenReply, "10.244.2.100"}, 82: {seenReply, remote}} {
			b.netfilterHas(b.tuple(wire.TCP, podA, 5000+port, vip, port), c.status, translation{ctaNATDestination, remote, 8080})
			for range 2 {
				b.fromPod(tcp(podA, 5000+port, vip, port, syn)).is("forwarded").flow(ends(wire.TCP, podA, 5000+port, c.to, 8080))
			}
			b.fromUplink(tcp(c.to, 8080, podA, 5000+port, syn|ack)).is("delivered").flow(ends(wire.TCP, vip, port, podA, 5000+port))
		}
	})
}

// A port that netfilter has chosen stays the flow's. A flow to which it gave another address stays its own.
func TestTakenOverSource(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, besideNetfilter)
		b.serve(vip, 80, wire.TCP, many(8080, 14, remote+":8080", podA+":8080")...)
		b.netfilterHas(b.tuple(wire.TCP, podA, 5000, vip, 80), seenReply,
			translation{ctaNATDestination, remote, 8080}, translation{ctaNATSource, podA, 6000})
		b.fromPod(tcp(podA, 5000, vip, 80, ack)).is("forwarded").flow("tcp " + podA + ":6000 > " + remote + ":8080").valid()
		b.fromUplink(tcp(remote, 8080, podA, 6000, ack)).is("delivered").flow("tcp " + vip + ":80 > " + podA + ":5000").valid()

		b.netfilterHas(b.tuple(wire.TCP, podA, 5001, vip, 80), seenReply,
			translation{ctaNATDestination, podA, 8080}, translation{ctaNATSource, nodeIP, 6001})
		for range 2 {
			b.leftToStack("masqueraded", b.fromPod(tcp(podA, 5001, vip, 80, ack)))
		}
		b.count(1, 0)
	})
}

// What netfilter does not know, or does not translate, is no flow to take over; nor is another pod's.
func TestNotTakenOver(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, besideNetfilter)
		b.serve(vip, 80, wire.TCP, remote+":8080")
		b.answers = true
		b.netfilterKnows(b.tuple(wire.TCP, podA, 5001, vip, 80))
		b.netfilterHas(b.tuple(wire.TCP, podB, 5002, vip, 80), seenReply, translation{ctaNATDestination, remote, 8080})
		for port := range uint16(3) {
			if r := b.fromPod(tcp(podA, 5000+port, vip, 80, ack)).is("drop NO_MAPPING"); !r.reset() {
				t.Errorf("port %d: no RST", 5000+port)
			}
		}
	})
}

// A flow gets another source port than one that netfilter has translated to the same backend, and is still to be taken over.
func TestPortsOfFlowsToTakeOver(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, besideNetfilter)
		b.serve(vip, 80, wire.TCP, remote+":8080")
		b.serve(vip2, 80, wire.TCP, remote+":8080")
		b.netfilterHas(b.tuple(wire.TCP, podA, 5000, vip, 80), seenReply, translation{ctaNATDestination, remote, 8080})
		if v := b.fromPod(tcp(podA, 5000, vip2, 80, syn)).is("forwarded").view(); v.sport == 5000 {
			t.Errorf("left as %v", v)
		}
		b.fromPod(tcp(podA, 5000, vip, 80, ack)).is("forwarded").flow("tcp " + podA + ":5000 > " + remote + ":8080")
		b.count(2, 0)
	})
}

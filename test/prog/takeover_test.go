package prog

import (
	"fmt"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// many is a port of a Service with as many endpoints as a set can have; the last are these.
func many(proto wire.Protocol, port uint16, last ...string) published {
	p := clusterPort(proto, port)
	for i := range perSet - len(last) {
		p.cluster = append(p.cluster, fmt.Sprintf("10.244.2.%d:8080", 100+i))
	}
	p.cluster = append(p.cluster, last...)
	return p
}

// ends are a Service's backends here and on another node, with the outcome of a client's packet and the way of the reply.
var ends = []struct {
	at, want string
	back     func(*bed, packet) result
}{{podB, "delivered", (*bed).fromPod}, {remote, "forwarded", (*bed).fromUplink}}

// A flow that netfilter has translated goes on to its backend, past netfilter in both directions.
func TestTakenOver(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, end := range ends {
			b := newBed(t, f, withServices, besideNetfilter)
			b.publish(1, many(wire.TCP, 80, end.at+":8080"))
			b.publish(2, many(wire.UDP, 53, end.at+":8080"))
			for i, p := range []packet{tcp(podA, 5000, clusterIP, 80, ack), udp(podA, 5000, clusterIP, 53)} {
				b.netfilterHas(b.tuple(p.proto, podA, 5000, clusterIP, p.dport), seenReply, translation{ctaNATDestination, end.at, 8080})
				for range 2 {
					b.fromPod(p).is(end.want).flow(fmt.Sprintf("%v %s:5000 > %s:8080", p.proto, podA, end.at)).valid()
					r := p.replied().with(func(r *packet) { r.src, r.sport = end.at, 8080 })
					end.back(b, r).is("delivered").flow(fmt.Sprintf("%v %s:%d > %s:5000", p.proto, clusterIP, p.dport, podA)).valid()
				}
				v, err := b.snat.Get(b.tuple(p.proto, podA, 5000, clusterIP, p.dport))
				must(t, err)
				if want := backendOf(uint32(i+1), perSet-1); v.Backend != want.Backend || v.Generation != 1 {
					t.Errorf("%v: backend %d of generation %d, want %d", p.proto, v.Backend, v.Generation, want.Backend)
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
		b.publish(1, clusterPort(wire.TCP, 80, "10.244.2.100:8080"))
		b.publish(2, clusterPort(wire.UDP, 53, "10.244.2.100:8080"))
		for _, p := range []packet{tcp(podA, 5000, clusterIP, 80, ack), udp(podA, 5000, clusterIP, 53)} {
			b.netfilterHas(b.tuple(p.proto, podA, 5000, clusterIP, p.dport), seenReply, translation{ctaNATDestination, remote, 8080})
		}
		for range 2 {
			b.fromPod(tcp(podA, 5000, clusterIP, 80, ack)).is("forwarded").flow("tcp " + podA + ":5000 > " + remote + ":8080")
			b.fromPod(udp(podA, 5000, clusterIP, 53)).is("forwarded").flow("udp " + podA + ":5000 > 10.244.2.100:8080")
		}
		b.fromUplink(tcp(remote, 8080, podA, 5000, ack)).is("delivered").flow("tcp " + clusterIP + ":80 > " + podA + ":5000")
	})
}

// A SYN of a connection that netfilter has begun goes where the first went. One after replies opens another connection.
func TestTakenOverSyn(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, besideNetfilter)
		b.publish(1, many(wire.TCP, 80, remote+":8080"))
		b.publish(2, clusterPort(wire.TCP, 81, "10.244.2.100:8080"))
		for port, c := range map[uint16]struct {
			status uint32
			to     string
		}{80: {0, remote}, 81: {seenReply, "10.244.2.100"}} {
			b.netfilterHas(b.tuple(wire.TCP, podA, 5000, clusterIP, port), c.status, translation{ctaNATDestination, remote, 8080})
			for range 2 {
				b.fromPod(tcp(podA, 5000, clusterIP, port, syn)).is("forwarded").flow("tcp " + podA + ":5000 > " + c.to + ":8080")
			}
			b.fromUplink(tcp(c.to, 8080, podA, 5000, syn|ack)).is("delivered").flow(fmt.Sprintf("tcp %s:%d > %s:5000", clusterIP, port, podA))
		}
	})
}

// A port that netfilter has chosen stays the flow's. A flow to which it gave another address stays its own.
func TestTakenOverSource(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, besideNetfilter)
		b.publish(1, many(wire.TCP, 80, remote+":8080", podA+":8080"))
		b.netfilterHas(b.tuple(wire.TCP, podA, 5000, clusterIP, 80), seenReply,
			translation{ctaNATDestination, remote, 8080}, translation{ctaNATSource, podA, 6000})
		b.fromPod(tcp(podA, 5000, clusterIP, 80, ack)).is("forwarded").flow("tcp " + podA + ":6000 > " + remote + ":8080").valid()
		b.fromUplink(tcp(remote, 8080, podA, 6000, ack)).is("delivered").flow("tcp " + clusterIP + ":80 > " + podA + ":5000").valid()

		b.netfilterHas(b.tuple(wire.TCP, podA, 5001, clusterIP, 80), seenReply,
			translation{ctaNATDestination, podA, 8080}, translation{ctaNATSource, nodeIP, 6001})
		for range 2 {
			b.leftToStack("masqueraded", b.fromPod(tcp(podA, 5001, clusterIP, 80, ack)))
		}
		b.count(1, 0)
	})
}

// What netfilter does not know, or does not translate, is no flow to take over; nor is another pod's.
func TestNotTakenOver(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, besideNetfilter)
		b.publish(1, clusterPort(wire.TCP, 80, remote+":8080"))
		b.answers = true
		b.netfilterKnows(b.tuple(wire.TCP, podA, 5001, clusterIP, 80))
		b.netfilterHas(b.tuple(wire.TCP, podB, 5002, clusterIP, 80), seenReply, translation{ctaNATDestination, remote, 8080})
		for port := range uint16(3) {
			if r := b.fromPod(tcp(podA, 5000+port, clusterIP, 80, ack)).is("drop NO_MAPPING"); !r.reset() {
				t.Errorf("port %d: no RST", 5000+port)
			}
		}
	})
}

// A flow gets another source port than one that netfilter has translated to the same backend, and is still to be taken over.
func TestPortsOfFlowsToTakeOver(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, besideNetfilter)
		b.publish(1, clusterPort(wire.TCP, 80, remote+":8080"))
		b.publish(2, clusterPort(wire.TCP, 80, remote+":8080").with(func(p *published) { p.address = clusterIP2 }))
		b.netfilterHas(b.tuple(wire.TCP, podA, 5000, clusterIP, 80), seenReply, translation{ctaNATDestination, remote, 8080})
		if v := b.fromPod(tcp(podA, 5000, clusterIP2, 80, syn)).is("forwarded").view(); v.sport == 5000 {
			t.Errorf("left as %v", v)
		}
		b.fromPod(tcp(podA, 5000, clusterIP, 80, ack)).is("forwarded").flow("tcp " + podA + ":5000 > " + remote + ":8080")
		b.count(2, 0)
	})
}

package prog

import (
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// What a pod that is its own backend says of its own flow goes to nobody else, nor to the stack, as if the Service said it.
func TestServiceErrorsToOthers(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.UDP, podA+":8080")
		there := b.fromPod(udp(podA, 5000, vip, 80)).is("delivered")
		here := b.fromPod(udp(podA, 8080, vip, 5000)).is("delivered")
		for what, about := range map[string]result{"the question": there, "the answer": here} {
			for _, to := range []string{podB, remote, beyond, nodeIP, node2IP, native, world} {
				r := b.fromPod(icmpError(podA, to, 3, 3, about.frame, 1000))
				if v := r.view(); v.src == vip {
					t.Errorf("about %s, to %s: %s, as %v", what, to, r.what, v)
				}
			}
			for name, change := range map[string]func(*packet){
				"TTL 1":   func(p *packet) { p.ttl = 1 },
				"options": func(p *packet) { p.options = true },
			} {
				r := b.fromPod(icmpError(podA, vip, 3, 3, about.frame, 1000).with(change))
				if v := r.view(); r.what == "stack" && v.src == vip {
					t.Errorf("about %s, %s: %s, as %v", what, name, r.what, v)
				}
			}
		}
	})
}

// The other ports of an address in the world are the world's, and a flow to one goes on as it began.
func TestServiceOtherPortsOfAnAddress(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.answers = true
		b.declare(external, 80, wire.TCP, 0)
		p := udp(podA, 5000, external, 53) // not a port that is masqueraded to
		first := b.fromPod(p).is("forwarded").view()
		for range 5 {
			if v := b.fromPod(p).is("forwarded").view(); v.sport != first.sport {
				t.Errorf("left as %v, and then as %v", first, v)
			}
		}
		b.count(1, 0)
		// It ends when a Service gets the port.
		b.declare(external, 53, wire.UDP, 0)
		b.fromPod(p).is("drop NO_BACKEND")
	})
}

// A connection to a backend that is gone holds its port for no other.
func TestServiceSynAfterBackendGone(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.answers = true
		s := b.serve(vip, 80, wire.TCP, remote+":8080")
		p := tcp(podA, 5000, vip, 80, syn)
		sent := b.fromPod(p)
		b.back(sent, p).is("delivered")
		p.flags = ack
		b.fromPod(p).is("forwarded")
		b.fromUplink(icmpError(node2IP, podA, 3, 1, sent.frame, 8)).is("delivered")
		b.fromPod(p).is("drop BACKEND_GONE")
		if forward, _ := b.pair(f.tuple(wire.TCP, podA, 5000, vip, 80)); forward.State&flow.Reset == 0 {
			t.Errorf("it is kept as if it were established: %v", forward.State)
		}
		s.swap(podB + ":80")
		p.flags = syn
		b.fromPod(p).is("delivered").flow(ends(wire.TCP, podA, 5000, podB, 80))
		b.count(1, 0)
	})
}

// Whoever says that a connection's backend is gone has seen what it quotes.
func TestServiceBackendGoneForged(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for offset, want := range map[uint32]string{
			^uint32(1): "forwarded", // before what has been acknowledged, even by a probe
			^uint32(0): "drop BACKEND_GONE",
			0:          "drop BACKEND_GONE",
			9:          "drop BACKEND_GONE",
			10:         "drop BACKEND_GONE",
			11:         "forwarded",
			1 << 31:    "forwarded",
		} {
			b := newBed(t, f, withServices)
			b.answers = true
			b.serve(vip, 80, wire.TCP, remote+":8080")
			p := tcp(podA, 5000, vip, 80, syn)
			b.back(b.fromPod(p), p).is("delivered")
			p.flags, p.seq, p.payload = ack, p.seq+1, make([]byte, 10)
			b.fromPod(p).is("forwarded")
			quoted := tcp(podA, 5000, remote, 8080, ack)
			quoted.seq = p.seq + offset
			b.fromUplink(icmpError(node2IP, podA, 3, 1, quoted.bytes(f), 8)).is("delivered")
			b.fromPod(p).is(want)
		}
	})
}

// A pod that has used up its ports towards a backend does not make each packet of its own many tries.
func TestServicePortsUsedUp(t *testing.T) {
	const ports, more = 100, 20
	b := newBed(t, inIPv4, withServices, withPorts(50000, 50000+ports-1), withPaths(time.Minute))
	b.stayOnCPU() // each remembers for itself that there was none
	b.serve(vip, 53, wire.UDP, remote+":53")
	b.serve(vip2, 53, wire.UDP, remote+":53")
	for i := range uint16(ports) {
		b.fromPod(udp(podA, 50000+i, vip, 53)).is("forwarded")
	}
	b.turnedAway(udp(podA, 50000, vip2, 53), "drop SNAT_EXHAUSTED")
	for range more {
		b.answers = true // until those of a pod are used up
		b.fromPod(udp(podA, 50000, vip2, 53)).is("drop SNAT_EXHAUSTED")
	}
	b.answers = false
	if n := b.counters(wire.FromPod)[traffic.SnatRetried.String()].Packets; n == 0 || n > 128+more {
		t.Errorf("%d ports were tried", n)
	}
	b.fromPod(udp(podA, 49999, vip2, 53)).is("forwarded")
	b.count(ports+1, 0)
}

// What is left of a flow when Services have been turned off does not stand in the way of another from its port.
func TestServicesTurnedOff(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		half := snat.Value{
			ToAddress: b.addr(podA), ToPort: wire.PortFrom(50000), Flags: flow.Service, Ifindex: uint32(b.pods[podA].index),
			LastSeen: now(b), State: flow.ACK, Set: 1, Backend: 1,
		}
		forward, reverse := half, half
		forward.FarAddress, forward.FarPort = b.addr(remote), wire.PortFrom(8080)
		reverse.FarAddress, reverse.FarPort = b.addr(external), wire.PortFrom(80)
		must(t, b.snat.Put(b.tuple(wire.TCP, podA, 50000, external, 80), forward))
		must(t, b.reverse.Put(b.tuple(wire.TCP, podA, 50000, remote, 8080), reverse))
		b.fromPod(tcp(podA, 50000, external, 80, syn)).is("forwarded").flow(ends(wire.TCP, nodeIP, 50000, external, 80))
	})
}

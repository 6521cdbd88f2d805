package prog

import (
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// What only the host's stack can send to a backend in the world it gets while the source is still the pod's: it would take the node's for a
// martian. From then on all of the flow is the stack's, in both directions.
func TestServiceInTheWorldByTheStack(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.TCP, world+":8080")
		b.serve(vip, 53, wire.UDP, world+":5353")
		for _, p := range []packet{tcp(podA, 5000, vip, 80, syn), udp(podA, 5000, vip, 53)} {
			odd := p.with(func(p *packet) { p.options = true })
			for _, p := range []packet{odd, p, odd} {
				left := b.fromPod(p).is("stack").valid().view()
				if left.src != podA || left.dst != world {
					t.Fatalf("the stack got %v", left)
				}
				sent := p.with(func(p *packet) { p.sport, p.dst, p.dport = left.sport, left.dst, left.dport })
				out := b.toUplink(sent).is("stack").valid()
				if v := out.view(); v.src != nodeIP || v.dst != world {
					t.Fatalf("it left as %v", v)
				}
				back := answer(out, sent)
				b.fromUplink(back).is("stack").valid().flow(ends(p.proto, world, left.dport, podA, left.sport))
				back.dst, back.dport = podA, left.sport
				b.toPod(b.pods[podA], back).is("stack").valid().flow(ends(p.proto, vip, p.dport, podA, p.sport))
			}
		}
		b.count(4, 0)
	})
}

// A ClusterIP that the node holds is no Service's to the programs, and the node's among the others of its range.
func TestServiceAddressOfTheNode(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 53, wire.UDP, podB+":53")
		query := udp(podA, 5000, vip2, 53)
		b.fromPod(query).is("drop NO_SERVICE")
		must(t, b.destinations.Put(f.key(vip2+"/32"), destinations.Value{Kind: destinations.Host}))
		b.leftToStack("the node's", b.fromPod(query))
		b.leftToStack("the node's", b.fromPod(tcp(podA, 5000, vip2, 81, syn)))
		b.leftToStack("the node's", b.fromPod(ping(podA, 5000, vip2)))
		back := udp(vip2, 53, podA, 5000)
		b.leftToStack("the node's", b.toPod(b.pods[podA], back))
		b.empty()
	})
}

// SCTP covers its ports by a checksum that no program can make: an association goes on with the port of the pod's, or not at all.
func TestServiceSCTPKeepsItsPort(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		for _, address := range []string{vip, vip2} {
			b.serve(address, 80, sctpProto, remote+":80")
		}
		b.serve(vip3, 80, sctpProto, podA+":80")
		asks := func(to string, port byte) packet {
			return sctp(podA, to).with(func(p *packet) { p.payload = []byte{0, port, 0, 80, 0, 0, 0, 0, 1, 2, 3, 4, 1, 0, 0, 4} })
		}
		same := func(r result, src, dst string) {
			t.Helper()
			if v := r.view(); v.src != src || v.dst != dst || string(v.l4[:16]) != string(asks(vip, v.l4[1]).payload) {
				t.Errorf("left from %s to %s with % x", v.src, v.dst, v.l4)
			}
		}
		same(b.fromPod(asks(vip, 7)).is("forwarded"), podA, remote)
		b.turnedAway(asks(vip2, 7), "drop SNAT_EXHAUSTED") // the backend would take the two for one
		same(b.fromPod(asks(vip2, 8)).is("forwarded"), podA, remote)
		same(b.fromPod(asks(vip3, 7)).is("delivered"), vip3, podA)
		b.count(3, 0)
	})
}

package prog

import (
	"fmt"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// manyAt is so many backends at an address that a flow which chooses anew hardly finds the same one.
func manyAt(address string) (backends []string) {
	for port := range 50 {
		backends = append(backends, fmt.Sprintf("%s:%d", address, 8000+port))
	}
	return backends
}

// connect has a client outside open a connection to a NodePort, and the backend accept it; the client's next number is 1001, the
// backend's 5001. It returns what the client's segments become.
func (b *bed) connect(p packet) view {
	b.Helper()
	r := b.fromUplink(p)
	b.back(r, p).is("forwarded")
	b.fromUplink(p.with(func(p *packet) { p.flags, p.seq, p.ack = ack, 1001, 5001 })).is(r.what)
	return r.view()
}

// What anybody may have sent with a client's address and port ends no connection to a Service: it stays with its backend.
func TestOutsideBlindEnds(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for end, want := range map[string]string{podB: "delivered", remote: "forwarded"} {
			for _, flag := range []uint8{fin | ack, rst} {
				b := newBed(t, f, withServices)
				b.serve(vip, 80, wire.TCP, manyAt(end)...).nodePort(30080, 0)
				p := tcp(world, 5000, nodeIP, 30080, syn)
				v := b.connect(p)
				for i := range uint32(128) {
					b.fromUplink(p.with(func(p *packet) { p.flags, p.seq, p.ack = flag, 1001+i<<25, 1 })).is(want)
				}
				b.fromUplink(p.with(func(p *packet) { p.seq = 77777 })).is(want)
				segment := p.with(func(p *packet) { p.flags, p.seq, p.ack = ack, 1001, 5001 })
				b.fromUplink(segment).is(want).flow(ends(wire.TCP, v.src, v.sport, v.dst, v.dport))
				b.count(1, 0)
			}
		}
	})
}

// Once its backend has closed it too, the client's next connection from the same port is another.
func TestOutsideReopens(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		s := b.serve(vip, 80, wire.TCP, podB+":8080").nodePort(30080, 0)
		p := tcp(world, 5000, nodeIP, 30080, syn)
		b.connect(p)
		s.swap(remote + ":8080")
		b.fromUplink(p).is("delivered")
		b.fromPod(tcp(podB, 8080, world, 5000, fin|ack).with(func(p *packet) { p.seq, p.ack = 5001, 1001 })).is("forwarded")
		b.fromUplink(p).is("forwarded")
	})
}

// An error that quotes what anybody may have sent with the client's address buries no connection.
func TestOutsideBackendGoneForged(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.TCP, remote+":8080").nodePort(30080, 0)
		p := tcp(world, 5000, nodeIP, 30080, syn)
		v := b.connect(p)
		segment := p.with(func(p *packet) { p.flags, p.seq, p.ack = ack, 1001, 5001 })
		quoted := tcp(v.src, v.sport, v.dst, v.dport, ack)
		for _, seq := range []uint32{1001 + 1<<22, 1001 + 1<<30} {
			b.fromUplink(segment.with(func(p *packet) { p.seq = seq })).is("forwarded")
			quoted.seq = seq
			b.fromUplink(icmpError(node2IP, nodeIP, 3, 1, quoted.bytes(f), 8)).is("forwarded")
			b.fromUplink(segment).is("forwarded")
		}
		quoted.seq = 1001
		b.fromUplink(icmpError(node2IP, nodeIP, 3, 1, quoted.bytes(f), 8)).is("forwarded")
		b.fromUplink(segment).is("drop BACKEND_GONE")
	})
}

// Nor does one that cannot come from the node in whose name it is, of datagrams either.
func TestOutsideBackendGoneFromElsewhere(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.UDP, manyAt(remote)...).nodePort(30080, 0)
		must(t, b.destinations.Put(f.key(node2IP+"/32"), destinations.Value{
			Kind: destinations.Node, Node: b.addr(node2IP), Ifindex: uint32(b.uplink.index), Uplinks: 1 << 1,
		}))
		p := udp(world, 5000, nodeIP, 30080).with(func(p *packet) { p.payload = make([]byte, 64) })
		r := b.fromUplink(p).is("forwarded")
		b.arrive(b.other, icmpError(node2IP, nodeIP, 3, 1, r.frame, 20)).is("drop WRONG_UPLINK")
		v := b.fromUplink(p).is("forwarded").view()
		if v.dport != r.view().dport {
			t.Errorf("it was %v, is %v", r.view(), v)
		}
	})
}

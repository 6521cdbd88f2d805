package prog

import (
	"encoding/binary"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Nothing outside has the address of a Service: who sends with it would be taken for the Service.
func TestServiceAddressFromOutside(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 53, wire.UDP, remote+":53")
		asked := b.fromPod(udp(podA, 5000, vip, 53)).is("forwarded")
		for name, p := range map[string]packet{
			"the answer":        udp(vip, 53, podA, 5000),
			"another":           udp(vip2, 53, podB, 5000),
			"a segment":         tcp(vip, 443, podA, 5000, syn|ack),
			"a reply to a ping": ping(podA, 7, vip).replied(),
			"an error":          icmpError(vip, podA, 3, 3, asked.in, 8),
		} {
			for _, l := range []veth{b.uplink, b.other} {
				if r := b.arrive(l, p); r.what != "drop SPOOFED_SOURCE" {
					t.Errorf("%s: %s", name, r.what)
				}
			}
		}
	})
}

// A pod's flow to itself is nobody else's: what reaches the Service's address from outside does not enter it.
func TestServiceToItselfFromOutside(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		for _, address := range []string{vip, nodeIP} {
			b.declare(address, 80, wire.UDP, services.ClusterIP).swap(podA + ":8080")
			b.fromPod(udp(podA, 50000, address, 80)).is("delivered")
			_, before := b.pair(f.tuple(wire.UDP, podA, 50000, address, 80))
			r := b.fromUplink(udp(podA, 8080, address, 50000))
			_, after := b.pair(f.tuple(wire.UDP, podA, 50000, address, 80))
			if r.what == "delivered" || before.State != after.State {
				t.Errorf("%s, as %v; state %v, was %v", r.what, r.view(), after.State, before.State)
			}
		}
	})
}

// While it ends, a pod's packets to itself do not get to the stack with the Service's address.
func TestServiceToItselfAsItEnds(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.answers = true
		for proto, p := range map[wire.Protocol]packet{
			wire.UDP: udp(podA, 5000, vip, 80), wire.TCP: tcp(podA, 5000, vip, 80, syn), sctpProto: sctp(podA, vip),
		} {
			s := b.serve(vip, 80, proto, podA+":80")
			if proto == sctpProto {
				p.payload = binary.BigEndian.AppendUint32(nil, 5000<<16|80)
			}
			b.fromPod(p).is("delivered")
			must(t, b.endpoints.Delete(endpoints.Key{Address: b.addr(podA)}))
			if r := b.fromPod(p).is("drop NO_BACKEND"); !r.answered() {
				t.Errorf("%v: not answered", proto)
			}
			b.addPod(podA)
			s.withdraw()
		}
	})
}

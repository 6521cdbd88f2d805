package prog

import (
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// withPrivilegedPorts are what flows get that begin below 1024.
func withPrivilegedPorts(low, high uint32) option {
	return func(c *config.NodeConfig) { c.SnatPrivileged = between(low, high) }
}

// begins is a packet that opens a flow of TCP or UDP.
func begins(proto wire.Protocol, src string, sport uint16, dst string, dport uint16) packet {
	if proto == wire.TCP {
		return tcp(src, sport, dst, dport, syn)
	}
	return udp(src, sport, dst, dport)
}

// A source port below 1024 is changed to one below 1024, as servers of NFS want it, while there is one.
func TestPrivilegedPorts(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPorts(50000, 50099), withPrivilegedPorts(665, 668))
		for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
			for i, sport := range []uint16{1, 700, 1023, 665, 666, 667} {
				p := begins(proto, podA, sport, world, 2049)
				r := b.fromPod(p).is("forwarded").valid()
				b.fromUplink(answer(r, p)).is("delivered").flow(reversed(describeView(p))).valid()
				if port := r.view().sport; (port >= 665 && port <= 668) != (i < 4) || i >= 4 && port < 50000 {
					t.Errorf("flow %d of %v from port %d leaves from %d", i+1, proto, sport, port)
				}
			}
			b.fromPod(begins(proto, podA, 1024, world2, 2049)).is("forwarded").valid()
		}
		for _, p := range []packet{ping(podB, 700, world), tcp(podB, 1024, world, 2049, syn), udp(podB, 1024, world, 2049)} {
			if r := b.fromPod(p).is("forwarded"); r.view().sport < 50000 {
				t.Errorf("%v left as %v", describeView(p), r.view())
			}
		}
	})
}

// Where pods have all privileged ports that they may, the node's own flow gets one of others.
func TestPrivilegedPortsOfTheNode(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPorts(50000, 50099), withPrivilegedPorts(665, 668))
		for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
			for sport := range uint16(4) {
				b.fromPod(begins(proto, podA, 1+sport, world, 2049)).is("forwarded")
			}
			for sport := range uint16(4) {
				p := begins(proto, nodeIP, 665+sport, world, 2049)
				r := b.toUplink(p).is("stack").valid()
				if port := r.view().sport; port <= 668 || port > 1023 {
					t.Errorf("the node's flow of %v from port %d leaves from %d", proto, p.sport, port)
				}
				b.fromUplink(answer(r, p)).is("stack").flow(reversed(describeView(p))).valid()
			}
			p := begins(proto, nodeIP, 900, world, 2049)
			b.toUplink(p).is("stack").flow(describeView(p).String())
		}
	})
}

// Who has named the ports gets no others.
func TestNoPrivilegedPorts(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPorts(50000, 50099))
		for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
			if port := b.fromPod(begins(proto, podA, 700, world, 2049)).is("forwarded").view().sport; port < 50000 {
				t.Errorf("a flow of %v leaves from %d", proto, port)
			}
		}
	})
}

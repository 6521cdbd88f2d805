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

// A source port below 1024 is changed to one below 1024, as servers of NFS want it, while the pod's half of these is not used up. Another
// pod has another half.
func TestPrivilegedPorts(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPorts(50000, 50099), withPrivilegedPorts(665, 672))
		for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
			taken := map[string]map[uint16]bool{podA: {}, podB: {}}
			for _, pod := range []string{podA, podB} {
				for i, sport := range []uint16{1, 700, 1023, 665, 666, 667} {
					p := begins(proto, pod, sport, world, 2049)
					r := b.fromPod(p).is("forwarded").valid()
					b.fromUplink(answer(r, p)).is("delivered").flow(reversed(describeView(p))).valid()
					port := r.view().sport
					privileged := port >= 665 && port <= 672
					// The halves of both may overlap.
					if !privileged && port < 50000 || pod == podA && privileged != (i < 4) || pod == podB && i == 0 && !privileged {
						t.Errorf("flow %d of %s by %v from port %d leaves from %d", i+1, pod, proto, sport, port)
					}
					if privileged {
						taken[pod][port] = true
					}
				}
			}
			if len(taken[podA]) != 4 || len(taken[podB]) > 4 {
				t.Errorf("the pods have the ports %v for %v", taken, proto)
			}
			b.fromPod(begins(proto, podA, 1024, world2, 2049)).is("forwarded").valid()
		}
		for _, p := range []packet{ping(podC, 700, world), tcp(podC, 1024, world, 2049, syn), udp(podC, 1024, world, 2049)} {
			if r := b.fromPod(p).is("forwarded"); r.view().sport < 50000 {
				t.Errorf("%v left as %v", describeView(p), r.view())
			}
		}
	})
}

// The node's own flow gets one of ports that no pod can have.
func TestPrivilegedPortsOfTheNode(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPorts(50000, 50099), withPrivilegedPorts(665, 666))
		for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
			for _, pod := range []string{podA, podB} {
				port := b.fromPod(begins(proto, pod, 1, world, 2049)).is("forwarded").view().sport
				if port > 666 {
					continue // the two share their half
				}
				p := begins(proto, nodeIP, port, world, 2049)
				r := b.toUplink(p).is("stack").valid()
				if got := r.view().sport; got <= 666 || got > 1023 {
					t.Errorf("the node's flow of %v from port %d leaves from %d", proto, p.sport, got)
				}
				b.fromUplink(answer(r, p)).is("stack").flow(reversed(describeView(p))).valid()
			}
			p := begins(proto, nodeIP, 900, world, 2049)
			b.toUplink(p).is("stack").flow(describeView(p).String())
		}
	})
}

// A client outside has a port below 1024 by its own word alone.
func TestPrivilegedPortsNotOfClientsOutside(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, withPorts(50000, 50099), withPrivilegedPorts(665, 852))
		b.serve(vip, 2049, wire.TCP, remote+":2049").nodePort(30049, 0)
		r := b.fromUplink(tcp(world, 700, nodeIP, 30049, syn)).is("forwarded").valid()
		if port := r.view().sport; port < 50000 {
			t.Errorf("left as %v", r.view())
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

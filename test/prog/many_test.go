package prog

import (
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// withUsualPorts are the ports that a node with the kernel's own range of ephemeral ports masquerades to.
var withUsualPorts = withPortRanges(between(1024, 32767), between(48649, 65535))

// fillPorts is spread in IPv4 for tens of thousands of connections to a port of one host, which looks at the port alone that each gets.
// Each is answered.
func (b *bed) fillPorts(pod string, at uint16, flows int) (opened int) {
	b.Helper()
	const sourcePort, destinationPort = 34, 36 // in the frame
	to := tcp(pod, 0, world, at, syn).bytes(b.family)
	from := tcp(world, at, nodeIP, 0, syn|ack).with(func(p *packet) { p.ack, p.macTo = 1001, b.uplink.mac }).bytes(b.family)
	out := &ebpf.RunOptions{Data: to, DataOut: make([]byte, len(to)+256), Context: make([]byte, skbSize)}
	(*skb)(out.Context.([]byte)).set(skbIfindex, uint32(b.pods[pod].index))
	ports := map[uint16]bool{}
	for i := range flows {
		binary.BigEndian.PutUint16(to[sourcePort:], uint16(1+i))
		out.DataOut = out.DataOut[:cap(out.DataOut)]
		action, err := b.program(wire.FromPod).Run(out)
		must(b, err)
		if action != actRedirect {
			continue
		}
		port := out.DataOut[sourcePort : sourcePort+2]
		copy(from[destinationPort:], port)
		if b.act(wire.FromUplink, b.uplink.index, from) != actRedirect {
			continue // a refusal is a packet to the pod as well
		}
		ports[binary.BigEndian.Uint16(port)] = true
	}
	return len(ports)
}

// One pod has 28 000 connections open to one place, while another one opens 8 192 there; all pods of the node together have 48 000 there,
// and 60 000 with another place.
func TestManyConnections(t *testing.T) {
	b := newBed(t, inIPv4, withUsualPorts, withTables(1<<17, 64))
	for _, pod := range []struct {
		name  string
		flows int
	}{{podA, 28000}, {podB, 8192}} {
		if n := b.fillPorts(pod.name, 53, pod.flows); n != pod.flows {
			t.Errorf("pod %s opened %d connections, each by a port of its own, want %d", pod.name, n, pod.flows)
		}
	}
	opened := 28000 + 8192
	for _, wanted := range []struct {
		at    uint16
		flows int
	}{{53, 48000}, {54, 60000}} {
		for i := 0; opened < wanted.flows; i++ {
			if i == 8 {
				t.Fatalf("%d connections are open with port %d, want %d", opened, wanted.at, wanted.flows)
			}
			pod := fmt.Sprintf("10.244.1.%d", 100+i)
			if b.pods[pod].index == 0 {
				b.addPodAt(pod, 900+i)
			}
			opened += b.fillPorts(pod, wanted.at, wanted.flows-opened)
		}
	}
}

// A flow gets and keeps ports of each piece, and no flow gets one between the pieces, or the tunnel's.
func TestPortsInPieces(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		pieces := map[uint16]bool{2000: true, 2001: true, tunnelPort: true, 7000: true, 50000: true, 50001: true}
		b := newBed(t, f, withPortRanges(between(2000, 2001), between(tunnelPort, tunnelPort), between(7000, 7000), between(50000, 50001)))
		for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
			got := map[uint16]bool{}
			for i := range uint16(40) {
				p := tcp(podA, 50001+i, world, 100+i, syn)
				if proto == wire.UDP {
					p = udp(podA, 50001+i, world, 100+i)
				}
				r := b.fromPod(p).is("forwarded")
				b.fromUplink(answer(r, p)).is("delivered")
				port := r.view().sport
				if got[port] = true; !pieces[port] || port == tunnelPort && proto == wire.UDP || i == 0 && port != 50001 {
					t.Errorf("%v from port %d leaves from %d", proto, p.sport, port)
				}
			}
			for port := range pieces {
				if !got[port] && (port != tunnelPort || proto == wire.TCP) {
					t.Errorf("no flow of %v got the port %d: %v", proto, port, got)
				}
			}
		}
		b.fromUplink(udp(world, 101, nodeIP, 2002)).is("stack")
	})
}

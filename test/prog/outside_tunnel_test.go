package prog

import (
	"bytes"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// halves are a datagram in two fragments.
func halves(p packet) []packet {
	first := p.with(func(p *packet) { p.fragment, p.id, p.payload = moreFragments, 77, bytes.Repeat([]byte{7}, 64) })
	later := p.with(func(p *packet) { p.fragment, p.id, p.payload = 9, 77, bytes.Repeat([]byte{7}, 64) })
	return []packet{first, later}
}

// A Service that leads to a tunnel port has nobody send there with this node's address, whoever asks.
func TestNoServiceIsATunnel(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, end := range []string{node2IP, node5IP, nodeIP, "192.0.2.9"} {
			b := newBed(t, f, withServices)
			b.serve(vip, 80, wire.UDP, end+":4789").nodePort(30080, 0)
			for what, ask := range map[string]result{
				"a NodePort":                b.fromUplink(udp(world, 5000, nodeIP, 30080)),
				"another node's pod":        b.fromUplink(udp(remote, 5000, nodeIP, 30080)),
				"one behind the tunnel":     b.fromTunnel(udp(beyond, 5000, nodeIP, 30080)),
				"a ClusterIP":               b.fromUplink(udp(world, 5000, vip, 80)),
				"another network's, caught": b.toUplink(udp(container, 5000, vip, 80)),
			} {
				if ask.what != "drop TUNNEL_PORT" {
					t.Errorf("%s for %s: outcome %q", what, end, ask.what)
				}
			}
			for _, p := range halves(udp(world, 5000, nodeIP, 30080)) {
				b.fromUplink(p).is("drop TUNNEL_PORT")
			}
			b.empty()
		}
	})
}

// Nor does what a backend answers to who has asked from a tunnel port.
func TestNoAnswerIsATunnel(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, end := range []string{podB, remote, world2} {
			b := newBed(t, f, withServices)
			b.serve(vip, 80, wire.UDP, end+":8080").nodePort(30080, 0)
			p := udp(node2IP, tunnelPort, nodeIP, 30080)
			v := b.fromUplink(p).view()
			r := p.replied().with(func(p *packet) { p.src, p.sport, p.dst, p.dport = v.dst, v.dport, v.src, v.sport })
			for _, p := range append(halves(r), r) {
				b.sentBack(end, end, p).is("drop TUNNEL_PORT")
			}
		}
	})
}

// Nor what the host's own stack gets back, such as for a container that it masquerades.
func TestNoAnswerIsTheHostsTunnel(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for end, want := range map[string]string{podB: "delivered", remote: "forwarded", beyond: "forwarded", world2: "forwarded"} {
			b := newBed(t, f, withServices)
			b.serve(vip, 80, wire.UDP, end+":8080")
			v := b.toUplink(udp(nodeIP, tunnelPort, vip, 80)).is(want).view()
			for _, r := range append(halves(udp(v.dst, v.dport, v.src, v.sport)), udp(v.dst, v.dport, v.src, v.sport)) {
				b.sentBack(end, end, r).is("drop TUNNEL_PORT")
			}
		}
	})
}

// A pod of this node may be a backend on that port: there is no tunnel of the nodes'.
func TestPodOnTheTunnelPort(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, end := range []string{podB, podC} {
			b := newBed(t, f, withServices)
			b.serve(vip, 80, wire.UDP, end+":4789").nodePort(30080, 0)
			p := udp(world, 5000, nodeIP, 30080)
			b.back(b.fromUplink(p).is("delivered"), p).is("forwarded")
		}
	})
}

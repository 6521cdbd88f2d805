package prog

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// led is a flow of a client outside as netfilter has led it: to a backend, from an address of the node's unless that is empty, with a port.
type led struct {
	end, source string
	sport       uint16
	want        string // what becomes of a packet
}

// ledWays are the flows that go on here, wherever their backend is.
var ledWays = []led{
	{podB, "", 5000, "delivered"}, {podC, "", 6000, "delivered"}, {podB, nodeIP, 50001, "delivered"}, {podB, tunnelIP, 1024, "delivered"},
	{nodeIP, "", 5000, "stack"}, {nodeIP, "", 6000, "stack"},
	{remote, nodeIP, 50001, "forwarded"}, {remote, nodeIP, 1024, "forwarded"}, {beyond, tunnelIP, 1024, "forwarded"}, {beyond, nodeIP, 50001, "forwarded"},
	{node2IP, nodeIP, 1024, "forwarded"}, {native, nodeIP, 1024, "forwarded"}, {world2, nodeOtherIP, 1024, "forwarded"},
}

// leads has netfilter lead the flow of a packet.
func (b *bed) leads(p packet, l led, state uint8, status uint32) {
	b.Helper()
	change := []translation{{ctaNATDestination, l.end, 8080}}
	if l.source != "" || l.sport != p.sport {
		change = append(change, translation{ctaNATSource, l.from(p), l.sport})
	}
	if p.proto != wire.TCP {
		state = 0
	}
	b.netfilterHasAt(state, b.tuple(p.proto, p.src, p.sport, p.dst, p.dport), status, change...)
}

// from is where the packet comes from to the backend.
func (l led) from(p packet) string {
	if l.source == "" {
		return p.src
	}
	return l.source
}

// answered is what the backend sends to a packet that has come to it so.
func (b *bed) answered(p packet, l led) result {
	b.Helper()
	sent := result{b: b, frame: p.with(func(p *packet) { p.src, p.sport, p.dst, p.dport = l.from(*p), l.sport, l.end, 8080 }).bytes(b.family)}
	return b.back(sent, p)
}

// netfilterFlows counts what netfilter knows.
func (b *bed) netfilterFlows() int {
	b.Helper()
	flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, each[netlink.InetFamily](b.family, netlink.FAMILY_V4, netlink.FAMILY_V6))
	must(b, err)
	return len(flows)
}

// ongoing is a packet in the middle of a flow.
func ongoing(proto wire.Protocol, src string, dst string, dport uint16) packet {
	p := initial(proto, src, 5000, dst, dport)
	p.flags = ack
	return p
}

// A flow of a client outside that netfilter has led goes on to its backend, past netfilter in both directions, from the address and port
// that netfilter has chosen. Until the client sends again, its answers are netfilter's.
func TestOutsideTakenOver(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for i, l := range ledWays {
			for j, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
				client := []string{world, remote, beyond, world}[(i+j)%4]
				at := []string{nodeIP, nodeOtherIP, external, vip}[(i+2*j)%4]
				if client != world && at != nodeIP && at != nodeOtherIP { // who asks at home
					client = world
				}
				t.Run(fmt.Sprintf("%v %s by %s to %s from %s:%d", proto, client, at, l.end, l.source, l.sport), func(t *testing.T) {
					tellTakenOver(newBed(t, f, withServices, besideNetfilter), proto, client, at, l)
				})
			}
		}
	})
}

func tellTakenOver(b *bed, proto wire.Protocol, client, at string, l led) {
	b.Helper()
	s := b.serve(vip, 80, proto, many(8080, 15, l.end+":8080")...).nodePort(80, 0).loadBalancer(external, 80, 0)
	p := ongoing(proto, client, at, 80)
	b.leads(p, l, tcpEstablished, assured)
	known := b.netfilterFlows()
	if l.end != nodeIP { // whose answers netfilter has translated before they leave
		b.leftToStack("an answer, before", b.answered(p, l))
	}
	for range 3 {
		b.asks(p).is(l.want).valid().flow(ends(proto, l.from(p), l.sport, l.end, 8080))
		if n := b.netfilterFlows(); n != known-1 {
			b.Errorf("netfilter knows %d flows, of %d", n, known)
		}
		left := map[bool]string{true: "stack", false: "forwarded"}[l.end == nodeIP]
		b.answered(p, l).is(left).valid().flow(ends(proto, at, 80, client, 5000))
	}
	forward, reverse := b.pair(b.tuple(proto, client, 5000, at, 80))
	counted := l.source != "" && l.sport >= 49152 // then towards its destination as well: in all, for the client, and for the world
	if (forward.Flags&flow.Counted != 0) != counted || b.portsCounted() != map[bool]uint32{true: 4, false: 1}[counted] {
		b.Errorf("counted as %v, %d times", forward.Flags, b.portsCounted())
	}
	if forward.Backend != s.all[15] || reverse.Ifindex != 0 {
		b.Errorf("halves %+v and %+v", forward, reverse)
	}
	world, err := b.devices.Get(devices.Key{})
	must(b, err)
	if anyPort := l.source != "" && l.sport < 49152; (world.Flags&devices.AnyPort != 0) != anyPort || world.SnatFlows != 1 {
		b.Errorf("the world has %d flows and is %v", world.SnatFlows, world.Flags)
	}
	b.sweep(0, 86401e9, false)
	b.empty()
}

// What netfilter has seen of a flow counts: one that is established, or has been answered for a while, lives on though the backend says nothing.
func TestOutsideTakenOverLives(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, c := range []struct {
			p             packet
			state         uint8
			status        uint32
			lives, beyond time.Duration
		}{
			{ongoing(wire.TCP, world, nodeIP, 80), tcpEstablished, assured, 23 * time.Hour, 25 * time.Hour},
			{tcp(world, 5000, nodeIP, 80, syn), tcpSynSent, 0, 15 * time.Second, 25 * time.Second},
			{udp(world, 5000, nodeIP, 80), 0, assured, 170 * time.Second, 190 * time.Second},
			{udp(world, 5000, nodeIP, 80), 0, seenReply, 25 * time.Second, 35 * time.Second},
			{ongoing(wire.TCP, podA, vip, 80), tcpEstablished, assured, 23 * time.Hour, 25 * time.Hour},
		} {
			b := newBed(t, f, withServices, besideNetfilter)
			b.serve(vip, 80, c.p.proto, remote+":8080").nodePort(80, 0)
			l := led{remote, nodeIP, 50001, "forwarded"}
			send := b.fromUplink
			if c.p.src == podA {
				l, send = led{remote, "", 5000, "forwarded"}, b.fromPod
			}
			b.leads(c.p, l, c.state, c.status)
			send(c.p).is("forwarded")
			if n := b.sweep(0, c.lives, false); n != 0 {
				t.Errorf("%v in state %d, status %d ended within %v", c.p.proto, c.state, c.status, c.lives)
			}
			if n := b.sweep(0, c.beyond, false); n != 1 {
				t.Errorf("%v in state %d, status %d lives for %v", c.p.proto, c.state, c.status, c.beyond)
			}
		}
	})
}

// A SYN that anybody may have sent goes where the connection goes. One after a FIN or RST opens another, and what else is left of that
// one stays netfilter's.
func TestOutsideTakenOverSyn(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for state, want := range map[uint8]string{tcpSynSent: remote, tcpEstablished: remote, tcpFinWait: podB} {
			b := newBed(t, f, withServices, besideNetfilter)
			s := b.serve(vip, 80, wire.TCP, remote+":8080", podB+":8080").nodePort(80, 0)
			s.block(s.all[1:], nil)
			s.block([]uint32{s.all[1], s.all[1], s.all[1], s.all[1], s.all[1], s.all[0]}, nil)
			status := map[bool]uint32{true: 0, false: assured}[state == tcpSynSent]
			p := tcp(world, 5000, nodeIP, 80, syn)
			b.leads(p, led{remote, nodeIP, 50001, ""}, state, status)
			if want == podB {
				s.block(s.all[1:], nil)
				b.leftToStack("what is left", b.fromUplink(p.with(func(p *packet) { p.flags = ack })))
			}
			for range 2 {
				if v := b.fromUplink(p).view(); v.dst != want {
					t.Errorf("in state %d: left as %v", state, v)
				}
			}
			if n := b.netfilterFlows(); n != 0 {
				t.Errorf("in state %d: netfilter knows %d flows", state, n)
			}
			b.count(1, 0)
		}
	})
}

// Of a backend that serves no more, TCP goes on all the same; a datagram and a SYN go to another.
func TestOutsideTakenOverFromAnEndedBackend(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for what, c := range map[string]struct {
			p  packet
			to string
		}{
			"a datagram": {udp(world, 5000, nodeIP, 80), podB}, "a segment": {ongoing(wire.TCP, world, nodeIP, 80), remote}, "a SYN": {tcp(world, 5000, nodeIP, 80, syn), podB},
		} {
			b := newBed(t, f, withServices, besideNetfilter)
			b.serve(vip, 80, c.p.proto, podB+":8080").nodePort(80, 0)
			b.leads(c.p, led{remote, nodeIP, 1024, ""}, tcpEstablished, assured)
			for range 2 {
				if v := b.fromUplink(c.p).view(); v.dst != c.to {
					t.Errorf("%s left as %v", what, v)
				}
			}
		}
		b := newBed(t, f, withServices, besideNetfilter)
		b.answers = true
		b.serve(vip, 80, wire.TCP, podB+":8080").nodePort(80, 0)
		b.deletePod(podB)
		p := ongoing(wire.TCP, world, nodeIP, 80)
		b.leads(p, led{podB, "", 5000, ""}, tcpEstablished, assured)
		b.fromUplink(p).is("drop BACKEND_GONE")
	})
}

// What could not go on here, or there is no room for, stays netfilter's.
func TestOutsideNotTakenOver(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, besideNetfilter)
		b.serve(vip, 80, wire.TCP, podB+":8080", remote+":8080", nodeIP+":8080").nodePort(80, 0).loadBalancer(external, 80, 0)
		port := uint16(5000)
		left := func(what string, l led, change func(*packet)) {
			t.Helper()
			for _, at := range []string{nodeIP, external} {
				port++
				p := tcp(world, port, at, 80, ack)
				l.sport = port
				b.leads(p, l, tcpEstablished, assured)
				known := b.netfilterFlows()
				if r := b.fromUplink(p.with(change)); r.what != "stack" || !bytes.Equal(r.in, r.frame) {
					t.Errorf("%s, to %s: outcome %q, left as %v", what, at, r.what, r.view())
				}
				if n := b.netfilterFlows(); n != known {
					t.Errorf("%s, to %s: netfilter knows %d flows, of %d", what, at, n, known)
				}
			}
		}
		plain := func(*packet) {}
		left("a backend that answers the client itself", led{end: remote}, plain)
		left("from somebody else's address", led{end: remote, source: container}, plain)
		left("the host's own, from the node", led{end: nodeIP, source: nodeIP}, plain)
		left("to nowhere", led{end: foreign, source: nodeIP}, plain)
		left("with options", led{end: remote, source: nodeIP}, func(p *packet) { p.options = true })
		left("at its last hop", led{end: remote, source: nodeIP}, func(p *packet) { p.ttl = 1 })
		b.empty()
		if n := b.portsCounted(); n != 0 {
			t.Errorf("%d ports are counted", n)
		}
	})
}

// A port towards the backend that another flow has is no port for a second one, and nobody gets more than its share.
func TestOutsideTakenOverWithoutRoom(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, besideNetfilter, withTables(16, 16))
		b.serve(vip, 80, wire.TCP, remote+":8080").nodePort(80, 0)
		b.leads(ongoing(wire.TCP, world, nodeIP, 80), led{remote, nodeIP, 50001, ""}, tcpEstablished, assured)
		b.fromUplink(ongoing(wire.TCP, world, nodeIP, 80)).is("forwarded")
		taken, left := 0, 0
		for port := uint16(6000); port < 6030; port++ {
			p := tcp(world2, port, nodeIP, 80, ack)
			b.leads(p, led{remote, nodeIP, port, ""}, tcpEstablished, assured)
			if b.fromUplink(p).what == "stack" {
				left++
			} else {
				taken++
			}
		}
		if taken < 3 || left < 15 {
			t.Errorf("%d are taken over, %d left", taken, left)
		}
		b.count(1+taken, 0)
		if n := b.netfilterFlows(); n != left {
			t.Errorf("netfilter knows %d flows, not %d", n, left)
		}
	})
}

// Who has no entry of netfilter's has nothing there to take over, and what may not come from there does not.
func TestOutsideForgedTakeover(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, besideNetfilter)
		b.answers = true
		b.serve(vip, 80, wire.TCP, remote+":8080").nodePort(80, 0).loadBalancer(external, 80, 0)
		b.leads(ongoing(wire.TCP, world, nodeIP, 80), led{remote, nodeIP, 50001, ""}, tcpEstablished, assured)
		b.leads(ongoing(wire.TCP, nodeOtherIP, external, 80), led{remote, nodeIP, 50002, ""}, tcpEstablished, assured)
		b.leads(ongoing(wire.TCP, podA, nodeIP, 80), led{remote, nodeIP, 50003, ""}, tcpEstablished, assured)
		b.leftToStack("another port", b.fromUplink(tcp(world, 5001, nodeIP, 80, ack)))
		b.leftToStack("another client", b.fromUplink(tcp(world2, 5000, nodeIP, 80, ack)))
		b.leftToStack("no port of a Service's", b.fromUplink(tcp(world, 5000, nodeIP, 22, ack)))
		b.fromUplink(tcp(nodeOtherIP, 5000, external, 80, ack)).is("drop SPOOFED_SOURCE")
		b.leftToStack("a pod's, from outside", b.fromUplink(tcp(podA, 5000, nodeIP, 80, ack)))
		b.empty()
		if n := b.netfilterFlows(); n != 3 {
			t.Errorf("netfilter knows %d flows", n)
		}
	})
}

// What answers a flow of netfilter's is no question to a NodePort that happens to have its port; and what netfilter has made an answer of
// a NodePort is nothing that the host has asked from there.
func TestNetfiltersAnswersAtNodePorts(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, besideNetfilter)
		b.serve(vip, 80, wire.UDP, remote+":8080").nodePort(30080, 0).nodePort(30081, 0)
		p := udp(world, 5000, nodeIP, 30081)
		b.leads(p, led{remote, nodeIP, 30080, ""}, 0, seenReply)
		b.leftToStack("an answer to netfilter's port", b.fromUplink(udp(remote, 8080, nodeIP, 30080)))
		b.leftToStack("an answer from netfilter", b.toUplink(udp(nodeIP, 30081, world, 5000)))
		b.empty()
		b.leftToStack("a question of the host's", b.toUplink(udp(nodeIP, 30081, world, 5001)))
		b.count(1, 0)
		b.fromUplink(p).is("forwarded").flow(ends(wire.UDP, nodeIP, 30080, remote, 8080))
		b.fromUplink(udp(remote, 8080, nodeIP, 30080)).is("forwarded").flow(ends(wire.UDP, nodeIP, 30081, world, 5000))
	})
}

// Errors about what has been taken over reach the client and the backend, also by a port that is none to masquerade to; and the host's
// own sockets keep off such ports.
func TestOutsideTakenOverErrors(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, l := range ledWays {
			b := newBed(t, f, withServices, besideNetfilter)
			b.serve(vip, 80, wire.UDP, l.end+":8080").nodePort(80, 0)
			p := udp(world, 5000, nodeIP, 80).with(func(p *packet) { p.payload = bytes.Repeat([]byte{7}, 64) })
			b.leads(p, l, 0, assured)
			out := b.fromUplink(p).is(l.want)
			left := map[bool]string{true: "stack", false: "forwarded"}[l.end == nodeIP]
			e := icmpError(l.end, out.view().src, 3, 3, out.frame, 20)
			checkError(t, "from "+l.end, b.sentBack(l.end, l.end, e).is(left), e, nodeIP, world, p.flowOf())
			in := b.answered(p, l)
			e = icmpError(world, nodeIP, 3, 3, in.frame, 20)
			checkError(t, "to "+l.end, b.fromUplink(e).is(l.want), e, l.from(p), l.end, reversed(out.view()))
			if l.source != nodeIP || l.want != "forwarded" {
				continue
			}
			if v := b.toUplink(udp(nodeIP, l.sport, l.end, 8080)).is("forwarded").view(); v.sport == l.sport {
				t.Errorf("the host's own left as %v", v)
			}
		}
	})
}

// As soon as Services yield again, what has been taken over goes on.
func TestOutsideTakenOverAndYielded(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newYieldingBed(t, f)
		b.serve(vip, 80, wire.TCP, remote+":8080").nodePort(80, 0)
		p, l := ongoing(wire.TCP, world, nodeIP, 80), led{end: remote, source: nodeIP}
		b.leads(p, l, tcpEstablished, assured)
		b.leftToStack("while they yield", b.fromUplink(p))
		if n := b.netfilterFlows(); n != 1 {
			t.Errorf("netfilter knows %d flows", n)
		}
		b.configure(0)
		b.fromUplink(p).is("forwarded")
		b.yields(f)
		b.fromUplink(p).is("forwarded")
		b.answered(p, l).is("forwarded").flow(ends(wire.TCP, nodeIP, 80, world, 5000))
		for k, v := range all[snat.Key, snat.Value](b, b.reverse) {
			if v.State&flow.ACK == 0 {
				t.Errorf("%v: %+v", k, v)
			}
		}
	})
}

// What answers a flow that netfilter masquerades is no question to a pod that happens to have its port as a host port.
func TestNetfiltersAnswersAtHostPorts(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, besideNetfilter)
		b.serve(vip, 80, wire.UDP, remote+":8080").nodePort(30081, 0)
		b.hostPort(anyOwn, 30080, wire.UDP, podB)
		p := udp(world, 5000, nodeIP, 30081)
		b.leads(p, led{remote, nodeIP, 30080, ""}, 0, seenReply)
		b.leftToStack("an answer to netfilter's port", b.fromUplink(udp(remote, 8080, nodeIP, 30080)))
		b.fromUplink(udp(remote, 8081, nodeIP, 30080)).is("delivered")
	})
}

package prog

import (
	"bytes"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// A victim is a flow of podA's, or of the node's, and how its next packets go; attacks on it are by podB.
type victim struct {
	received packet // what another could quote: a packet that reached the flow's owner
	goesOn   func() // fails the test unless the flow does
}

// victims makes a flow of each kind.
func (b *bed) victims() map[string]victim {
	masqueraded := tcp(podA, 50000, world, 80, syn)
	out := b.fromPod(masqueraded).is("forwarded")
	next := masqueraded.with(func(p *packet) { p.flags = ack })
	back := answer(out, masqueraded).with(func(p *packet) { p.flags = ack })
	recorded := tcp(world, 4000, podA, 80, syn)
	b.fromUplink(recorded).is("delivered")
	b.fromPod(tcp(podB, 50001, world, 80, syn)).is("forwarded")
	nodes := tcp(nodeIP, 50001, world, 80, syn)
	moved := b.toUplink(nodes).is("stack")
	return map[string]victim{
		"masqueraded": {next.replied(), func() {
			b.fromPod(next).is("forwarded").flow(out.view().String())
			b.fromUplink(back).is("delivered")
		}},
		"masqueraded, as the world sees it": {back, func() { b.fromUplink(back).is("delivered") }},
		"opened by the world": {recorded, func() {
			b.fromPod(tcp(podA, 80, world, 4000, ack)).is("forwarded").flow("tcp " + podA + ":80 > " + world + ":4000")
		}},
		"the node's": {nodes.replied(), func() {
			b.toUplink(nodes.with(func(p *packet) { p.flags = ack })).is("stack").flow(moved.view().String())
		}},
	}
}

// A pod that quotes another's packet in an ICMP error ends nothing, wherever it sends the error and whichever program sees it.
func TestForgedErrorFromPod(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for name, v := range b.victims() {
			for _, quoted := range []packet{v.received, v.received.replied()} {
				for what, kind := range icmpErrors {
					for _, to := range []string{world, world2, remote, node2IP, native, nodeIP, podA, podC, noPod} {
						e := icmpError(podB, to, kind[0], kind[1], quoted.bytes(b.family), 20)
						if got := b.fromPod(e).what; got != "drop FORGED_ERROR" {
							t.Errorf("%s, %s, to %s: outcome %q", name, what, to, got)
						}
					}
					b.toUplink(icmpError(podB, world, kind[0], kind[1], quoted.bytes(b.family), 20)).is("drop FORGED_ERROR")
				}
			}
			v.goesOn()
		}
		b.count(3, 1)
	})
}

// Beside netfilter the same holds.
func TestForgedErrorFromPodBesideNetfilter(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, besideNetfilter)
		for _, to := range []string{podA, remote, world} {
			e := icmpError(podB, to, 3, 3, udp(remote, 53, podA, 5000).bytes(b.family), 8)
			b.fromPod(e).is("drop FORGED_ERROR")
		}
	})
}

// What arrives from outside for a pod quotes a packet of that pod, or it is forged; one to the node that quotes another
// address's flow likewise. What quotes no flow of ours is the stack's.
func TestForgedErrorFromOutside(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		out := b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		for _, from := range []string{world, "192.0.2.1", remote, node2IP, native} {
			b.fromUplink(icmpError(from, podA, 3, 1, udp(podA, 5000, remote, 53).bytes(b.family), 8)).is("delivered")
			b.fromUplink(icmpError(from, podB, 3, 1, udp(podA, 5000, remote, 53).bytes(b.family), 8)).is("drop FORGED_ERROR")
			b.fromUplink(icmpError(from, podB, 3, 1, udp(remote, 53, podB, 5000).bytes(b.family), 8)).is("drop FORGED_ERROR")
			b.fromUplink(icmpError(from, nodeOtherIP, 3, 1, out.frame, 8)).is("drop FORGED_ERROR")
			b.fromUplink(icmpError(from, nodeOtherIP, 3, 1, udp(nodeIP, 5000, world, 53).bytes(b.family), 8)).is("stack")
		}
		b.fromUplink(icmpError(podB, podA, 3, 1, udp(podA, 5000, remote, 53).bytes(b.family), 8)).is("drop SPOOFED_SOURCE")
		b.count(1, 0)
	})
}

// A pod's errors about what it was sent pass, also about protocols that nobody translates.
func TestErrorsAboutPodToPodFlows(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for _, peer := range []struct{ addr, want string }{{podA, "delivered"}, {remote, "forwarded"}, {node2IP, "forwarded"}, {nodeIP, "stack"}} {
			for what, kind := range icmpErrors {
				for _, got := range []packet{udp(peer.addr, 53, podB, 5000), sctp(peer.addr, podB), ping(peer.addr, 0, podB)} {
					if r := b.fromPod(icmpError(podB, peer.addr, kind[0], kind[1], got.bytes(b.family), 8)); r.what != peer.want {
						t.Errorf("%s to %s about %s: outcome %q", what, peer.addr, describe(got.bytes(b.family)), r.what)
					}
				}
			}
		}
		b.empty()
	})
}

// An error that is cut off before the addresses it quotes, or in pieces, says nothing that could be believed.
func TestErrorsThatCannotBeJudged(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		whole := icmpError(podB, podA, 3, 3, udp(podA, 53, podB, 5000).bytes(b.family), 8)
		for _, size := range []int{0, 4, 19} {
			e := whole.with(func(p *packet) { p.quote = p.quote[:size] })
			b.fromPod(e).is("drop FORGED_ERROR")
			e.src, e.dst = remote, podB
			b.fromUplink(e).is("drop FORGED_ERROR")
		}
		first := whole.with(func(p *packet) { p.fragment = moreFragments })
		b.fromPod(first).is("drop INVALID")
		first = icmpError(remote, podB, 3, 3, udp(podB, 5000, remote, 53).bytes(b.family), 8)
		first.fragment = moreFragments
		b.fromUplink(first).is("drop INVALID")
		short := packet{proto: wire.ICMP, src: podB, dst: podA, raw: true, payload: []byte{3, 3, 0, 0}}
		b.fromPod(short).is("drop INVALID")
	})
}

// An error about an error, and one about ports of 0, find no flow, not even one with port 0.
func TestErrorsAboutOddPackets(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromPod(udp(podB, 0, world, 0)).is("forwarded")
		b.fromUplink(packet{proto: 50, src: world, dst: podB, payload: make([]byte, 64)}).is("delivered")
		inner := icmpError(world, podB, 3, 3, udp(podB, 5000, world, 53).bytes(b.family), 8)
		b.fromPod(icmpError(podB, world, 3, 3, inner.bytes(b.family), 36)).is("drop NO_MAPPING")
		b.fromPod(icmpError(podB, world, 3, 3, packet{proto: 50, src: world, dst: podB, payload: make([]byte, 64)}.bytes(b.family), 36)).is("drop NO_MAPPING")
		if v := b.fromPod(icmpError(podB, world, 3, 3, udp(world, 0, podB, 0).bytes(b.family), 8)).is("forwarded").view(); v.src != nodeIP {
			t.Errorf("left as %v", v)
		}
		b.count(1, 1)
	})
}

// An error neither renews a flow nor removes what an earlier owner left.
func TestErrorsChangeNoFlow(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		masqueraded, recorded := udp(podA, 50000, world, 53), udp(world, 4000, podA, 53)
		out := b.fromPod(masqueraded).is("forwarded")
		b.fromUplink(recorded).is("delivered")
		b.age(2 * time.Second)
		before, reverse, tracked := all(b, b.snat), all(b, b.reverse), all(b, b.conntrack)
		errors := func(outcome string) {
			b.fromPod(icmpError(podA, world, 3, 3, masqueraded.replied().bytes(b.family), 8)).is(outcome)
			b.fromPod(icmpError(podA, world, 3, 3, recorded.bytes(b.family), 8)).is(outcome)
		}
		errors("forwarded")
		b.fromUplink(icmpError(world, nodeIP, 3, 3, out.frame, 8)).is("delivered")
		b.giveAway(podA, podB)
		b.pods[podA] = b.pods[podB]
		errors("drop NO_MAPPING")
		b.fromUplink(icmpError(world, nodeIP, 3, 3, out.frame, 8)).is("stack")
		same(t, before, all(b, b.snat))
		same(t, reverse, all(b, b.reverse))
		same(t, tracked, all(b, b.conntrack))
	})
}

// same says which entries of a table have changed.
func same[K, V comparable](t *testing.T, before, after map[K]V) {
	t.Helper()
	if len(before) != len(after) {
		t.Errorf("%d entries have become %d", len(before), len(after))
	}
	for k, v := range before {
		if after[k] != v {
			t.Errorf("%+v was %+v, is %+v", k, v, after[k])
		}
	}
}

// A redirect would have a host send its packets to whom the sender likes. Nobody sends one to a pod or for it; the node's own
// are the stack's to judge.
func TestRedirects(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := udp(podA, 50000, world, 53)
		out := b.fromPod(p).is("forwarded")
		in := b.fromUplink(answer(out, p)).is("delivered")
		for code := range uint8(4) {
			for _, to := range []string{world, podB, remote, node2IP, nodeIP} {
				b.fromPod(icmpError(podA, to, 5, code, in.frame, 8)).is("drop ICMP_REDIRECT")
			}
			b.toUplink(icmpError(podA, world, 5, code, in.frame, 8)).is("drop ICMP_REDIRECT")
			// In IPv6 a redirect is no error about a packet: the node judges it.
			b.fromUplink(icmpError("192.0.2.1", nodeIP, 5, code, out.frame, 8)).is(each(f, "drop ICMP_REDIRECT", "stack"))
			for _, to := range []string{podA, nodeIP, tunnelIP} {
				b.fromTunnel(icmpError(node5IP, to, 5, code, udp(to, 5000, beyond, 53).bytes(b.family), 8)).is("drop ICMP_REDIRECT")
			}
			for _, from := range []string{world, remote, node2IP} {
				b.fromUplink(icmpError(from, podA, 5, code, udp(podA, 5000, remote, 53).bytes(b.family), 8)).is("drop ICMP_REDIRECT")
			}
			e := b.fromUplink(icmpError("192.0.2.1", nodeIP, 5, code, udp(nodeIP, 5000, world, 53).bytes(b.family), 8)).is("stack")
			if !bytes.Equal(e.in, e.frame) {
				t.Error("a redirect to the node was changed")
			}
		}
	})
}

// An error about a masqueraded flow comes from no address that nobody outside has, and by no uplink that does not lead there.
func TestErrorsFromNobody(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.bit(b.uplink, 0)
		b.bit(b.other, 1)
		out := b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		for _, from := range []string{podB, noPod, nodeIP, nodeOtherIP, "127.0.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255"} {
			if r := b.fromUplink(icmpError(from, nodeIP, 3, 3, out.frame, 8)); r.what != "drop SPOOFED_SOURCE" {
				t.Errorf("from %s: outcome %q", from, r.what)
			}
		}
		must(t, b.destinations.Put(b.key("10.244.2.0/24"), destinations.Value{
			Kind: destinations.PodCIDR, Ifindex: uint32(b.uplink.index), Node: b.addr(node2IP), MTU: mtu, Uplinks: 1,
		}))
		b.arrive(b.other, icmpError(remote, nodeIP, 3, 3, out.frame, 8)).is("drop WRONG_UPLINK")
		b.fromUplink(icmpError(remote, nodeIP, 3, 3, out.frame, 8)).is("delivered")
	})
}

// Our mark says that a packet is an answer of the node's own only where it did not come through the tunnel: who sends from
// there may be able to have the node's own rules mark it.
func TestFromTunnelJudgesWhatIsMarked(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		run := func(src string) result {
			return b.run(wire.FromTunnel, b.tunnel, udp(src, 4000, podA, 53).bytes(f), map[int]uint32{skbMark: mark})
		}
		for _, over := range []family{f, f.opposite()} {
			b.comesOver(over, node5IP, vni)
			run(beyond).is("delivered")
			run(remote).is("drop TUNNEL_SOURCE")
			run(world).is("drop TUNNEL_SOURCE")
			b.comesOver(over, node5IP, vni+1)
			run(beyond).is("drop TUNNEL_VNI")
		}
		b.comesFrom("", 0)
		b.leftToStack("an answer", run(beyond))
	})
}

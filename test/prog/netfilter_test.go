package prog

import (
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// service is a Service's address, which no map knows: it looks like the world.
const service = "172.30.0.10"

// besideNetfilter has the programs work beside netfilter's address translation.
func besideNetfilter(c *config.NodeConfig) { c.NetfilterNat = config.Translates }

// besideMasquerading has netfilter masquerade others' packets alone.
func besideMasquerading(c *config.NodeConfig) { c.NetfilterNat = config.Masquerades }

// sctp is a packet of a protocol that only netfilter translates.
func sctp(src, dst string) packet {
	return packet{proto: 132, src: src, dst: dst, payload: make([]byte, 12)}
}

// What began past the stack goes on past it, also to a neighbour that does not resolve yet: a firewall would drop it as invalid, before
// anybody asks for the neighbour. What may begin there takes both ways in turn.
func TestFlowsToUnresolved(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, with := range []option{besideNetfilter, func(*config.NodeConfig) {}} {
			b := newBed(t, f, with)
			b.stayOnCPU() // paths are each processor's
			for _, c := range []struct {
				p    packet
				want string
			}{
				{tcp(podA, 80, mute, 5000, syn|ack), "forwarded"},
				{ping(podA, 7, mute), "forwarded"},
				{ping(podA, 7, mute), "stack"},
				{ping(mute, 7, podA).replied(), "forwarded"},
				{tcp(podA, 5000, mute, 80, syn), "forwarded"},
				{tcp(podA, 5000, mute, 80, syn), "stack"},
				{udp(podA, 5000, mute, 53), "forwarded"},
				{udp(podA, 5000, mute, 53), "stack"},
			} {
				b.fromPod(c.p).is(c.want)
			}
		}
	})
}

// Only what one pod sends to another passes netfilter by; everything else walks the stack, both ways.
func TestBesideNetfilter(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, besideNetfilter)
		for _, c := range []struct {
			p    packet
			want string
		}{
			{udp(podA, 5000, podB, 53), "delivered"},
			{tcp(podA, 5000, podB, 80, syn), "delivered"},
			{tcp(podA, 5000, podC, 80, ack), "delivered"},
			{ping(podA, 7, podB), "delivered"},
			{udp(podA, 5000, remote, 53), "forwarded"},
			{tcp(podA, 5000, remote, 80, ack), "forwarded"},
			{ping(podA, 7, remote), "forwarded"},
			{sctp(podA, podB), "stack"},
			{sctp(podA, remote), "stack"},
			{udp(podA, 5000, podB, 53).with(func(p *packet) { p.fragment = 8 }), "stack"},
			{udp(podA, 5000, service, 53), "stack"},
			{tcp(podA, 5000, service, 80, ack), "stack"},
			{sctp(podA, service), "stack"},
			{udp(podA, 5000, node2IP, 53), "stack"},
			{udp(podA, 5000, native, 53), "stack"},
			{udp(podA, 5000, nodeIP, 53), "stack"},
			{udp(podA, 5000, noPod, 53), "drop NO_ENDPOINT"},
		} {
			b.fromPod(c.p).is(c.want)
		}
		for _, c := range []struct {
			p    packet
			want string
		}{
			{udp(remote, 5000, podA, 53), "delivered"},
			{tcp(remote, 5000, podA, 80, syn|ack), "delivered"},
			{sctp(remote, podA), "stack"},
			{udp(node2IP, 5000, podA, 53), "stack"},
			{udp(native, 5000, podA, 53), "stack"},
			{udp(world, 5000, podA, 53), "stack"},
			{udp(podB, 5000, podA, 53), "drop SPOOFED_SOURCE"},
		} {
			b.fromUplink(c.p).is(c.want)
		}
	})
}

// What netfilter translates stays with it: a client's packets to its Service come back from a backend, on this node or
// on another.
func TestRepliesOfTranslatedFlowsMeetNetfilter(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, backend := range map[string]string{"same node": podB, "other node": remote} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f, besideNetfilter)
				b.netfilterTranslates(b.tuple(wire.TCP, podA, 5000, service, 80), ctaNATDestination, backend, 8080)
				b.netfilterTranslates(b.tuple(wire.UDP, podA, 5000, service, 53), ctaNATDestination, backend, 5353)
				reply := b.fromPod
				if backend == remote {
					reply = b.fromUplink
				}
				reply(tcp(backend, 8080, podA, 5000, syn|ack)).is("stack")
				reply(tcp(backend, 8080, podA, 5000, ack)).is("stack")
				reply(udp(backend, 5353, podA, 5000)).is("stack")
				// An error of the backend's about the client's packet, which it got with its own address.
				for _, got := range []packet{tcp(podA, 5000, backend, 8080, ack), udp(podA, 5000, backend, 5353)} {
					reply(icmpError(backend, podA, 3, 3, got.bytes(b.family), 8)).is("stack")
				}
				// Straight to the backend: a SYN, and a datagram, that netfilter would have to move to another port; or another flow.
				b.fromPod(tcp(podA, 5000, backend, 8080, syn)).is("stack")
				b.fromPod(udp(podA, 5000, backend, 5353)).is("stack")
				straight := b.fromPod(tcp(podA, 5001, backend, 8080, syn)).what
				if straight != "delivered" && straight != "forwarded" {
					t.Errorf("another flow: outcome %q", straight)
				}
				got := tcp(podA, 5001, backend, 8080, ack)
				if what := reply(icmpError(backend, podA, 3, 3, got.bytes(b.family), 8)).what; what != "delivered" {
					t.Errorf("an error about another flow: outcome %q", what)
				}
			})
		}
	})
}

// A flow of which netfilter has seen anything stays with it, in both directions: it would call the rest invalid.
func TestFlowsThatNetfilterKnowsStayWithIt(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, besideNetfilter)
		b.netfilterKnows(b.tuple(wire.TCP, podA, 5000, podB, 80))
		b.netfilterKnows(b.tuple(wire.UDP, podA, 5000, remote, 53))
		b.fromPod(tcp(podA, 5000, podB, 80, syn)).is("stack")
		b.fromPod(tcp(podB, 80, podA, 5000, syn|ack)).is("stack")
		b.fromPod(tcp(podA, 5000, podB, 80, ack)).is("stack")
		b.fromPod(udp(podA, 5000, remote, 53)).is("stack")
		b.fromUplink(udp(remote, 53, podA, 5000)).is("stack")
		b.fromPod(tcp(podA, 5001, podB, 80, syn)).is("delivered")
	})
}

// A port that netfilter masquerades another flow to towards that destination is not free.
func TestPortsOfNetfilterAreAvoided(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, c := range map[string]struct {
			open func(podPort uint16) packet
			flow wire.Tuple
		}{
			"TCP": {func(p uint16) packet { return tcp(podA, p, world, 80, syn) }, f.tuple(wire.TCP, "192.168.7.7", 999, world, 80)},
			"UDP": {func(p uint16) packet { return udp(podA, p, world, 80) }, f.tuple(wire.UDP, "192.168.7.7", 999, world, 80)},
		} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f, besideNetfilter)
				b.netfilterTranslates(c.flow, ctaNATSource, nodeIP, 50000)
				v := b.toUplink(c.open(50000)).is("stack").view()
				if v.src != nodeIP || v.sport == 50000 || v.sport < 49152 {
					t.Errorf("masqueraded to %s port %d", v.src, v.sport)
				}
				if v := b.toUplink(c.open(50001)).is("stack").view(); v.sport != 50001 {
					t.Errorf("a free port was not kept: %d", v.sport)
				}
			})
		}
	})
}

// Where netfilter masquerades others' packets alone, pods' take the ways that they have without it, but for the ports.
func TestBesideMasquerading(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, besideMasquerading)
		b.netfilterKnows(b.tuple(wire.UDP, podA, 5000, podB, 53))
		for _, c := range []struct {
			p    packet
			want string
		}{
			{udp(podA, 5000, podB, 53), "delivered"},
			{sctp(podA, remote), "forwarded"},
			{udp(podA, 5000, native, 53), "forwarded"},
			{udp(podA, 5000, world, 53), "forwarded"},
			{udp(podA, 5000, nodeIP, 53), "stack"},
		} {
			b.fromPod(c.p).is(c.want)
		}
		b.fromUplink(tcp(world, 5000, podA, 80, syn)).is("delivered")
		for _, open := range []packet{tcp(podA, 50000, world, 80, syn), udp(podA, 50000, world, 80)} {
			b.netfilterTranslates(b.tuple(open.proto, "192.168.7.7", 999, world, 80), ctaNATSource, nodeIP, 50000)
			v := b.fromPod(open).is("forwarded").view()
			if v.src != nodeIP || v.sport == 50000 || v.sport < 49152 {
				t.Errorf("masqueraded to %s port %d", v.src, v.sport)
			}
			free := open.with(func(p *packet) { p.sport = 50001 })
			if v := b.fromPod(free).is("forwarded").view(); v.sport != 50001 {
				t.Errorf("a free port was not kept: %d", v.sport)
			}
		}
	})
}

// What the world opens is recorded, and both directions walk the stack.
func TestWorldsFlowBesideNetfilter(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, besideNetfilter)
		b.fromUplink(tcp(world, 5000, podA, 80, syn)).is("stack")
		b.count(0, 1)
		reply := tcp(podA, 80, world, 5000, syn|ack)
		b.fromPod(reply).is("stack")
		b.toUplink(reply).is("stack").flow("tcp " + podA + ":80 > " + world + ":5000")
		b.fromUplink(tcp(world, 5000, podA, 80, ack)).is("stack")
	})
}

// Flows that are older than netfilter's rules go on as they are, in both directions.
func TestOlderFlowsGoOnBesideNetfilter(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, besideNetfilter)
		masqueraded, recorded := tcp(podA, 50000, world, 80, ack), tcp(world, 5000, podA, 80, ack)
		opened := masqueraded.with(func(p *packet) { p.flags = syn })
		b.fromUplink(answer(b.toUplink(opened).is("stack"), opened)).is("stack")
		b.fromUplink(recorded.with(func(p *packet) { p.flags = syn })).is("stack")
		b.beforeNetfilter()
		out := b.fromPod(masqueraded).is("forwarded").valid()
		b.fromUplink(answer(out, masqueraded)).is("delivered").valid()
		b.fromUplink(recorded).is("delivered")
		b.fromPod(tcp(podA, 80, world, 5000, ack)).is("forwarded").flow("tcp " + podA + ":80 > " + world + ":5000")
		// The same port for another connection: it may be meant for a Service.
		b.fromPod(masqueraded.with(func(p *packet) { p.flags = ack | fin })).is("forwarded")
		b.fromPod(opened).is("stack")
		b.fromPod(masqueraded).is("stack")
	})
}

// What was sent before netfilter's rules came, and never answered, was perhaps meant for a Service, and is netfilter's.
func TestUnansweredFlowsBecomeNetfilters(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, p := range map[string]packet{"UDP": udp(podA, 50000, service, 53), "TCP": tcp(podA, 50000, service, 80, syn)} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f, besideNetfilter)
				b.toUplink(p).is("stack")
				b.beforeNetfilter()
				b.fromPod(p).is("stack")
				forward, reverse := b.pair(b.tuple(p.proto, p.src, p.sport, p.dst, p.dport))
				if forward.Flags != flow.ViaStack || reverse.Flags != flow.ViaStack {
					t.Errorf("flags of the halves: %v, %v", forward.Flags, reverse.Flags)
				}
				b.fromPod(p).is("stack")
			})
		}
	})
}

// beforeNetfilter makes every flow one that did not walk the stack.
func (b *bed) beforeNetfilter() {
	b.Helper()
	for _, m := range []*snat.Map{b.snat, b.reverse} {
		for k, v := range all(b, m) {
			v.Flags = 0
			must(b, m.Put(k, v))
		}
	}
	for k, v := range all[conntrack.Key, conntrack.Value](b, b.conntrack) {
		v.Flags = 0
		must(b, b.conntrack.Put(k, v))
	}
}

// Without netfilter's NAT nobody asks netfilter, whatever it knows.
func TestNetfilterIsNotAsked(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.netfilterTranslates(b.tuple(wire.TCP, podA, 5000, service, 80), ctaNATDestination, podB, 8080)
		b.fromPod(tcp(podB, 8080, podA, 5000, ack)).is("delivered")
	})
}

// An error goes the way of the packet inside, whoever wrote it: beside netfilter, which has not seen a flow between pods, it
// would be called invalid and dropped.
func TestErrorsBesideNetfilter(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, besideNetfilter)
		b.netfilterKnows(b.tuple(wire.TCP, podA, 5000, remote, 80))
		for _, from := range []string{node2IP, "192.0.2.1", native, remote} {
			for what, kind := range icmpErrors {
				for _, c := range []struct {
					about packet
					want  string
				}{
					{ping(podA, 7, remote), "delivered"},
					{udp(podA, 5000, remote, 53), "delivered"},
					{tcp(podA, 5001, remote, 80, ack), "delivered"},
					{tcp(podA, 5000, remote, 80, ack), "stack"},
					{udp(podA, 5000, node2IP, 53), "stack"},
					{udp(podA, 5000, native, 53), "stack"},
					{udp(podA, 5000, service, 53), "stack"},
					{udp(podA, 5000, nodeIP, 53), "stack"},
					{sctp(podA, remote), "stack"},
				} {
					if r := b.fromUplink(icmpError(from, podA, kind[0], kind[1], c.about.bytes(b.family), 8)); r.what != c.want {
						t.Errorf("%s from %s about %s: outcome %q, want %q", what, from, describe(c.about.bytes(b.family)), r.what, c.want)
					}
				}
			}
		}
		b.empty()
	})
}

// An error about a packet to a client in the world goes the way of the flow that the client opened.
func TestErrorsAboutWorldsFlowsBesideNetfilter(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, besideNetfilter)
		b.fromUplink(udp(world, 4000, podA, 53)).is("stack")
		about := icmpError("192.0.2.1", podA, 11, 0, udp(podA, 53, world, 4000).bytes(b.family), 8)
		b.fromUplink(about).is("stack")
		b.beforeNetfilter()
		b.fromUplink(about).is("delivered")
	})
}

// Where nothing is masqueraded, errors go the way of the packet inside all the same.
func TestErrorsWithoutMasqueradeBesideNetfilter(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, besideNetfilter, withoutMasquerade)
		b.fromUplink(icmpError(world, podA, 3, 1, ping(podA, 7, remote).bytes(b.family), 8)).is("delivered")
		b.fromUplink(icmpError(world, podA, 3, 1, udp(podA, 53, world, 4000).bytes(b.family), 8)).is("stack")
	})
}

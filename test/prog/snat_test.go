package prog

import (
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// answer is what the world sends back to a masqueraded packet, to where that seemed to come from.
func answer(r result, p packet) packet {
	v := r.view()
	p = p.replied()
	p.dst, p.dport, p.seq, p.ack, p.flags = v.src, v.sport, 5000, p.seq+1, syn|ack
	return p
}

// A pod opens a flow to the world, the world answers, and the pod sees the answer from whom it asked.
func TestMasqueradedFlow(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, c := range []struct {
			name string
			p    packet
		}{
			{"TCP", tcp(podA, 50000, world, 80, syn)},
			{"TCP, port out of range", tcp(podA, 1024, world, 80, syn)},
			{"UDP", udp(podA, 50000, world, 53)},
			{"UDP, port out of range", udp(podA, 5353, world, 53)},
			{"UDP without checksum", udp(podA, 5353, world, 53).with(func(p *packet) { p.noSum = true })},
			{"ping", ping(podA, 50000, world)},
			{"ping, identifier out of range", ping(podA, 1, world)},
			{"TCP, odd payload", tcp(podA, 1024, world, 80, syn).with(func(p *packet) { p.payload = []byte("odd") })},
		} {
			t.Run(c.name, func(t *testing.T) {
				b := newBed(t, f)
				for range 3 {
					r := b.fromPod(c.p).is("forwarded").valid()
					v := r.view()
					if v.src != nodeIP || v.dst != world || v.dport != c.p.dport || v.ttl != 63 || v.sport < 49152 {
						t.Errorf("left as %v with TTL %d", v, v.ttl)
					}
					if c.p.sport >= 49152 && v.sport != c.p.sport {
						t.Errorf("left from port %d, though the pod's own %d was free", v.sport, c.p.sport)
					}
					in := b.fromUplink(answer(r, c.p)).is("delivered").valid()
					in.flow(reversed(view{proto: c.p.proto, src: podA, dst: world, sport: c.p.sport, dport: c.p.dport}))
				}
				b.count(1, 0)
				if got := b.counters(wire.FromPod)[traffic.SnatAllocated.String()].Packets; got != 1 {
					t.Errorf("%d ports chosen for one flow", got)
				}
			})
		}
	})
}

// By another uplink the source is that uplink's address.
func TestMasqueradeAddressIsTheUplinks(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := tcp(podA, 50000, world2, 80, syn)
		r := b.fromPod(p).is("forwarded").flow("tcp " + nodeOtherIP + ":50000 > " + world2 + ":80").valid()
		b.arrive(b.other, answer(r, p)).is("delivered").flow("tcp " + world2 + ":80 > " + podA + ":50000")
	})
}

// Two pods with the same source port to the same server: two ports; to two servers: the same one.
func TestSamePortOfTwoPods(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		a, c := tcp(podA, 50000, world, 80, syn), tcp(podB, 50000, world, 80, syn)
		first, second := b.fromPod(a).is("forwarded"), b.fromPod(c).is("forwarded").valid()
		if first.view().sport == second.view().sport {
			t.Fatalf("both left from port %d", first.view().sport)
		}
		b.fromUplink(answer(first, a)).is("delivered").flow("tcp " + world + ":80 > " + podA + ":50000")
		b.fromUplink(answer(second, c)).is("delivered").flow("tcp " + world + ":80 > " + podB + ":50000")
		if got := b.counters(wire.FromPod)[traffic.SnatRetried.String()].Packets; got == 0 {
			t.Error("no retry was counted")
		}
		b.fromPod(tcp(podB, 50000, world, 81, syn)).is("forwarded").flow("tcp " + nodeIP + ":50000 > " + world + ":81")
		b.fromPod(udp(podB, 50000, world, 80)).is("forwarded").flow("udp " + nodeIP + ":50000 > " + world + ":80")
		b.count(4, 0)
	})
}

// A range of ten ports carries ten flows of three pods to one server, each of which leaves half as many free as it holds, and as
// many to the next server; what is refused is refused whole.
func TestPortsExhausted(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPorts(60000, 60009))
		type holder struct {
			pod   string
			sport uint16
		}
		taken := make(map[uint16]holder)
		for _, c := range []struct {
			pod  string
			want int
		}{{podA, 7}, {podB, 2}, {podC, 1}} {
			for i := range uint16(c.want) {
				p := tcp(c.pod, 1+i, world, 53, syn)
				r := b.fromPod(p).is("forwarded")
				b.fromUplink(answer(r, p)).is("delivered")
				port := r.view().sport
				if _, twice := taken[port]; twice || port < 60000 || port > 60009 {
					t.Fatalf("port %d, of %v taken", port, taken)
				}
				taken[port] = holder{c.pod, 1 + i}
			}
			if c.pod != podC { // what is left of so few ports is too little for a sample of them to tell
				b.turnedAway(tcp(c.pod, 30000, world, 53, syn), "drop PORT_LIMIT")
			}
		}
		b.count(10, 0)
		for port, h := range taken { // every reply reaches the flow that asked
			b.fromUplink(tcp(world, 53, nodeIP, port, ack)).is("delivered").flow(ends(wire.TCP, world, 53, h.pod, h.sport))
		}
		b.fromPod(tcp(podA, 30000, world, 54, syn)).is("forwarded")
	})
}

// A range of one port is a range.
func TestOnePort(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPorts(50000, 50000))
		b.fromPod(udp(podA, 7, world, 53)).is("forwarded").flow("udp " + nodeIP + ":50000 > " + world + ":53")
		b.turnedAway(udp(podB, 7, world, 53), "drop SNAT_EXHAUSTED")
		b.fromUplink(udp(world, 53, nodeIP, 49999)).is("stack")
		b.fromUplink(udp(world, 53, nodeIP, 50001)).is("stack")
	})
}

// A flow whose port new flows do not get any more keeps it in both directions, and the node's own connections leave it alone.
func TestHeldPort(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for held, want := range map[bool]string{true: "delivered", false: "stack"} {
			options := []option{withPorts(50000, 50000)}
			if held {
				options = append(options, withHeldPorts(40000, 50000))
			}
			b := newBed(t, f, options...)
			p := udp(podA, 7, world, 53)
			b.fromPod(p).is("forwarded")
			out := b.tuple(wire.UDP, podA, 7, world, 53)
			forward, reverse := b.pair(out)
			must(t, b.reverse.Delete(reverseKey(out, forward)))
			forward.ToPort = wire.PortFrom(40000)
			must(t, b.snat.Put(out, forward))
			must(t, b.reverse.Put(reverseKey(out, forward), reverse))

			r := b.fromPod(p).is("forwarded").flow("udp " + nodeIP + ":40000 > " + world + ":53")
			b.fromUplink(answer(r, p)).is(want)
			if own := b.toUplink(udp(nodeIP, 40000, world, 53)).view(); held == (own.sport == 40000) {
				t.Errorf("held: %v: the node's own connection leaves as %v", held, own)
			}
		}
	})
}

// Without any port left, what needs one is refused, also where the pod's own might do.
func TestNoPorts(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPorts(1, 0), withHeldPorts(40000, 50000))
		b.turnedAway(udp(podA, 7, world, 53), "drop SNAT_EXHAUSTED")
		b.turnedAway(tcp(podB, 40000, world, 80, syn), "drop SNAT_EXHAUSTED")
		b.turnedAway(ping(podA, 7, world), "drop SNAT_EXHAUSTED")
		b.empty()
	})
}

// A pod that is gone holds no port, also while nobody collects.
func TestDeadPodHoldsNoPort(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPorts(50000, 50000))
		b.fromPod(udp(podA, 7, world, 53)).is("forwarded")
		b.turnedAway(udp(podB, 7, world, 53), "drop SNAT_EXHAUSTED")
		b.deletePod(podA)
		p := udp(podB, 7, world, 53)
		r := b.fromPod(p).is("forwarded").flow("udp " + nodeIP + ":50000 > " + world + ":53")
		b.fromUplink(answer(r, p)).is("delivered")
		b.count(1, 0)
		b.pair(b.tuple(wire.UDP, podB, 7, world, 53))
	})
}

// A refusal is kept as long as a path: to look for a port costs more than a hundred packets, and whoever floods would have it
// done for each.
func TestRefusalIsKept(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		const lifetime = time.Second
		b := newBed(t, f, withPorts(50000, 50000), withPaths(lifetime))
		b.fromPod(udp(podA, 7, world, 53)).is("forwarded")
		b.turnedAway(udp(podB, 7, world, 53), "drop SNAT_EXHAUSTED")
		b.deletePod(podA)
		b.turnedAway(udp(podB, 7, world, 53), "drop SNAT_EXHAUSTED")
		b.fromPod(udp(podB, 7, world, 54)).is("forwarded")
		time.Sleep(lifetime + 100*time.Millisecond)
		b.fromPod(udp(podB, 7, world, 53)).is("forwarded")
	})
}

// Only what opens a flow may take a port.
func TestNoMapping(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for _, flags := range []uint8{ack, syn | ack, fin | ack, rst, rst | ack, syn | rst, 0, fin} {
			b.fromPod(tcp(podA, 50000, world, 80, flags)).is("drop NO_MAPPING")
		}
		b.fromPod(ping(podA, 50000, world).with(func(p *packet) {
			p.icmpType, p.sport, p.dport = 0, 0, 50000 // an echo reply that nobody asked for
		})).is("drop NO_MAPPING")
		b.empty()
	})
}

// Whichever half of a pair is missing, the other brings it back, and the flow goes on.
func TestMissingHalfRestored(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		p := tcp(podA, 50000, world, 80, syn)
		out := f.tuple(wire.TCP, podA, 50000, world, 80)
		data := p.with(func(p *packet) { p.flags = ack })
		for by, next := range map[string]packet{"the pod": data, "the pod's SYN": p} {
			t.Run("forward, by "+by, func(t *testing.T) {
				b := newBed(t, f)
				b.fromPod(p).is("forwarded")
				must(t, b.snat.Delete(out))
				b.fromPod(next).is("forwarded").flow("tcp " + nodeIP + ":50000 > " + world + ":80")
				b.pair(out)
				b.count(1, 0)
			})
		}
		t.Run("forward, by the world", func(t *testing.T) {
			b := newBed(t, f)
			q := p.with(func(p *packet) { p.sport = 1024 }) // leaves from a port that the pod's packet does not tell
			out := f.tuple(wire.TCP, podA, 1024, world, 80)
			r := b.fromPod(q).is("forwarded")
			must(t, b.snat.Delete(out))
			b.fromPod(q.with(func(p *packet) { p.flags = ack })).is("drop NO_MAPPING")
			b.age(2 * time.Second) // halves are looked after once a second
			b.fromUplink(answer(r, q)).is("delivered")
			b.pair(out)
			b.count(1, 0)
			b.fromPod(q.with(func(p *packet) { p.flags = ack })).is("forwarded").flow(r.view().String())
		})
		t.Run("reverse, by the pod", func(t *testing.T) {
			b := newBed(t, f)
			r := b.fromPod(p).is("forwarded")
			forward, _ := b.pair(out)
			must(t, b.reverse.Delete(reverseKey(out, forward)))
			b.age(2 * time.Second)
			b.fromPod(data).is("forwarded").flow(r.view().String())
			b.pair(out)
			b.count(1, 0)
			b.fromUplink(answer(r, p)).is("delivered")
		})
		t.Run("reverse, and another has its port", func(t *testing.T) {
			b := newBed(t, f)
			b.fromPod(p).is("forwarded")
			forward, _ := b.pair(out)
			must(t, b.reverse.Delete(reverseKey(out, forward)))
			b.fromPod(tcp(podB, 50000, world, 80, syn)).is("forwarded").flow("tcp " + nodeIP + ":50000 > " + world + ":80")
			b.age(2 * time.Second)
			b.fromPod(data).is("drop NO_MAPPING") // never two flows on one port
			b.count(1, 0)
			if port := b.fromPod(p).is("forwarded").view().sport; port == 50000 {
				t.Error("the port that is another's was chosen again")
			}
			b.count(2, 0)
		})
	})
}

// A pair of the address's previous owner is none: its replies reach nobody, and the new owner starts afresh.
func TestStaleGeneration(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := tcp(podA, 50000, world, 80, syn)
		r := b.fromPod(p).is("forwarded")
		b.fromUplink(answer(r, p)).is("delivered")
		b.giveAway(podA, podB)
		in := b.fromUplink(answer(r, p)).is("stack")
		if in.view().dst != nodeIP {
			t.Error("the stack got a reply that names the new owner")
		}
		b.fromPodAt(podB, p.with(func(p *packet) { p.flags = ack })).is("drop NO_MAPPING")
		b.fromPodAt(podB, p).is("forwarded")
		b.count(1, 0)
		forward, _ := b.pair(b.tuple(wire.TCP, podA, 50000, world, 80))
		if forward.Ifindex != uint32(b.pods[podB].index) {
			t.Errorf("the pair is of device %d", forward.Ifindex)
		}
	})
}

// While the agent's table lacks the node's address, a flow that uses it waits, and goes on when it is back. When the uplink gets
// another address, the flow ends at once, and the next packet opens one with that.
func TestAddressLost(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := udp(podA, 50000, world, 53)
		var kept result
		b.within(time.Second, func() {
			b.sweep(usage.Snat, time.Hour, false)
			b.uplink1(nodeIP)
			must(t, b.destinations.Put(b.hostKey(nodeIP), destinations.Value{Kind: destinations.Host}))
		}, func() {
			b.fromPod(p).is("forwarded").flow("udp " + nodeIP + ":50000 > " + world + ":53")
			must(t, b.destinations.Delete(b.hostKey(nodeIP)))
			kept = b.fromPod(p)
		})
		kept.is("forwarded").flow("udp " + nodeIP + ":50000 > " + world + ":53") // looked at once a second
		b.age(2 * time.Second)
		for range 2 {
			b.fromPod(p).is("drop NO_SNAT_ADDRESS")
		}
		must(t, b.destinations.Put(b.hostKey(nodeIP), destinations.Value{Kind: destinations.Host}))
		b.fromPod(p).is("forwarded").flow("udp " + nodeIP + ":50000 > " + world + ":53")
		must(t, b.destinations.Delete(b.hostKey(nodeIP)))
		b.age(time.Minute)
		b.fromPod(p).is("drop NO_SNAT_ADDRESS")
		b.uplink1(nodeOtherIP)
		b.fromPod(p).is("forwarded").flow("udp " + nodeOtherIP + ":50000 > " + world + ":53").valid()
		b.count(1, 0)
	})
}

// An established connection that met the gap goes on, in both directions and by the same port.
func TestConnectionOutlivesLostAddress(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		o := openers[0]
		o.established(b)
		b.age(2 * time.Second)
		must(t, b.destinations.Delete(b.hostKey(nodeIP)))
		b.fromPod(tcp(podA, 50000, world, 80, ack)).is("drop NO_SNAT_ADDRESS")
		must(t, b.destinations.Put(b.hostKey(nodeIP), destinations.Value{Kind: destinations.Host}))
		o.opens(b, segment(ack, 1001, 5001, 10))
		o.closes(b, segment(ack, 5001, 1011, 10))
		o.lives(b, day)
	})
}

// Time stamps are written at most once a second, and never go back.
func TestLastSeen(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := udp(podA, 50000, world, 53)
		stamped := func() snat.Value {
			b.fromPod(p).is("forwarded")
			forward, _ := b.pair(b.tuple(wire.UDP, podA, 50000, world, 53))
			return forward
		}
		var first, again snat.Value
		b.within(time.Second, func() { b.age(2 * time.Second) }, func() {
			first = stamped()
			b.outlast(20 * time.Millisecond) // more than a tick
			again = stamped()
		})
		if again.LastSeen != first.LastSeen {
			t.Error("the stamp was written twice within a second")
		}
		b.age(2 * time.Second)
		if later := stamped(); later.LastSeen < first.LastSeen || later.State != flow.Packet {
			t.Errorf("after two seconds: %+v, first %+v", later, first)
		}
	})
}

// A reply that only the stack may forward is translated all the same, and marked, so that nothing behind takes it for a
// packet that the world sends to the pod.
func TestReplyForStack(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := udp(podA, 50000, world, 53)
		out := b.fromPod(p).is("forwarded")
		for name, change := range map[string]func(*packet){
			"last hop":   func(p *packet) { p.ttl = 1 },
			"IP options": func(p *packet) { p.options = true },
		} {
			r := b.fromUplink(answer(out, p).with(change)).is("stack").flow("udp " + world + ":53 > " + podA + ":50000").valid()
			if r.mark&mark == 0 {
				t.Errorf("%s: the stack gets an unmarked packet", name)
			}
		}
		b.count(1, 0)
	})
}

// Replies and flows of many pods and servers at once: each finds its own way back.
func TestManyFlows(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPorts(50000, 50999))
		type sent struct {
			p packet
			r result
		}
		var flows []sent
		for i := range uint16(60) {
			for _, pod := range []string{podA, podB, podC} {
				for _, dst := range []string{world, "198.51.100.8"} {
					p := udp(pod, 1000+i, dst, 53)
					flows = append(flows, sent{p, b.fromPod(p).is("forwarded")})
				}
			}
		}
		used := make(map[string]bool)
		for _, f := range flows {
			seen := f.r.view().String()
			if used[seen] {
				t.Errorf("%s stands for two flows", seen)
			}
			used[seen] = true
			b.fromUplink(answer(f.r, f.p)).is("delivered").flow(reversed(describeView(f.p)))
		}
		b.count(len(flows), 0)
	})
}

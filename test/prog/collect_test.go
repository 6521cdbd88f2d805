package prog

import (
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// Traffic in either direction keeps both halves.
func TestCollectKeepsWhatIsUsed(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		for name, use := range map[string]func(b *bed, o opener) result{
			"by the opener": func(b *bed, o opener) result { return o.opens(b, packet{proto: wire.UDP}) },
			"by the other":  func(b *bed, o opener) result { return o.closes(b, packet{proto: wire.UDP}) },
		} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f)
				for _, o := range openers {
					o.opens(b, packet{proto: wire.UDP})
					b.age(2 * time.Second)
					o.closes(b, packet{proto: wire.UDP})
					b.age(170 * time.Second)
					use(b, o)
					if got := b.sweep(o.table, 170*time.Second, false); got != 0 {
						t.Errorf("%s: a flow in use was collected", o.name)
					}
					o.lives(b, 180*time.Second)
				}
			})
		}
	})
}

// A deleted pod's flows go at the next sweep, however young; another pod's stay.
func TestCollectDeletedPods(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		b.fromPod(udp(podB, 50000, world, 54)).is("forwarded")
		b.fromUplink(udp(world, 4000, podA, 53)).is("delivered")
		b.fromUplink(udp(world, 4000, podB, 53)).is("delivered")
		b.deletePod(podA)
		if n, m := b.sweep(usage.Snat, 0, false), b.sweep(usage.Conntrack, 0, false); n != 1 || m != 1 {
			t.Errorf("%d and %d flows collected, want 1 and 1", n, m)
		}
		b.count(1, 1)
	})
}

// Flows of the node itself have no pod, and live as long as others.
func TestCollectNodeFlows(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		b.toUplink(udp(nodeIP, 50000, world, 53)).is("stack")
		first, last := b.seen()
		if got := b.sweepAt(usage.Snat, first+uint64(question), false); got != 0 {
			t.Errorf("%d flows collected early", got)
		}
		if got := b.sweepAt(usage.Snat, last+uint64(question)+1, false); got != 2 {
			t.Errorf("%d flows collected, want 2", got)
		}
		b.empty()
	})
}

// Half a pair is collected like a whole one, counters included.
func TestCollectHalves(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		out := b.tuple(wire.UDP, podA, 50000, world, 53)
		b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		forward, _ := b.pair(out)
		must(t, b.reverse.Delete(reverseKey(out, forward)))
		if got := b.sweep(usage.Snat, 61*time.Second, false); got != 1 {
			t.Errorf("%d flows collected, want the forward half", got)
		}
		b.empty()

		b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		must(t, b.snat.Delete(out))
		_, last := b.seen()
		if got := b.sweepAt(usage.Snat, last+uint64(question), false); got != 0 {
			t.Error("a young half went")
		}
		if got := b.sweepAt(usage.Snat, last+uint64(question)+1, false); got != 1 {
			t.Errorf("%d flows collected, want the reverse half", got)
		}
		b.empty()
	})
}

// A reverse half that the flow has left, for another port or another address, goes when its time has come; the pair that
// the flow has now stays.
func TestCollectLeftHalves(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		for name, change := range map[string]func(k *wire.Tuple){
			"port":    func(k *wire.Tuple) { k.Sport = wire.PortFrom(50007) },
			"address": func(k *wire.Tuple) { k.Src = f.addr(nodeOtherIP) },
		} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f)
				p := udp(podA, 50000, world, 53)
				out := b.tuple(wire.UDP, podA, 50000, world, 53)
				b.fromPod(p).is("forwarded")
				forward, reverse := b.pair(out)
				left := reverseKey(out, forward)
				change(&left)
				must(t, b.reverse.Insert(left, reverse))
				b.age(10 * time.Second)
				b.fromPod(p).is("forwarded")
				kept, _ := b.pair(out)
				if got := b.sweepAt(usage.Snat, kept.LastSeen+uint64(question), false); got != 1 {
					t.Errorf("%d flows collected, want the half that was left", got)
				}
				b.pair(out)
				if _, err := b.reverse.Get(left); err == nil {
					t.Error("the half that was left is still there")
				}
			})
		}
	})
}

// A tombstone belongs to whoever made it for ten seconds after a sweep has met it: then it was left, and goes.
func TestCollectTombstones(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		out := b.tuple(wire.UDP, podA, 50000, world, 53)
		b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		b.fromUplink(udp(world, 4000, podA, 53)).is("delivered")
		for k, v := range all[conntrack.Key, conntrack.Value](b, b.conntrack) {
			v.LastSeen = 0
			must(t, b.conntrack.Put(k, v))
		}
		forward, _ := b.pair(out)
		forward.LastSeen = 0
		must(t, b.snat.Put(out, forward))
		if n, m := b.sweep(usage.Snat, 0, false), b.sweep(usage.Conntrack, 0, false); n != 0 || m != 0 {
			t.Errorf("%d and %d flows collected that another is removing", n, m)
		}
		if n, m := b.sweep(usage.Snat, removal, false), b.sweep(usage.Conntrack, removal, false); n != 1 || m != 1 {
			t.Errorf("%d and %d flows collected that were left, want 1 and 1", n, m)
		}
		b.empty()
	})
}

// The same of a pod that is gone, and of a tombstone in the reverse half alone, which holds a port.
func TestCollectTombstonesOfDeletedPods(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		out := b.tuple(wire.UDP, podA, 50000, world, 53)
		b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		b.fromPod(udp(podB, 50000, world, 54)).is("forwarded")
		forward, reverse := b.pair(out)
		reverse.LastSeen = 0
		must(t, b.reverse.Put(reverseKey(out, forward), reverse))
		must(t, b.snat.Delete(out))
		must(t, b.usage.Put(usage.Key{Table: usage.Snat}, usage.Value{Entries: 1}))
		out.Src, out.Dport = b.addr(podB), wire.PortFrom(54)
		forward, _ = b.pair(out)
		forward.LastSeen = 0
		must(t, b.snat.Put(out, forward))
		b.deletePod(podA)
		b.deletePod(podB)
		for i := range 3 {
			b.sweep(usage.Snat, time.Duration(i)*removal, false)
		}
		b.empty()
	})
}

// An entry that is being removed is no entry.
func TestTombstone(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := tcp(podA, 50000, world, 80, syn)
		out := b.tuple(wire.TCP, podA, 50000, world, 80)
		r := b.fromPod(p).is("forwarded")
		forward, reverse := b.pair(out)
		reverse.LastSeen = 0
		must(t, b.reverse.Put(reverseKey(out, forward), reverse))
		b.fromUplink(answer(r, p)).is("stack")
		forward.LastSeen = 0
		must(t, b.snat.Put(out, forward))
		b.fromPod(p.with(func(p *packet) { p.flags = ack })).is("drop NO_MAPPING")

		b.fromUplink(tcp(world, 4000, podB, 80, syn)).is("delivered")
		replies := b.tuple(wire.TCP, podB, 80, world, 4000)
		v, err := b.conntrack.Get(replies)
		must(t, err)
		v.LastSeen = 0
		must(t, b.conntrack.Put(replies, v))
		b.fromPod(tcp(podB, 80, world, 4000, syn|ack)).is("drop NO_MAPPING")
	})
}

// With no collector, the packets that need what a tombstone holds take it: a flow's own tuple, a port, a recorded flow.
func TestTombstonesGiveWay(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPorts(50000, 50000))
		p := udp(podA, 50000, world, 53)
		out := b.tuple(wire.UDP, podA, 50000, world, 53)
		b.fromPod(p).is("forwarded")
		forward, reverse := b.pair(out)
		forward.LastSeen, reverse.LastSeen = 0, 0
		must(t, b.snat.Put(out, forward))
		must(t, b.reverse.Put(reverseKey(out, forward), reverse))
		b.turnedAway(p, "drop SNAT_EXHAUSTED")
		forward, reverse = b.pair(out)
		if forward.LastSeen == 0 || forward.LastSeen > now(b)/1e9 {
			t.Errorf("the tombstone is marked with %d, want the second", forward.LastSeen)
		}
		forward.LastSeen, reverse.LastSeen = left(b), left(b)
		must(t, b.snat.Put(out, forward))
		must(t, b.reverse.Put(reverseKey(out, forward), reverse))
		b.soon(func() result { return b.fromPod(p) }, "forwarded")
		b.count(1, 0)

		forward, reverse = b.pair(out)
		must(t, b.snat.Delete(out))
		must(t, b.usage.Put(usage.Key{Table: usage.Snat}, usage.Value{}))
		reverse.LastSeen = left(b)
		must(t, b.reverse.Put(reverseKey(out, forward), reverse))
		b.soon(func() result { return b.fromPod(udp(podB, 1, world, 53)) }, "forwarded")
		if n := len(all(b, b.snat)); n != 1 {
			t.Errorf("%d flows, want the one that took the port", n)
		}

		b.fromUplink(udp(world, 4000, podA, 53)).is("delivered")
		for k, v := range all[conntrack.Key, conntrack.Value](b, b.conntrack) {
			v.LastSeen = left(b)
			must(t, b.conntrack.Put(k, v))
		}
		for range 3 {
			b.fromUplink(udp(world, 4000, podA, 53)).is("delivered")
		}
		b.fromPod(udp(podA, 53, world, 4000)).is("forwarded").flow("udp " + podA + ":53 > " + world + ":4000")
	})
}

// removal is longer than a removal may take: then it was given up.
const removal = 11 * time.Second

// left is the mark of a tombstone that was met longer ago.
func left(b *bed) uint64 { return (now(b) - uint64(removal)) / 1e9 }

// soon sends a packet until it is let through, which a few repetitions must bring about.
func (b *bed) soon(send func() result, want string) {
	b.Helper()
	var r result
	for range 4 {
		if r = send(); r.what == want {
			return
		}
	}
	r.is(want)
}

func fakeEntry(b *bed) snat.Value {
	return snat.Value{
		ToAddress: b.addr(nodeIP), ToPort: wire.PortFrom(50000), Ifindex: uint32(b.pods[podB].index), LastSeen: now(b),
	}
}

// A sweep of a table takes many short runs of the program: on the mean each is done within four milliseconds.
func TestSweepInSlices(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withTables(1<<17, 64))
		const flows = 1 << 15
		var keys, worlds []wire.Tuple
		var forward, reverse []snat.Value
		e := fakeEntry(b)
		for i := range flows {
			out := b.tuple(wire.UDP, podA, uint16(i), world, 53+uint16(i>>14))
			e.ToAddress, e.ToPort = b.addr(nodeIP), wire.PortFrom(uint16(49152+i&0x3fff))
			keys, forward, worlds = append(keys, out), append(forward, e), append(worlds, reverseKey(out, e))
			e.ToAddress, e.ToPort = out.Src, out.Sport
			reverse = append(reverse, e)
		}
		for m, c := range map[*snat.Map]struct {
			keys   []wire.Tuple
			values []snat.Value
		}{b.snat: {keys, forward}, b.reverse: {worlds, reverse}} {
			_, err := m.BatchUpdate(c.keys, c.values, nil)
			must(t, err)
		}
		stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
		must(t, err)
		defer stats.Close()
		before, err := b.collect.Program.Stats()
		must(t, err)
		for _, late := range []time.Duration{0, time.Hour} {
			want := 0
			if late > 0 {
				want = flows
			}
			if got := b.sweep(usage.Snat, late, false); got != want {
				t.Errorf("%d flows collected, want %d", got, want)
			}
		}
		after, err := b.collect.Program.Stats()
		must(t, err)
		runs, took := after.RunCount-before.RunCount, after.Runtime-before.Runtime
		t.Logf("%d runs of %v", runs, took/time.Duration(runs))
		if runs < 3*flows/1024 || took/time.Duration(runs) > priv.Patience(4*time.Millisecond) {
			t.Errorf("two sweeps of %d flows took %d runs of %v", flows, runs, took/time.Duration(runs))
		}
		b.empty()
	})
}

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
)

// opener is a flow's side that opened it: the pod of a masqueraded flow, the world of a recorded one. The tests of states
// and lifetimes hold for both, told once.
type opener struct {
	name   string
	table  usage.Table
	opens  func(b *bed, p packet) result // sends a packet of the opener's
	closes func(b *bed, p packet) result // sends one of the other end
}

// The flow of every lifetime test goes from port 50000 to port 80.
var openers = []opener{
	{
		name: "masqueraded", table: usage.Snat,
		opens: func(b *bed, p packet) result {
			p.src, p.sport, p.dst, p.dport = podA, 50000, world, 80
			return b.fromPod(p).is("forwarded")
		},
		closes: func(b *bed, p packet) result {
			p.src, p.sport, p.dst, p.dport = world, 80, nodeIP, 50000
			return b.fromUplink(p).is("delivered")
		},
	},
	{
		name: "opened by the world", table: usage.Conntrack,
		opens: func(b *bed, p packet) result {
			p.src, p.sport, p.dst, p.dport = world, 50000, podA, 80
			return b.fromUplink(p).is("delivered")
		},
		closes: func(b *bed, p packet) result {
			p.src, p.sport, p.dst, p.dport = podA, 80, world, 50000
			return b.fromPod(p).is("forwarded")
		},
	},
}

// segment is a TCP segment of either side; how many bytes it carries does not matter but to sequence numbers.
func segment(flags uint8, seq, ack uint32, size int) packet {
	return packet{proto: wire.TCP, flags: flags, seq: seq, ack: ack, payload: make([]byte, size)}
}

// established brings a connection up; the opener's next number is 1001, the other's 5001.
func (o opener) established(b *bed) {
	b.Helper()
	o.opens(b, segment(syn, 1000, 0, 0))
	o.closes(b, segment(syn|ack, 5000, 1001, 0))
	o.opens(b, segment(ack, 1001, 5001, 0))
}

// lives asserts how long the one flow in the table lives, idle.
func (o opener) lives(b *bed, want time.Duration) {
	b.Helper()
	o.livesUnder(b, false, want)
}

// livesUnder asserts that with and without pressure.
func (o opener) livesUnder(b *bed, pressure bool, want time.Duration) {
	b.Helper()
	if flows := len(all(b, b.snat)) + len(all(b, b.conntrack)); flows != 1 {
		b.Fatalf("%d flows, want 1", flows)
	}
	_, last := b.seen()
	if last < b.born || last > now(b) {
		b.Fatalf("%s: last seen at %d, but the test runs from %d to %d", o.name, last, b.born, now(b))
	}
	end := last + uint64(want)
	if got := b.sweepAt(o.table, end, pressure); got != 0 {
		b.Fatalf("%s: gone within %v", o.name, want)
	}
	if got := b.sweepAt(o.table, end+1, pressure); got != 1 {
		b.Fatalf("%s: still there after %v", o.name, want)
	}
	b.empty()
}

const (
	opening    = time.Minute
	day        = 24 * time.Hour
	halfClosed = time.Hour
	closed     = 10 * time.Second
)

// tcpLives says how long an idle TCP connection lives, by what has passed.
var tcpLives = map[string]struct {
	story func(b *bed, o opener)
	want  time.Duration
}{
	"SYN": {func(b *bed, o opener) { o.opens(b, segment(syn, 1000, 0, 0)) }, opening},
	"SYN, SYN-ACK": {func(b *bed, o opener) {
		o.opens(b, segment(syn, 1000, 0, 0))
		o.closes(b, segment(syn|ack, 5000, 1001, 0))
	}, opening},
	"established": {func(b *bed, o opener) { o.established(b) }, day},
	"FIN of the opener": {func(b *bed, o opener) {
		o.established(b)
		o.opens(b, segment(fin|ack, 1001, 5001, 0))
		o.closes(b, segment(ack, 5001, 1002, 0))
	}, halfClosed},
	"FIN of the other": {func(b *bed, o opener) {
		o.established(b)
		o.closes(b, segment(fin|ack, 5001, 1001, 0))
	}, halfClosed},
	"both FINs": {func(b *bed, o opener) {
		o.established(b)
		o.opens(b, segment(fin|ack, 1001, 5001, 0))
		o.closes(b, segment(fin|ack, 5001, 1002, 0))
		o.opens(b, segment(ack, 1002, 5002, 0))
	}, closed},
	"RST of the opener": {func(b *bed, o opener) {
		o.established(b)
		o.opens(b, segment(rst, 1001, 0, 0))
	}, closed},
	"RST of the other": {func(b *bed, o opener) {
		o.established(b)
		o.closes(b, segment(rst, 5001, 0, 0))
	}, closed},
	"RST after data in flight": {func(b *bed, o opener) {
		o.established(b)
		o.closes(b, segment(ack, 5001, 1001, 500))
		o.closes(b, segment(rst, 5501, 0, 0))
	}, closed},
	"RST within data in flight": {func(b *bed, o opener) {
		o.established(b)
		o.closes(b, segment(ack, 5001, 1001, 500))
		o.closes(b, segment(rst, 5301, 0, 0))
	}, closed},
	"RST beyond": {func(b *bed, o opener) {
		o.established(b)
		o.closes(b, segment(rst, 5002, 0, 0))
		o.opens(b, segment(rst, 1002, 0, 0))
	}, day},
	"RST before": {func(b *bed, o opener) {
		o.established(b)
		o.closes(b, segment(rst, 5000, 0, 0))
		o.opens(b, segment(rst|ack, 1000, 5001, 0))
	}, day},
	"RST far off": {func(b *bed, o opener) {
		o.established(b)
		o.closes(b, segment(rst, 5001+1<<31, 0, 0))
	}, day},
	"refused": {func(b *bed, o opener) {
		o.opens(b, segment(syn, 1000, 0, 0))
		o.closes(b, segment(rst|ack, 0, 1001, 0))
	}, closed},
	"refused by another": {func(b *bed, o opener) {
		o.opens(b, segment(syn, 1000, 0, 0))
		o.closes(b, segment(rst|ack, 0, 999, 0))
	}, opening},
	"refused at the second attempt, with a smaller number": {func(b *bed, o opener) {
		o.opens(b, segment(syn, 1<<31, 0, 0))
		o.opens(b, segment(syn, 1000, 0, 0))
		o.closes(b, segment(rst|ack, 0, 1001, 0))
	}, closed},
	"sequence numbers wrap around": {func(b *bed, o opener) {
		o.opens(b, segment(syn, 0xfffffffe, 0, 0))
		o.closes(b, segment(syn|ack, 0xffffffff, 0xffffffff, 0))
		o.opens(b, segment(ack, 0xffffffff, 0, 100))
		o.closes(b, segment(ack, 0, 99, 100))
		o.opens(b, segment(ack, 99, 100, 0))
		o.closes(b, segment(rst, 100, 0, 0))
	}, closed},
	"late retransmission after RST": {func(b *bed, o opener) {
		o.established(b)
		o.closes(b, segment(rst, 5001, 0, 0))
		o.opens(b, segment(ack, 1001, 5001, 10))
	}, closed},
	"RST within data in flight, and what is sent later is acknowledged": {func(b *bed, o opener) {
		o.established(b)
		o.closes(b, segment(ack, 5001, 1001, 500))
		o.closes(b, segment(rst, 5301, 0, 0))
		o.opens(b, segment(ack, 1001, 5501, 0))
		o.closes(b, segment(ack, 5501, 1001, 100))
		o.opens(b, segment(ack, 1001, 5601, 0))
	}, day},
	"RST of another's, and the opener's data is acknowledged": {func(b *bed, o opener) {
		o.established(b)
		o.closes(b, segment(rst, 5001, 0, 0))
		o.opens(b, segment(ack, 1001, 5001, 10))
		o.closes(b, segment(ack, 5001, 1011, 0))
	}, day},
	"RST, and data on its way already on both sides": {func(b *bed, o opener) {
		o.established(b)
		o.opens(b, segment(ack, 1001, 5001, 10))
		o.closes(b, segment(ack, 5001, 1001, 500))
		o.closes(b, segment(rst, 5501, 0, 0))
		o.closes(b, segment(ack, 5001, 1011, 500))
		o.opens(b, segment(ack, 1001, 5501, 10))
		o.opens(b, segment(ack, 1011, 5501, 10))
	}, closed},
	"RST, and acknowledged what nobody has sent": {func(b *bed, o opener) {
		o.established(b)
		o.closes(b, segment(rst, 5001, 0, 0))
		o.opens(b, segment(ack, 1001, 5301, 0))
	}, closed},
	"opened anew after both FINs": {func(b *bed, o opener) {
		o.established(b)
		o.opens(b, segment(fin|ack, 1001, 5001, 0))
		o.closes(b, segment(fin|ack, 5001, 1002, 0))
		o.opens(b, segment(syn, 90000, 0, 0))
	}, opening},
	"established anew after RST": {func(b *bed, o opener) {
		o.established(b)
		o.closes(b, segment(rst, 5001, 0, 0))
		o.opens(b, segment(syn, 500, 0, 0))
		o.closes(b, segment(syn|ack, 100, 501, 0))
		o.opens(b, segment(ack, 501, 101, 0))
		o.closes(b, segment(rst, 5001, 0, 0)) // belongs to the connection of before
	}, day},
	"closed anew": {func(b *bed, o opener) {
		o.established(b)
		o.closes(b, segment(rst, 5001, 0, 0))
		o.opens(b, segment(syn, 500, 0, 0))
		o.closes(b, segment(syn|ack, 100, 501, 0))
		o.opens(b, segment(ack, 501, 101, 0))
		o.closes(b, segment(rst, 101, 0, 0))
	}, closed},
}

func TestLifetimesTCP(t *testing.T) {
	for name, c := range tcpLives {
		t.Run(name, func(t *testing.T) {
			b := newBed(t)
			for _, o := range openers {
				c.story(b, o)
				o.lives(b, c.want)
			}
		})
	}
}

// How long other flows live.
func TestLifetimes(t *testing.T) {
	b := newBed(t)
	datagram := packet{proto: wire.UDP}
	echo := packet{proto: wire.ICMP, icmpType: 8}
	for _, o := range openers {
		o.opens(b, datagram)
		o.lives(b, time.Minute)
		o.opens(b, datagram)
		o.closes(b, datagram)
		o.lives(b, 3*time.Minute)
	}
	for _, o := range openers {
		o.opens(b, echo)
		o.lives(b, 30*time.Second)
	}
	other := packet{proto: 132, src: world, dst: podA, payload: make([]byte, 12)}
	b.fromUplink(other).is("delivered")
	openers[1].lives(b, time.Minute)
}

// A scan of the world's must not fill the table for a day: a segment to a port where nothing listens is answered by a
// reset, and no connection ever was.
func TestLifetimeOfScan(t *testing.T) {
	b := newBed(t)
	o := openers[1]
	o.opens(b, segment(ack, 7000, 9000, 0))
	o.closes(b, segment(rst, 9000, 0, 0))
	o.lives(b, opening)
	o.opens(b, segment(ack, 7000, 9000, 0))
	o.lives(b, opening)
	// A connection from before there was a table does live on.
	o.opens(b, segment(ack, 7000, 9000, 10))
	o.closes(b, segment(ack, 9000, 7010, 0))
	o.lives(b, day)
}

// Under pressure everything but established connections lives a quarter as long.
func TestLifetimesUnderPressure(t *testing.T) {
	b := newBed(t)
	for _, o := range openers {
		o.established(b)
		o.livesUnder(b, true, day)
		o.opens(b, packet{proto: wire.UDP})
		o.livesUnder(b, true, opening/4)
	}
}

// Traffic in either direction keeps both halves.
func TestCollectKeepsWhatIsUsed(t *testing.T) {
	for name, use := range map[string]func(b *bed, o opener) result{
		"by the opener": func(b *bed, o opener) result { return o.opens(b, packet{proto: wire.UDP}) },
		"by the other":  func(b *bed, o opener) result { return o.closes(b, packet{proto: wire.UDP}) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t)
			for _, o := range openers {
				o.opens(b, packet{proto: wire.UDP})
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
}

// A deleted pod's flows go at the next sweep, however young; another pod's stay.
func TestCollectDeletedPods(t *testing.T) {
	b := newBed(t)
	b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
	b.fromPod(udp(podB, 50000, world, 54)).is("forwarded")
	b.fromUplink(udp(world, 4000, podA, 53)).is("delivered")
	b.fromUplink(udp(world, 4000, podB, 53)).is("delivered")
	b.deletePod(podA)
	if n, m := b.sweep(usage.Snat, 0, false), b.sweep(usage.Conntrack, 0, false); n != 1 || m != 1 {
		t.Errorf("%d and %d flows collected, want 1 and 1", n, m)
	}
	b.count(1, 1)
}

// Flows of the node itself have no pod, and live as long as others.
func TestCollectNodeFlows(t *testing.T) {
	b := newBed(t)
	b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
	b.toUplink(udp(nodeIP, 50000, world, 53)).is("stack")
	first, last := b.seen()
	if got := b.sweepAt(usage.Snat, first+uint64(time.Minute), false); got != 0 {
		t.Errorf("%d flows collected early", got)
	}
	if got := b.sweepAt(usage.Snat, last+uint64(time.Minute)+1, false); got != 2 {
		t.Errorf("%d flows collected, want 2", got)
	}
	b.empty()
}

// Half a pair is collected like a whole one, counters included.
func TestCollectHalves(t *testing.T) {
	b := newBed(t)
	out := tuple(wire.UDP, podA, 50000, world, 53)
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
	if got := b.sweepAt(usage.Snat, last+uint64(time.Minute), false); got != 0 {
		t.Error("a young half went")
	}
	if got := b.sweepAt(usage.Snat, last+uint64(time.Minute)+1, false); got != 1 {
		t.Errorf("%d flows collected, want the reverse half", got)
	}
	b.empty()
}

// A reverse half that the flow has left, for another port or another address, goes when its time has come; the pair that
// the flow has now stays.
func TestCollectLeftHalves(t *testing.T) {
	for name, change := range map[string]func(k *wire.Tuple){
		"port":    func(k *wire.Tuple) { k.Sport = wire.PortFrom(50007) },
		"address": func(k *wire.Tuple) { k.Src = addr(nodeOtherIP) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t)
			p := udp(podA, 50000, world, 53)
			out := tuple(wire.UDP, podA, 50000, world, 53)
			b.fromPod(p).is("forwarded")
			forward, reverse := b.pair(out)
			left := reverseKey(out, forward)
			change(&left)
			must(t, b.reverse.Insert(left, reverse))
			b.age(10 * time.Second)
			b.fromPod(p).is("forwarded")
			kept, _ := b.pair(out)
			if got := b.sweepAt(usage.Snat, kept.LastSeen+uint64(time.Minute), false); got != 1 {
				t.Errorf("%d flows collected, want the half that was left", got)
			}
			b.pair(out)
			if _, err := b.reverse.Get(left); err == nil {
				t.Error("the half that was left is still there")
			}
		})
	}
}

// A tombstone belongs to whoever made it, until the next sweep: then it was left, and goes.
func TestCollectTombstones(t *testing.T) {
	b := newBed(t)
	out := tuple(wire.UDP, podA, 50000, world, 53)
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
	if n, m := b.sweep(usage.Snat, 0, false), b.sweep(usage.Conntrack, 0, false); n != 1 || m != 1 {
		t.Errorf("%d and %d flows collected that were left, want 1 and 1", n, m)
	}
	b.empty()
}

// The same of a pod that is gone, and of a tombstone in the reverse half alone, which holds a port.
func TestCollectTombstonesOfDeletedPods(t *testing.T) {
	b := newBed(t)
	out := tuple(wire.UDP, podA, 50000, world, 53)
	b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
	b.fromPod(udp(podB, 50000, world, 54)).is("forwarded")
	forward, reverse := b.pair(out)
	reverse.LastSeen = 0
	must(t, b.reverse.Put(reverseKey(out, forward), reverse))
	must(t, b.snat.Delete(out))
	must(t, b.usage.Put(usage.Key{Table: usage.Snat}, usage.Value{Entries: 1}))
	out.Src, out.Dport = addr(podB), wire.PortFrom(54)
	forward, _ = b.pair(out)
	forward.LastSeen = 0
	must(t, b.snat.Put(out, forward))
	b.deletePod(podA)
	b.deletePod(podB)
	for range 3 {
		b.sweep(usage.Snat, 0, false)
	}
	b.empty()
}

// With no collector, the packets that need what a tombstone holds take it: a flow's own tuple, a port, a recorded flow.
func TestTombstonesGiveWay(t *testing.T) {
	b := newBed(t, withPorts(50000, 50000))
	p := udp(podA, 50000, world, 53)
	out := tuple(wire.UDP, podA, 50000, world, 53)
	b.fromPod(p).is("forwarded")
	forward, reverse := b.pair(out)
	forward.LastSeen, reverse.LastSeen = 0, 0
	must(t, b.snat.Put(out, forward))
	must(t, b.reverse.Put(reverseKey(out, forward), reverse))
	b.soon(func() result { return b.fromPod(p) }, "forwarded")
	b.count(1, 0)

	forward, reverse = b.pair(out)
	must(t, b.snat.Delete(out))
	must(t, b.usage.Put(usage.Key{Table: usage.Snat}, usage.Value{}))
	reverse.LastSeen = 0
	must(t, b.reverse.Put(reverseKey(out, forward), reverse))
	b.soon(func() result { return b.fromPod(udp(podB, 1, world, 53)) }, "forwarded")
	if n := len(all(b, b.snat)); n != 1 {
		t.Errorf("%d flows, want the one that took the port", n)
	}

	b.fromUplink(udp(world, 4000, podA, 53)).is("delivered")
	for k, v := range all[conntrack.Key, conntrack.Value](b, b.conntrack) {
		v.LastSeen = 0
		must(t, b.conntrack.Put(k, v))
	}
	for range 3 {
		b.fromUplink(udp(world, 4000, podA, 53)).is("delivered")
	}
	b.fromPod(udp(podA, 53, world, 4000)).is("forwarded").flow("udp " + podA + ":53 > " + world + ":4000")
}

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
		ToAddress: addr(nodeIP), ToPort: wire.PortFrom(50000), Ifindex: uint32(b.pods[podB].index), LastSeen: now(b),
	}
}

// A sweep of a table takes many short runs of the program: on the mean each is done within four milliseconds.
func TestSweepInSlices(t *testing.T) {
	b := newBed(t, withTables(1<<17, 64))
	const flows = 1 << 15
	var keys, worlds []wire.Tuple
	var forward, reverse []snat.Value
	e := fakeEntry(b)
	for i := range flows {
		out := tuple(wire.UDP, podA, uint16(i), world, 53+uint16(i>>14))
		e.ToAddress, e.ToPort = addr(nodeIP), wire.PortFrom(uint16(49152+i&0x3fff))
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
	if runs < 3*flows/1024 || took/time.Duration(runs) > 4*time.Millisecond {
		t.Errorf("two sweeps of %d flows took %d runs of %v", flows, runs, took/time.Duration(runs))
	}
	b.empty()
}

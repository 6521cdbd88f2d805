package prog

import (
	"testing"
	"time"

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
	{
		name: "masqueraded from another port", table: usage.Snat,
		opens: func(b *bed, p packet) result {
			p.src, p.sport, p.dst, p.dport = podA, 1000, world, 80
			return b.fromPod(p).is("forwarded")
		},
		closes: func(b *bed, p packet) result {
			flow, err := b.snat.Get(b.tuple(p.proto, podA, 1000, world, 80))
			must(b, err)
			p.src, p.sport, p.dst, p.dport = world, 80, nodeIP, flow.ToPort.Host()
			return b.fromUplink(p).is("delivered")
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
	question   = 30 * time.Second // and its answers
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
	inOneFamily(t, func(t *testing.T, f family) {
		for name, c := range tcpLives {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f)
				for _, o := range openers {
					c.story(b, o)
					o.lives(b, c.want)
				}
			})
		}
	})
}

// How long other flows live.
func TestLifetimes(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		datagram := packet{proto: wire.UDP}
		echo := packet{proto: wire.ICMP, icmpType: 8}
		for _, o := range openers {
			// Only a masqueraded flow takes a port.
			unanswered, answered := question, question
			if o.table == usage.Conntrack {
				unanswered, answered = time.Minute, 3*time.Minute
			}
			o.opens(b, datagram)
			o.lives(b, unanswered)
			o.opens(b, datagram)
			o.closes(b, datagram)
			o.closes(b, datagram)
			o.lives(b, answered)
			o.opens(b, datagram)
			b.age(time.Second)
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
	})
}

// A scan of the world's must not fill the table for a day: a segment to a port where nothing listens is answered by a
// reset, and no connection ever was.
func TestLifetimeOfScan(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
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
	})
}

// Under pressure everything but established connections lives a quarter as long.
func TestLifetimesUnderPressure(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for _, o := range openers {
			o.established(b)
			o.livesUnder(b, true, day)
			o.opens(b, segment(syn, 1000, 0, 0))
			o.livesUnder(b, true, opening/4)
		}
	})
}

// A host outside that knows a connection's addresses and ports alone ends it with no two segments, of whatever numbers.
func TestBlindSegmentsEndNothing(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		for name, forged := range map[string][]packet{
			"a window of one's own": {segment(ack, 5101+0x30000000, 0, 0), segment(rst, 5101+0x20000000, 0, 0)},
			"closed and opened":     {segment(fin|ack, 0x77777777, 0x66666666, 0), segment(syn, 0x12345678, 0, 0)},
		} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f)
				for _, o := range openers {
					o.established(b)
					o.opens(b, segment(ack, 1001, 5001, 100))
					o.closes(b, segment(ack, 5001, 1101, 100))
					o.opens(b, segment(ack, 1101, 5101, 0))
					fromWorld := o.closes
					if o.table == usage.Conntrack {
						fromWorld = o.opens
					}
					for _, p := range forged {
						fromWorld(b, p)
					}
					o.opens(b, segment(ack, 1101, 5101, 0)) // the challenge (RFC 5961, section 3.2), and on it goes
					o.closes(b, segment(ack, 5101, 1101, 100))
					o.opens(b, segment(ack, 1101, 5201, 0))
					o.lives(b, day)
				}
			})
		}
	})
}

package prog

import (
	"errors"
	"flag"
	"math/rand/v2"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// beside runs two functions at the same moment, round after round, each on a thread of its own in the node's namespace.
// between runs alone after each round.
func (b *bed) beside(rounds int, one, two func(round int) error, between func(round int)) {
	b.Helper()
	ns, err := os.Open("/proc/thread-self/ns/net")
	must(b, err)
	defer ns.Close()
	done := make(chan error)
	var arrived atomic.Int64
	worker := func(start <-chan int, f func(int) error) {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
		for round := range start {
			// The two spin until both are here, so that they start within nanoseconds.
			for arrived.Add(1); arrived.Load() < int64(2*round+2); {
			}
			if err == nil {
				err = f(round)
			}
			done <- err
		}
	}
	left, right := make(chan int), make(chan int)
	defer close(left)
	defer close(right)
	go worker(left, one)
	go worker(right, two)
	for round := range rounds {
		left <- round
		right <- round
		must(b, errors.Join(<-done, <-done))
		between(round)
	}
}

// send runs a frame through a program without looking at anything but the action; for threads beside the test's own.
func (b *bed) send(d wire.Direction, ifindex int, frame []byte) (uint32, error) {
	var in skb
	in.set(skbIfindex, uint32(ifindex))
	return b.programs[d].Run(&ebpf.RunOptions{Data: frame, Context: in[:]})
}

var rounds = flag.Int("rounds", amount(2000, 5000), "rounds of each race")

// Two CPUs meet the first packets of one flow at once, as with the two questions of a name lookup: one pair comes of it,
// whole, and is counted once.
func TestRaceOpeningOneFlow(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withTables(uint32(4**rounds), 64))
		l := b.pods[podA]
		for name, sport := range map[string]uint16{"port kept": 50000, "port chosen": 1000} {
			frames := make([][]byte, *rounds)
			for i := range frames {
				frames[i] = udp(podA, sport+uint16(i), world, 53).bytes(b.family)
			}
			open := func(round int) error {
				_, err := b.send(wire.FromPod, l.index, frames[round])
				return err
			}
			b.beside(*rounds, open, open, func(int) {})
			for i := range frames {
				b.pair(b.tuple(wire.UDP, podA, sport+uint16(i), world, 53))
			}
			b.count(*rounds, 0)
			if t.Failed() {
				t.Fatal(name)
			}
			b.sweep(usage.Snat, time.Hour, false)
			b.empty()
		}
	})
}

// A packet renews a flow in the moment in which it is collected: a packet that was let through has kept the flow.
func TestRaceCollectingUsedFlow(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		for name, c := range map[string]struct {
			d     wire.Direction
			frame func(b *bed) ([]byte, int)
		}{
			"by the pod": {wire.FromPod, func(b *bed) ([]byte, int) {
				return tcp(podA, 50000, world, 80, ack).bytes(b.family), b.pods[podA].index
			}},
			"by the world": {wire.FromUplink, func(b *bed) ([]byte, int) {
				return tcp(world, 80, nodeIP, 50000, ack).with(func(p *packet) { p.macTo = b.uplink.mac }).bytes(f), b.uplink.index
			}},
		} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f, withTables(32, 32))
				b.configure(config.FlowsMove) // no RST, whose action is that of a packet that was let through
				frame, ifindex := c.frame(b)
				out := b.tuple(wire.TCP, podA, 50000, world, 80)
				kept, gone := 0, 0
				var passed bool
				b.fromPod(tcp(podA, 50000, world, 80, syn)).is("forwarded")
				b.age(2 * time.Minute)
				use := func(int) error {
					action, err := b.send(c.d, ifindex, frame)
					passed = action == actRedirect
					return err
				}
				sweep := func(int) error {
					_, err := b.collect.SweepAt(usage.Snat, now(b), false)
					return err
				}
				judge := func(int) {
					_, err := b.snat.Get(out)
					// The other way round is possible: a packet that meets the tombstone of a flow that then stays.
					if passed && err != nil {
						t.Errorf("packet passed, flow not held: %v", err)
					}
					if err == nil {
						b.pair(out)
						kept++
					} else {
						gone++
						b.fromPod(tcp(podA, 50000, world, 80, syn)).is("forwarded")
					}
					b.age(2 * time.Minute)
					if t.Failed() {
						t.FailNow()
					}
				}
				// On a slow machine one of the two may be first for long.
				for tries := 0; tries == 0 || tries < 20 && (kept == 0 || gone == 0); tries++ {
					b.beside(*rounds/2, use, sweep, judge)
				}
				b.count(1, 0)
				if kept == 0 || gone == 0 {
					t.Errorf("no race: %d flows kept, %d gone", kept, gone)
				}
			})
		}
	})
}

// shot is a frame and where it is seen.
type shot struct {
	d       wire.Direction
	ifindex int
	frame   []byte
}

// salvo is traffic in all directions on few tuples, so that flows meet, collide and are answered.
func (b *bed) salvo() []shot {
	b.Helper()
	var shots []shot
	at := func(d wire.Direction, l veth, p packet) {
		p.macTo = l.mac
		shots = append(shots, shot{d, l.index, p.bytes(b.family)})
	}
	for i := range uint16(6) {
		for _, pod := range []string{podA, podB} {
			for _, p := range []packet{
				udp(pod, 50000+i, world, 53), udp(pod, 1000+i, world, 53), udp(pod, 53, world, 4000+i),
				tcp(pod, 50000+i, world, 80, syn), tcp(pod, 50000+i, world, 80, ack),
			} {
				at(wire.FromPod, b.pods[pod], p)
				at(wire.ToUplink, b.uplink, p)
			}
			at(wire.FromUplink, b.uplink, udp(world, 4000+i, pod, 53))
		}
		at(wire.ToUplink, b.uplink, udp(nodeIP, 50000+i, world, 53))
		at(wire.FromUplink, b.uplink, udp(world, 53, nodeIP, 50000+i))
		at(wire.FromUplink, b.uplink, tcp(world, 80, nodeIP, 50000+i, ack))
	}
	return shots
}

// Two CPUs open, answer and renew flows that have long been idle, while one of them collects: what is left are whole
// pairs, and every count is exact.
func TestRaceEverything(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPorts(50000, 50007), withTables(64, 64), withPaths(10*time.Millisecond))
		shots := b.salvo()
		fire := func(r *rand.Rand, times int) error {
			for range times {
				s := shots[r.IntN(len(shots))]
				if _, err := b.send(s.d, s.ifindex, s.frame); err != nil {
					return err
				}
			}
			return nil
		}
		random := []*rand.Rand{rand.New(rand.NewPCG(*seed, 1)), rand.New(rand.NewPCG(*seed, 2))}
		t.Logf("repeat with -seed=%d", *seed)
		one := func(int) error { return fire(random[0], 20) }
		two := func(round int) error {
			for table := range usage.Tables {
				if _, err := b.collect.SweepAt(table, now(b), false); err != nil || round%2 == 0 {
					return err
				}
			}
			return fire(random[1], 20)
		}
		b.beside(*rounds/2, one, two, func(round int) {
			forward := all(b, b.snat)
			for out := range forward {
				b.pair(out)
			}
			b.count(len(forward), len(all(b, b.conntrack)))
			if t.Failed() {
				t.Fatalf("in round %d", round)
			}
			b.age(2 * time.Minute)
		})
		b.sweep(usage.Snat, 2*day, false)
		b.sweep(usage.Conntrack, 2*day, false)
		b.empty()
	})
}

// While one CPU takes away the flows of one pod, another opens those of another: each count goes to its owner.
func TestRaceCounts(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withTables(8192, 64))
		opener := func(pod string) func(n int) error {
			l := b.pods[pod]
			p := tcp(pod, 40000, world, 80, syn)
			p.macTo, p.macFrom = l.mac, l.peer
			frame := p.bytes(b.family)
			program := b.repeater(b.programs[wire.FromPod], frame, 0, true)
			var ctx skb
			ctx.set(skbIfindex, uint32(l.index))
			return func(n int) error {
				_, err := program.Run(&ebpf.RunOptions{Data: frame, Context: ctx[:], Repeat: uint32(n)})
				return err
			}
		}
		openA, openB := opener(podA), opener(podB)
		b.beside(*rounds/10, func(int) error {
			if err := openA(1000); err != nil {
				return err
			}
			_, err := b.collect.SweepAt(usage.Snat, now(b)+uint64(time.Hour), false)
			return err
		}, func(int) error { return openB(1500) }, func(int) {})
		b.sweep(usage.Snat, 2*day, false)
		b.empty()
		if a, c, n := b.device(podA).SnatFlows, b.device(podB).SnatFlows, b.portsCounted(); a != 0 || c != 0 || n != 0 {
			t.Errorf("nothing is left, but %s counts %d flows, %s %d, and %d ports are counted", podA, a, podB, c, n)
		}
	})
}

// A backend's number is another Service's by the time that a new flow has chosen it: none goes there by the first one's frontend.
func TestRaceBackendOfAnother(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices, withTables(uint32(4**rounds), 64))
		first, second := b.serve(vip, 53, wire.UDP, podB+":53"), b.declare(vip2, 53, wire.UDP, services.ClusterIP)
		key := backends.Key{Backend: first.all[0]}
		ours, err := b.backends.Get(key)
		must(t, err)
		write := func(address wire.Addr, set uint32, flags backends.Flags) error {
			v := ours
			ours.Generation++
			v.Address, v.Set, v.Flags, v.Generation = address, set, flags, ours.Generation
			return b.backends.Put(key, v)
		}
		theirs := b.addr(remote)
		open := func(round int) error {
			for i := range uint16(10) {
				if _, err := b.send(wire.FromPod, b.pods[podA].index, udp(podA, 2000+uint16(round)*10+i, vip, 53).bytes(f)); err != nil {
					return err
				}
			}
			return nil
		}
		race := func() map[snat.Key]snat.Value {
			b.beside(*rounds, open, func(int) error {
				for range 20 {
					err := errors.Join(write(ours.Address, first.set, ours.Flags), write(ours.Address, first.set, 0), write(theirs, second.set, ours.Flags))
					if err != nil {
						return err
					}
				}
				return nil
			}, func(int) {})
			return all(b, b.snat)
		}
		opened := race()
		// A busy machine may run one of the two at a time, and the openers find the other Service's backend each time.
		for range 5 {
			if len(opened) == 0 {
				opened = race()
			}
		}
		for tuple, flow := range opened {
			if flow.FarAddress == theirs {
				t.Fatalf("%v goes to %v", tuple, flow.FarAddress)
			}
		}
		if len(opened) == 0 {
			t.Error("no flow was opened")
		}
	})
}

// redirected is the TC action of an answer that is sent (TC_ACT_REDIRECT).
const redirected = 7

// Two CPUs meet packets of one pod that do not fit, at once, as when it sends to two others: it is told of both.
func TestRaceAnswering(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := f.whole(udp(podA, 5000, remote, 53)) // nobody may fragment it
		p.payload = make([]byte, mtu)
		frame := p.bytes(f)
		var told atomic.Int64
		answer := func(int) error {
			action, err := b.send(wire.FromPod, b.pods[podA].index, frame)
			if action == redirected {
				told.Add(1)
			}
			return err
		}
		b.beside(*rounds, answer, answer, func(round int) {
			if round%40 == 0 { // a pod may be told a hundred at once
				b.addPod(podA)
			}
		})
		if want := int64(2 * *rounds); told.Load() != want {
			t.Errorf("the pod is told of %d packets of %d", told.Load(), want)
		}
	})
}

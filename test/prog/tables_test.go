package prog

import (
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// all returns a map's content.
func all[K comparable, V any](b *bed, m *typed.Map[K, V]) map[K]V {
	b.Helper()
	out := make(map[K]V)
	for e, err := range m.All() {
		must(b, err)
		out[e.Key] = e.Value
	}
	return out
}

// pair returns both halves of a masqueraded flow, by the tuple as the pod sends it, and asserts that each names the other.
func (b *bed) pair(out wire.Tuple) (forward, reverse snat.Value) {
	b.Helper()
	forward, err := b.snat.Get(out)
	must(b, err)
	reverse, err = b.reverse.Get(reverseKey(out, forward))
	must(b, err)
	if reverse.ToAddress != out.Src || reverse.ToPort != out.Sport || reverse.Ifindex != forward.Ifindex {
		b.Errorf("%v: reverse half %+v does not name it", out, reverse)
	}
	if forward.Flags&flow.Service != 0 && (reverse.FarAddress != out.Dst || reverse.FarPort != out.Dport) {
		b.Errorf("%v: reverse half %+v names another far side", out, reverse)
	}
	return forward, reverse
}

func reverseKey(out wire.Tuple, forward snat.Value) wire.Tuple {
	out.Src, out.Sport = forward.ToAddress, forward.ToPort
	if forward.Flags&flow.Service != 0 {
		out.Dst, out.Dport = forward.FarAddress, forward.FarPort
	}
	return out
}

// count asserts how many entries the flow tables hold, by their content and by every counter that should say so.
func (b *bed) count(masqueraded, recorded int) {
	b.Helper()
	forward, reverse, tracked := all(b, b.snat), all(b, b.reverse), all(b, b.conntrack)
	if len(forward) != masqueraded || len(reverse) != masqueraded || len(tracked) != recorded {
		b.Errorf("tables hold %d, %d and %d entries; want %d, %d, %d",
			len(forward), len(reverse), len(tracked), masqueraded, masqueraded, recorded)
	}
	for table, want := range map[usage.Table]int{usage.Snat: masqueraded, usage.Conntrack: recorded} {
		v, err := b.usage.Get(usage.Key{Table: table})
		must(b, err)
		if v.Entries != uint64(want) {
			b.Errorf("usage of %v says %d, want %d", table, v.Entries, want)
		}
	}
	snats, tracks := make(map[uint32]uint32), make(map[uint32]uint32)
	for _, v := range forward {
		if v.Ifindex != devices.World || v.Flags&flow.Service != 0 { // the node's own are nobody's share
			snats[v.Ifindex]++
		}
	}
	for _, v := range tracked {
		tracks[v.Ifindex]++
	}
	for k, v := range all(b, b.devices) {
		if v.SnatFlows != snats[k.Ifindex] || v.ConntrackFlows != tracks[k.Ifindex] {
			b.Errorf("device %d counts %d and %d flows, holds %d and %d",
				k.Ifindex, v.SnatFlows, v.ConntrackFlows, snats[k.Ifindex], tracks[k.Ifindex])
		}
	}
}

// empty asserts that no flow is left, in the tables or in any counter of them.
func (b *bed) empty() {
	b.Helper()
	b.count(0, 0)
}

// sweep runs ec_collect over a table as if that much time had passed, and returns how many flows went.
func (b *bed) sweep(table usage.Table, later time.Duration, pressure bool) int {
	b.Helper()
	return b.sweepAt(table, now(b)+uint64(later), pressure)
}

// sweepAt runs ec_collect over a table as if it was that late, and returns how many flows went.
func (b *bed) sweepAt(table usage.Table, when uint64, pressure bool) int {
	b.Helper()
	n, err := b.collect.SweepAt(table, when, pressure)
	must(b, err)
	return n
}

// now is the programs' clock: it moves in ticks, and no time stamp of theirs is ahead of it.
func now(b *bed) uint64 {
	b.Helper()
	var ts unix.Timespec
	must(b, unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &ts))
	return uint64(ts.Nano())
}

// outlast waits until the programs' clock has moved on by that much.
func (b *bed) outlast(d time.Duration) {
	b.Helper()
	for end := now(b) + uint64(d); now(b) < end; {
		time.Sleep(time.Millisecond)
	}
}

// within has act done in less than a limit by the programs' clock, which a machine may be too slow for now and then: it
// is done again until it was, each time after prepare.
func (b *bed) within(limit time.Duration, prepare, act func()) {
	b.Helper()
	for range 50 {
		prepare()
		began := now(b)
		act()
		if now(b)-began < uint64(limit) {
			return
		}
	}
	b.Fatalf("this machine has never been done within %v", limit)
}

// seen are the first and the last time stamp in the flow tables.
func (b *bed) seen() (first, last uint64) {
	b.Helper()
	var stamps []uint64
	for _, m := range []*snat.Map{b.snat, b.reverse} {
		for _, v := range all(b, m) {
			stamps = append(stamps, v.LastSeen)
		}
	}
	for _, v := range all(b, b.conntrack) {
		stamps = append(stamps, v.LastSeen)
	}
	if len(stamps) == 0 {
		b.Fatal("no flow is there")
	}
	return slices.Min(stamps), slices.Max(stamps)
}

// age moves a flow's time stamps into the past.
func (b *bed) age(by time.Duration) {
	b.Helper()
	for _, m := range []*snat.Map{b.snat, b.reverse} {
		for k, v := range all(b, m) {
			v.LastSeen = past(v.LastSeen, by)
			must(b, m.Put(k, v))
		}
	}
	for k, v := range all[conntrack.Key, conntrack.Value](b, b.conntrack) {
		v.LastSeen = past(v.LastSeen, by)
		must(b, b.conntrack.Put(k, v))
	}
}

// past moves a time stamp back, if need be to before the machine's start, where it wraps, but not to what marks a tombstone.
func past(stamp uint64, by time.Duration) uint64 {
	if stamp -= uint64(by); stamp < flow.Marks {
		stamp -= flow.Marks
	}
	return stamp
}

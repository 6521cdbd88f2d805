package prog

import (
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// flood opens flows from a pod until one is refused, and returns how many were not.
func flood(b *bed, pod string) (int, string) {
	b.Helper()
	defer func(before bool) { b.answers = before }(b.answers)
	b.answers = true
	for i := range 10000 {
		// One destination port each, so that ports are never scarce.
		if r := b.fromPod(udp(pod, uint16(50000+i%1000), world, uint16(1+i/1000*1000+i%1000))); r.what != "forwarded" {
			return i, r.what
		}
	}
	b.Fatal("a pod was never refused")
	return 0, ""
}

// One pod fills at most half of the table, a second at most half of the rest; a third still opens its flow, and nobody's
// established flow ends.
func TestSnatShare(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withTables(128, 128))
		idle := tcp(podC, 50000, world, 443, syn)
		out := b.fromPod(idle).is("forwarded")
		b.fromUplink(answer(out, idle)).is("delivered")
		n, why := flood(b, podA)
		if n != 64 || why != "drop SNAT_LIMIT" {
			t.Errorf("the first pod opened %d flows, then %q", n, why)
		}
		m, why := flood(b, podB)
		if m != 32 || why != "drop SNAT_LIMIT" {
			t.Errorf("the second pod opened %d flows, then %q", m, why)
		}
		b.count(1+n+m, 0)
		b.fromPod(idle.with(func(p *packet) { p.flags = ack })).is("forwarded").flow(out.view().String())
		b.fromPod(udp(podC, 50000, world, 53)).is("forwarded")
		// A flow that is there is not refused for being the pod's last.
		b.fromPod(udp(podA, 50000, world, 1)).is("forwarded")
		if got := b.sweep(usage.Snat, time.Hour, false); got != n+m+1 { // all but the idle connection
			t.Errorf("%d flows collected, want %d", got, n+m+1)
		}
		b.count(1, 0)
		b.sweep(usage.Snat, 2*day, false)
		b.empty()
		if again, _ := flood(b, podA); again != 64 {
			t.Errorf("after a collection the pod opened %d flows", again)
		}
	})
}

// With the table really full, the reason says so.
func TestSnatFull(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withTables(64, 64))
		must(t, b.usage.Put(usage.Key{Table: usage.Snat}, usage.Value{Entries: 64}))
		b.turnedAway(udp(podA, 50000, world, 53), "drop SNAT_FULL")
		must(t, b.usage.Put(usage.Key{Table: usage.Snat}, usage.Value{}))
		// The count is wrong and the map is full: the map has the last word, and no half of a pair stays behind.
		for i := range uint16(64) {
			k := b.tuple(wire.UDP, podB, i, world, 1)
			must(t, b.snat.Put(k, fakeEntry(b)))
		}
		b.turnedAway(udp(podA, 50000, world, 53), "drop SNAT_FULL")
		if left := all(b, b.reverse); len(left) != 0 {
			t.Errorf("half a pair stayed behind: %v", left)
		}
	})
}

// The world's flows to one pod fill at most half of the conntrack table, and another pod is still reached.
func TestConntrackShare(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withTables(128, 128))
		n := 0
		for ; b.fromUplink(udp(world, uint16(n), podA, 53)).what == "delivered"; n++ {
			if n > 128 {
				t.Fatal("never refused")
			}
		}
		b.fromUplink(udp(world, 9999, podA, 53)).is("drop CONNTRACK_LIMIT")
		if n != 64 {
			t.Errorf("%d flows recorded for one pod, want 64", n)
		}
		b.fromUplink(udp(world, 0, podA, 53)).is("delivered") // recorded before
		b.fromUplink(udp(world, 9999, podB, 53)).is("delivered")
		b.fromUplink(udp(remote, 9999, podA, 53)).is("delivered") // needs no record
		b.count(0, n+1)
		must(t, b.usage.Put(usage.Key{Table: usage.Conntrack}, usage.Value{Entries: 128}))
		b.fromUplink(udp(world, 9998, podB, 53)).is("drop CONNTRACK_FULL")
	})
}

// A device's record that was lost and put back counts from zero; ending the flows of before does not wrap that around,
// which would keep the pod from ever opening a flow again.
func TestCountersNeverWrapAround(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		b.fromUplink(udp(world, 4000, podA, 53)).is("delivered")
		b.addPod(podA) // as a resync does
		b.sweep(usage.Snat, time.Hour, false)
		b.sweep(usage.Conntrack, time.Hour, false)
		b.empty()
		b.fromPod(udp(podA, 50001, world, 53)).is("forwarded")
		b.count(1, 0)

		// The same of a table's count, when its map was lost and made anew.
		must(t, b.usage.Put(usage.Key{Table: usage.Snat}, usage.Value{}))
		b.sweep(usage.Snat, time.Hour, false)
		b.empty()
		b.fromPod(udp(podA, 50002, world, 53)).is("forwarded")
	})
}

// An address that two living pods have: the second takes no flow from the first, which goes on. When the first is gone, its
// flows are, and are taken off its count.
func TestFlowsOfMovedAddress(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		b.fromUplink(udp(world, 4000, podA, 53)).is("delivered")
		l := b.pods[podB]
		must(t, b.endpoints.Put(endpoints.Key{Address: b.addr(podA)}, endpoints.Value{Ifindex: uint32(l.index)}))
		must(t, b.devices.Put(devices.Key{Ifindex: uint32(l.index)}, devices.Value{Addresses: both(podA)}))
		b.fromPodAt(podB, udp(podA, 50000, world, 53)).is("drop NO_MAPPING")
		b.fromUplink(udp(world, 4000, podA, 53)).is("drop FLOW_COLLISION")
		b.count(1, 1)
		b.fromPodAt(podA, udp(podA, 50000, world, 53)).is("forwarded")
		b.fromPodAt(podA, udp(podA, 53, world, 4000)).is("forwarded").flow("udp " + podA + ":53 > " + world + ":4000")
		must(t, b.devices.Delete(devices.Key{Ifindex: uint32(b.pods[podA].index)}))
		b.fromPodAt(podB, udp(podA, 50000, world, 53)).is("forwarded")
		b.fromPodAt(podB, tcp(podA, 50000, world, 53, ack)).is("drop NO_MAPPING")
		b.fromPodAt(podB, udp(podA, 53, world, 4000)).is("forwarded")
		b.count(2, 0)
	})
}

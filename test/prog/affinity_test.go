package prog

import (
	"fmt"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/affinity"
	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// sticky writes a port of a Service with so many endpoints, of which a client keeps one for a minute.
func (b *bed) sticky(address string, ends int) *served {
	b.Helper()
	return b.serve(address, 53, wire.UDP, many(53, ends)...).keeps(60)
}

// opens opens a flow from a port of a pod to the Service and returns the backend that it leads to.
func (b *bed) opens(pod string, port uint16, address string) string {
	b.Helper()
	return b.fromPod(udp(pod, port, address, 53)).is("forwarded").view().dst
}

// chosen opens so many flows and returns their backends with how many each has got; each flow comes from a port of its own.
func (b *bed) chosen(pod, address string, first uint16, flows int) map[string]int {
	b.Helper()
	got := make(map[string]int)
	for i := range flows {
		got[b.opens(pod, first+uint16(i), address)]++
	}
	return got
}

// records are what the pods have in affinity, by slot.
func (b *bed) records() map[affinity.Key]affinity.Value {
	b.Helper()
	used := make(map[affinity.Key]affinity.Value)
	for k, v := range all(b, b.affinity) {
		if v.LastSeen != 0 {
			used[k] = v
		}
	}
	return used
}

// record is the only one there is.
func (b *bed) record() (affinity.Key, affinity.Value) {
	b.Helper()
	used := b.records()
	if len(used) != 1 {
		b.Fatalf("%d records", len(used))
	}
	for k, v := range used {
		return k, v
	}
	panic("unreachable")
}

// idle makes the only record one that was last used so long ago.
func (b *bed) idle(d time.Duration) {
	b.Helper()
	k, v := b.record()
	v.LastSeen = now(b) - uint64(d)
	must(b, b.affinity.Put(k, v))
}

// A client keeps its backend for as long as it opens flows in time, and no longer; one of a Service without affinity keeps none.
func TestAffinity(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.sticky(vip, 16)
		b.sticky(vip2, 16).keeps(0)
		if got := b.chosen(podA, vip2, 1000, 40); len(got) < 5 {
			t.Errorf("without affinity only %v were chosen", got)
		}
		kept := b.chosen(podA, vip, 1000, 40)
		if len(kept) != 1 {
			t.Fatalf("one client's flows went to %v", kept)
		}
		for i := range 3 { // each flow counts from its beginning
			b.idle(59 * time.Second)
			if got := b.opens(podA, uint16(2000+i), vip); kept[got] == 0 {
				t.Errorf("in time, another backend: %s", got)
			}
			if _, v := b.record(); now(b)-v.LastSeen > uint64(10*time.Second) {
				t.Error("the record was not renewed")
			}
		}
		late := make(map[string]int)
		for i := range 20 {
			b.idle(61 * time.Second)
			late[b.opens(podA, uint16(3000+i), vip)]++
		}
		if len(late) < 3 {
			t.Errorf("after the time was up, always %v", late)
		}
	})
}

// A backend that serves no more, or is another's by now, is not kept; what is chosen instead is.
func TestAffinityToAnEndedBackend(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		s := b.sticky(vip, 16)
		port := uint16(1000)
		for name, end := range map[string]func(*backends.Value){
			"it terminates":      func(v *backends.Value) { v.Flags &^= backends.Serving },
			"its number is used": func(v *backends.Value) { v.Generation++ },
			"by another Service": func(v *backends.Value) { v.Set++ },
		} {
			s.swap(many(53, 16)...)
			port++
			b.opens(podA, port, vip)
			_, before := b.record()
			s.set1(before.Backend, end)
			again := make(map[uint32]int)
			for range 8 {
				port++
				b.opens(podA, port, vip)
				_, after := b.record()
				again[after.Backend]++
				if v, err := b.backends.Get(backends.Key{Backend: after.Backend}); err != nil || v.Generation != after.Generation {
					t.Errorf("%s: the record has generation %d of %+v", name, after.Generation, v)
				}
			}
			if end := name != "its number is used" && again[before.Backend] > 0; len(again) != 1 || end {
				t.Errorf("%s: %d was kept; afterwards %v", name, before.Backend, again)
			}
		}
	})
}

// Two Services, and two clients of one, have nothing to do with each other.
func TestAffinityIsTheClients(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		differ := false
		for i := range 8 {
			address := fmt.Sprintf("10.96.1.%d", 1+i)
			b.sticky(address, 16)
			a, c := b.chosen(podA, address, 1000, 5), b.chosen(podB, address, 1000, 5)
			if len(a) != 1 || len(c) != 1 {
				t.Errorf("%s: %v and %v", address, a, c)
			}
			for backend := range a {
				differ = differ || c[backend] == 0
			}
		}
		if !differ {
			t.Error("two pods chose the same backend of eight Services")
		}
		if got := len(b.records()); got != 16 {
			t.Errorf("%d records for 2 pods and 8 Services", got)
		}
	})
}

// Where a Service uses this node's endpoints only, another node's that was kept for the same port elsewhere does not count.
func TestAffinityWithLocalPolicy(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		s := b.sticky(vip, 16)
		s.restrict(s.add(podB + ":53"))
		must(t, b.services.Put(services.Key{Address: b.addr(external)}, services.Value{}))
		must(t, b.services.Put(services.Key{Address: b.addr(external), Port: s.key.Port, Proto: s.key.Proto}, services.Value{Set: s.set}))
		b.opens(podA, 1000, external)
		b.fromPod(udp(podA, 1001, vip, 53)).is("delivered").flow("udp " + podA + ":1001 > " + podB + ":53")
		b.fromPod(udp(podA, 1002, vip, 53)).is("delivered")
	})
}

// slots are all places that a pod's records can take (shares_slot in bpf/lib/shares.h).
func slotsOf(ifindex uint32) map[affinity.Key]bool {
	places := make(map[affinity.Key]bool)
	for n := range uint64(affinity.Each) {
		own := (uint64(ifindex)*affinity.Each + n) * 0x9e3779b97f4a7c15
		own = (own ^ own>>32) * 0xbf58476d1ce4e5b9
		own = (own ^ own>>29) * 0x94d049bb133111eb
		places[affinity.Key{Slot: uint32(own >> 32 * affinity.Slots >> 32)}] = true
	}
	return places
}

// A pod takes its own places only, the oldest first, and of others' those whose record binds nobody any more.
func TestAffinityIsShared(t *testing.T) {
	inOneFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		const sets = 250
		var first *served
		for i := range sets {
			s := b.sticky(fmt.Sprintf("10.96.2.%d", 1+i), 4)
			b.opens(podA, 1000, fmt.Sprintf("10.96.2.%d", 1+i))
			if first == nil {
				first = s
			}
		}
		own := slotsOf(uint32(b.pods[podA].index))
		held := b.records()
		for k := range held {
			if !own[k] {
				t.Errorf("%+v is no place of the pod's", k)
			}
		}
		if len(held) < 2*len(own)/3 || len(held) > len(own) {
			t.Errorf("%d of %d places are taken", len(held), len(own))
		}
		if last := b.chosen(podA, fmt.Sprintf("10.96.2.%d", sets), 2000, 5); len(last) != 1 {
			t.Errorf("the last Service's backend was not kept: %v", last)
		}

		// All of another pod's places are taken by records of the first.
		template := affinity.Value{Client: b.addr(podA), Ifindex: uint32(b.pods[podA].index), Backend: first.all[0], Generation: 1, Set: first.set}
		for k := range slotsOf(uint32(b.pods[podB].index)) {
			v := template
			v.LastSeen = now(b)
			must(t, b.affinity.Put(k, v))
		}
		kept := func() bool {
			b.Helper()
			for _, v := range b.records() {
				if v.Ifindex == uint32(b.pods[podB].index) {
					return true
				}
			}
			return false
		}
		b.opens(podB, 1000, "10.96.2.1")
		if kept() {
			t.Error("a pod has taken another's place")
		}
		first.set1(first.all[0], func(v *backends.Value) { v.Flags = 0 })
		b.opens(podB, 1001, "10.96.2.2")
		if !kept() {
			t.Error("a record of a backend that has ended keeps its place")
		}
		first.set1(first.all[0], func(v *backends.Value) { v.Flags = backends.Serving })
		for k, v := range b.records() {
			if v.Ifindex == uint32(b.pods[podB].index) {
				v = template
				v.LastSeen = now(b)
				must(t, b.affinity.Put(k, v))
			}
		}
		must(t, b.devices.Delete(devices.Key{Ifindex: uint32(b.pods[podA].index)}))
		b.opens(podB, 1002, "10.96.2.3")
		if !kept() {
			t.Error("a record of a pod that is gone keeps its place")
		}
	})
}

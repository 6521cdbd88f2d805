package service

import (
	"maps"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// kernel is the maps as programs see them.
type kernel struct {
	Content
	limit, rangesLimit int
	// read is when a program could last read each slot, set and backend.
	read map[any]time.Time
}

func newKernel(c Capacities) *kernel {
	return &kernel{
		Content: Content{
			Services: map[services.Key]services.Value{}, Ranges: map[services.RangeKey]services.Range{}, Names: map[services.SetKey]services.ServiceName{},
			Sets: make([]services.Set, c.Sets), Backends: make([]backends.Value, c.Backends), Slots: make([]backends.Slot, c.Slots),
		},
		limit: int(c.Services), rangesLimit: int(c.Ranges), read: map[any]time.Time{},
	}
}

func (k *kernel) copy() Content {
	return Content{
		maps.Clone(k.Services), maps.Clone(k.Ranges), maps.Clone(k.Names), slices.Clone(k.Sets), slices.Clone(k.Backends), slices.Clone(k.Slots),
	}
}

// apply writes one list after the other and calls after each that has something.
func (k *kernel) apply(t testing.TB, w Writes, after func(list string)) {
	t.Helper()
	write := func(list string, n int, do func()) {
		if n > 0 {
			do()
			after(list)
		}
	}
	write("backends", len(w.Backends.Keys), func() { put(t, k.Backends, w.Backends, func(b backends.Key) uint32 { return b.Backend }) })
	write("slots", len(w.Slots.Keys), func() { put(t, k.Slots, w.Slots, func(b backends.SlotKey) uint32 { return b.Slot }) })
	write("sets", len(w.Sets.Keys), func() { put(t, k.Sets, w.Sets, func(b services.SetKey) uint32 { return b.Set }) })
	write("names", len(w.Names.Keys), func() { insert(t, k.Names, w.Names, len(k.Sets)) })
	write("ranges", len(w.Ranges.Keys), func() { insert(t, k.Ranges, w.Ranges, k.rangesLimit) })
	write("services", len(w.Services.Keys), func() { insert(t, k.Services, w.Services, k.limit) })
	write("gone services", len(w.GoneServices), func() { remove(t, k.Services, w.GoneServices) })
	write("gone ranges", len(w.GoneRanges), func() { remove(t, k.Ranges, w.GoneRanges) })
	write("gone names", len(w.GoneNames), func() { remove(t, k.Names, w.GoneNames) })
	write("emptied sets", len(w.EmptiedSets.Keys), func() { put(t, k.Sets, w.EmptiedSets, func(b services.SetKey) uint32 { return b.Set }) })
	write("retired", len(w.Retired.Keys), func() { put(t, k.Backends, w.Retired, func(b backends.Key) uint32 { return b.Backend }) })
}

func put[K, V any](t testing.TB, array []V, b Batch[K, V], index func(K) uint32) {
	t.Helper()
	for i, key := range b.Keys {
		if i > 0 && index(b.Keys[i-1]) >= index(key) {
			t.Fatalf("keys are not in order: %v", b.Keys)
		}
		array[index(key)] = b.Values[i]
	}
}

func insert[K, V comparable](t testing.TB, hash map[K]V, b Batch[K, V], limit int) {
	t.Helper()
	for i, key := range b.Keys {
		hash[key] = b.Values[i]
	}
	if len(hash) > limit {
		t.Fatalf("%d entries are written to a map of %d", len(hash), limit)
	}
}

func remove[K, V comparable](t testing.TB, hash map[K]V, gone Gone[K]) {
	t.Helper()
	for _, key := range gone {
		if _, there := hash[key]; !there {
			t.Fatalf("%v is deleted and is not there", key)
		}
		delete(hash, key)
	}
}

// reading is what a program finds behind a frontend.
type reading struct {
	services.Value
	content
	// ranges are who may ask, sorted, where not everybody may.
	ranges []string
}

// content is the backends of a set.
type content struct {
	cluster, local []Target
}

func (c content) equal(o content) bool {
	return slices.Equal(c.cluster, o.cluster) && slices.Equal(c.local, o.local)
}

// within says whether a set between two others has nothing that is in neither, and is not empty unless one of them is.
func (c content) within(a, b content) bool {
	strange := func(target Target) bool {
		return !slices.Contains(a.cluster, target) && !slices.Contains(b.cluster, target)
	}
	return !slices.ContainsFunc(c.cluster, strange) && (len(c.cluster) > 0 || len(a.cluster) == 0 || len(b.cluster) == 0)
}

func (k *kernel) set(n uint32) (c content) {
	block := k.Sets[n].Block
	for i := range block.Cluster() + block.Local() {
		b := k.Backends[k.Slots[block.First()+i].Backend]
		target := Target{b.Address, b.Port.Host()}
		if i < block.Cluster() {
			c.cluster = append(c.cluster, target)
		} else {
			c.local = append(c.local, target)
		}
	}
	return c
}

// lookups is what a program finds behind all frontends. It finds no backend of another set, none that does not serve, and
// none of another protocol or family.
func (k *kernel) lookups(t testing.TB) map[services.Key]reading {
	t.Helper()
	all := make(map[services.Key]reading, len(k.Services))
	for key, v := range k.Services {
		if key.Port == (wire.Port{}) {
			continue
		}
		block := k.Sets[v.Set].Block
		for i := range block.Cluster() + block.Local() {
			b := k.Backends[k.Slots[block.First()+i].Backend]
			if b.Set != v.Set || b.Flags&backends.Serving == 0 || b.Proto != key.Proto || b.Address.Netip().Is4() != key.Address.Netip().Is4() {
				t.Fatalf("%v leads to backend %+v, set %d", key, b, v.Set)
			}
		}
		all[key] = reading{v, k.set(v.Set), k.rangesOf(v)}
	}
	return all
}

// rangesOf is who may ask a frontend.
func (k *kernel) rangesOf(v services.Value) (all []string) {
	for key := range k.Ranges {
		if v.Flags&services.Ranges != 0 && key.Set == v.Set {
			all = append(all, key.Netip().String())
		}
	}
	slices.Sort(all)
	return all
}

type setNumber uint32
type slotNumber uint32
type backendNumber uint32

// note remembers what programs can read now.
func (k *kernel) note(now time.Time) {
	for _, v := range k.Services {
		k.read[setNumber(v.Set)] = now
		block := k.Sets[v.Set].Block
		for i := range block.Cluster() + block.Local() {
			slot := block.First() + i
			k.read[slotNumber(slot)] = now
			k.read[backendNumber(k.Slots[slot].Backend)] = now
		}
	}
}

// checkReuse fails when what programs have read a short while ago gets another meaning.
func (k *kernel) checkReuse(t testing.TB, w Writes, now time.Time) {
	t.Helper()
	soon := func(what any) bool {
		read, ever := k.read[what]
		return ever && now.Sub(read) < Grace
	}
	for i, key := range w.Slots.Keys {
		if soon(slotNumber(key.Slot)) {
			t.Fatalf("slot %d becomes %v, and programs read it until %v ago", key.Slot, w.Slots.Values[i], now.Sub(k.read[slotNumber(key.Slot)]))
		}
	}
	for _, key := range w.Names.Keys {
		if _, named := k.Names[key]; !named && soon(setNumber(key.Set)) {
			t.Fatalf("set %d is used again too early", key.Set)
		}
	}
	for i, key := range w.Backends.Keys {
		was, is := k.Backends[key.Backend], w.Backends.Values[i]
		if was.Set == 0 && soon(backendNumber(key.Backend)) {
			t.Fatalf("backend %d is used again too early", key.Backend)
		}
		same := was.Address == is.Address && was.Port == is.Port && was.Set == is.Set
		if was.Set != 0 && (!same || was.Generation != is.Generation) {
			t.Fatalf("backend %d is another while a set names it: %v, %v", key.Backend, was, is)
		}
	}
	for i, key := range w.Retired.Keys {
		was, is := k.Backends[key.Backend], w.Retired.Values[i]
		if is.Set == 0 && is.Generation != was.Generation+1 {
			t.Fatalf("backend %d goes with generation %d after %d", key.Backend, is.Generation, was.Generation)
		}
	}
}

// checkTidy fails when the maps hold what no frontend leads to, or one thing twice.
func (k *kernel) checkTidy(t testing.TB) {
	t.Helper()
	used, slotOf := map[uint32]bool{}, map[uint32]uint32{}
	for key, v := range k.Services {
		if key.Port != (wire.Port{}) {
			used[v.Set] = true
		}
	}
	for n := range used {
		if _, named := k.Names[services.SetKey{Set: n}]; !named {
			t.Fatalf("set %d has no name", n)
		}
		block := k.Sets[n].Block
		for i := range block.Cluster() + block.Local() {
			if other, twice := slotOf[block.First()+i]; twice {
				t.Fatalf("sets %d and %d share a slot", n, other)
			}
			slotOf[block.First()+i] = n
		}
	}
	if len(used) != len(k.Names) {
		t.Fatalf("%d sets have frontends and %d names", len(used), len(k.Names))
	}
	restricted := map[uint32]bool{}
	for _, v := range k.Services {
		restricted[v.Set] = restricted[v.Set] || v.Flags&services.Ranges != 0
	}
	for key, v := range k.Ranges {
		if !restricted[key.Set] || v.Set != key.Set {
			t.Fatalf("range %v of set %d is %+v, and no frontend asks for it", key.Netip(), key.Set, v)
		}
	}
	for n, set := range k.Sets {
		if !used[uint32(n)] && (set != services.Set{}) {
			t.Fatalf("set %d has content and no frontend", n)
		}
	}
	for n, b := range k.Backends {
		if b.Set != 0 && !used[b.Set] || b.Set == 0 && b.Flags != 0 {
			t.Fatalf("backend %d is %+v, and that set has no frontend", n, b)
		}
	}
}

func sameContent(t testing.TB, is, should Content) {
	t.Helper()
	for name, pair := range map[string][2]any{
		"services": {is.Services, should.Services}, "ranges": {is.Ranges, should.Ranges}, "names": {is.Names, should.Names}, "sets": {is.Sets, should.Sets},
		"backends": {is.Backends, should.Backends}, "slots": {is.Slots, should.Slots},
	} {
		if !reflect.DeepEqual(pair[0], pair[1]) {
			t.Fatalf("map %s is %v, should be %v", name, pair[0], pair[1])
		}
	}
}

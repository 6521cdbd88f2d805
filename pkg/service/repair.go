package service

import (
	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
)

// Repair returns what has to be written where the maps do not hold what they should, because a write failed or somebody else
// wrote. It changes no State.
func (s *State) Repair(c Content) (w Writes) {
	w.Services, w.GoneServices = differences(&s.services, c.Services)
	w.Ranges, w.GoneRanges = differences(&s.ranges, c.Ranges)
	w.Names, w.GoneNames = differences(&s.names, c.Names)
	compareArrays(s.slots.have, c.Slots, func(i uint32, v backends.Slot) { w.Slots.add(backends.SlotKey{Slot: i}, v) })
	compareArrays(s.sets.have, c.Sets, func(i uint32, v services.Set) { w.addSet(i, v, s.bySet[i] != nil) })
	compareArrays(s.backends.have, c.Backends, func(i uint32, v backends.Value) {
		w.addBackend(i, v, c.Backends[i].Flags)
	})
	return w
}

// differences returns what makes the content what it should be.
func differences[K, V comparable](should *hash[K, V], content map[K]V) (Batch[K, V], Gone[K]) {
	is := newHash(content, should.compare)
	for k, v := range should.have {
		is.put(k, v)
	}
	for k := range content {
		if _, there := should.have[k]; !there {
			is.remove(k)
		}
	}
	return is.flush()
}

func compareArrays[V comparable](should, content []V, write func(i uint32, v V)) {
	for i, v := range content {
		if i < len(should) && v != should[i] {
			write(uint32(i), should[i])
		}
	}
}

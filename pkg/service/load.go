package service

import (
	"maps"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Load makes a State of what the maps hold; of maps that are new, it is empty. Sets are recognised by their names, backends by
// set, address and port, and keep their numbers. What does not fit together is nobody's: the first Plan removes it. What is not
// in use is free at once: to start an agent takes longer than any program runs.
func Load(o Options, c Content) *State {
	s := &State{
		options:  o.clone(),
		services: newHash(c.Services, compareKeys),
		ranges:   newHash(c.Ranges, compareRanges),
		names:    newHash(c.Names, func(a, b services.SetKey) int { return int(a.Set) - int(b.Set) }),
		sets:     newArray(c.Sets, o.Capacities.Sets),
		backends: newArray(c.Backends, o.Capacities.Backends),
		slots:    newArray(c.Slots, o.Capacities.Slots),
		placed:   map[Name]*placed{}, users: map[wire.Addr][]*placed{}, touched: map[wire.Addr]bool{},
		contested: map[services.Key][]Name{}, pending: map[Name]bool{}, troubled: map[Name]*placed{},
	}
	s.bySet = make([]*set, len(s.sets.have))
	s.room.slots = newBuddies(uint32(len(s.slots.have)))
	s.loadSets()
	s.loadFrontends()
	s.loadBackends()
	s.loadBlocks()
	s.loadRanges()
	s.touchOwnAddresses(&Options{}, &o)
	s.room.sets = freeNumbers(uint32(len(s.bySet)), func(n uint32) bool {
		_, stray := slices.BinarySearch(s.straySets, n)
		return stray || s.bySet[n] != nil
	})
	s.room.backends = freeNumbers(uint32(len(s.backends.have)), func(n uint32) bool { return s.backends.have[n].Set != 0 })
	return s
}

// loadSets finds the sets that have frontends and a name of their own.
func (s *State) loadSets() {
	families := s.families()
	taken := map[setID]bool{}
	for _, k := range slices.SortedFunc(maps.Keys(s.names.have), s.names.compare) {
		family, ok := families[k.Set]
		id := idOf(s.names.have[k], family)
		if k.Set == 0 || int(k.Set) >= len(s.bySet) || !ok || taken[id] {
			continue
		}
		taken[id] = true
		t := &set{setID: id, number: k.Set, extent: noExtent}
		s.bySet[k.Set] = t
		if s.placed[id.Name] == nil {
			s.placed[id.Name] = &placed{Name: id.Name}
		}
		p := s.placed[id.Name]
		p.sets = append(p.sets, t)
	}
	mentioned := map[uint32]bool{}
	for _, v := range s.services.have {
		mentioned[v.Set] = true
	}
	for n := range s.sets.have {
		k := services.SetKey{Set: uint32(n)}
		_, named := s.names.have[k]
		if s.bySet[n] == nil && (named || mentioned[k.Set] || s.sets.have[n] != services.Set{}) {
			s.straySets = append(s.straySets, k.Set)
		}
	}
}

// families are those of the frontends of each set that has some.
func (s *State) families() map[uint32]wire.Family {
	families := map[uint32]wire.Family{}
	for k, v := range s.services.have {
		if k.Port != (wire.Port{}) {
			families[v.Set] = wire.FamilyOf(k.Address.Netip())
		}
	}
	return families
}

func (s *State) loadFrontends() {
	for k := range s.services.have {
		if t := s.owner(k); t != nil {
			p := s.placed[t.Name]
			p.keys = append(p.keys, k)
		}
	}
	for _, p := range s.placed {
		s.use(p)
	}
}

// loadBackends gives the sets their members, sorted. Numbers of none, or of a target that has one already, are strays.
func (s *State) loadBackends() {
	for i, b := range s.backends.have {
		if b.Set == 0 {
			continue
		}
		t := s.setAt(b.Set)
		if t == nil || i == 0 || wire.FamilyOf(b.Address.Netip()) != t.family {
			s.strayBackends = append(s.strayBackends, uint32(i))
			continue
		}
		t.members = append(t.members, member{Target{b.Address, b.Port.Host()}, uint32(i)})
	}
	for _, t := range s.bySet {
		if t != nil {
			s.sortMembers(t)
		}
	}
}

func (s *State) sortMembers(t *set) {
	slices.SortStableFunc(t.members, func(a, b member) int { return a.Compare(b.Target) })
	kept := t.members[:0]
	for _, m := range t.members {
		if n := len(kept); n > 0 && kept[n-1].Target == m.Target {
			s.strayBackends = append(s.strayBackends, m.number)
		} else {
			kept = append(kept, m)
		}
	}
	t.members = kept
}

// loadBlocks takes the slots of each set's block out of those that are free; of two that overlap the second is no block.
func (s *State) loadBlocks() {
	for _, t := range s.bySet {
		if t == nil {
			continue
		}
		block := s.sets.have[t.number].Block
		size := int(block.Cluster() + block.Local())
		if e := (extent{block.First(), orderFor(size)}); s.room.slots.reserve(e) {
			t.extent = e
		} else {
			t.unreadable = true
		}
	}
}

// loadRanges gives the sets the ranges that are there. Those of no set are among the first writes: the next Service that gets the
// number must not find them.
func (s *State) loadRanges() {
	for _, k := range slices.SortedFunc(maps.Keys(s.ranges.have), compareRanges) {
		if t := s.setAt(k.Set); t != nil {
			t.ranges = append(t.ranges, k)
		} else {
			s.ranges.remove(k)
		}
	}
}

// setAt is the set of a number; nil: nobody's.
func (s *State) setAt(n uint32) *set {
	if int(n) >= len(s.bySet) {
		return nil
	}
	return s.bySet[n]
}

// removeStrays removes what nobody has recognised.
func (s *State) removeStrays() {
	for k := range s.services.have {
		if k.Port == (wire.Port{}) && k.Proto == 0 {
			s.touched[k.Address] = true
		} else if s.owner(k) == nil {
			s.services.remove(k)
		}
	}
	for _, n := range s.straySets {
		s.names.remove(services.SetKey{Set: n})
		s.sets.put(n, services.Set{})
		if n != 0 {
			s.room.giveSet(n)
		}
	}
	for k := range s.names.have { // beyond the array, or of no set
		if s.setAt(k.Set) == nil {
			s.names.remove(k)
		}
	}
	for _, n := range s.strayBackends {
		s.retire(n)
	}
	s.straySets, s.strayBackends = nil, nil
}

// owner is the set that a frontend leads to; nil: the key is an address, or nobody's.
func (s *State) owner(k services.Key) *set {
	v, there := s.services.have[k]
	if !there || k.Port == (wire.Port{}) {
		return nil
	}
	return s.setAt(v.Set)
}

func idOf(r services.ServiceName, family wire.Family) setID {
	name := Name{services.Text(r.Namespace), services.Text(r.Name)}
	return setID{name, services.Text(r.PortName), r.Proto, family}
}

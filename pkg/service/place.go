package service

import (
	"fmt"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
)

// place brings what the maps have of a Service in line with the model, and returns the Services that gain or lose by it.
func (s *State) place(m *Model, n Name) (others []Name) {
	p := s.placed[n]
	if p == nil {
		p = &placed{Name: n}
		s.placed[n] = p
	}
	delete(s.pending, n)
	delete(s.troubled, n)
	s.withdraw(p)
	was := *p
	p.sets, p.keys, p.clusterIPs, p.problems = nil, nil, nil, nil
	var sets []wantedSet
	if service := m.Service(n); service != nil {
		sets, p.problems = wanted(service, m, s.options)
	}
	if len(was.sets) == 0 {
		if full := s.fullFor(m, n, sets); full != "" {
			s.refuse(p, full, "the Service is not served")
			sets = nil
		}
	}
	for _, w := range sets {
		others = append(others, s.placeSet(m, p, &was, w)...)
	}
	others = append(others, s.leave(p, &was)...)
	s.use(p)
	if len(p.problems) > 0 {
		s.troubled[n] = p
	}
	s.stale = s.stale || !slices.Equal(p.problems, was.problems)
	if len(p.sets)+len(p.lost)+len(p.problems) == 0 {
		delete(s.placed, n)
	}
	return others
}

// placeSet places one port of a Service, and returns whom it has taken frontends from.
func (s *State) placeSet(m *Model, p, was *placed, w wantedSet) (others []Name) {
	mine, others := s.claim(m, p, w)
	if len(mine) == 0 {
		return nil
	}
	t := s.setOf(was, w.setID)
	if t == nil {
		s.refuse(p, services.SetsName, fmt.Sprintf("port %d is not served", w.port))
		return nil
	}
	p.sets = append(p.sets, t)
	s.names.put(services.SetKey{Set: t.number}, w.record())
	s.fill(p, t, w)
	s.restrict(p, t, w, mine)
	for _, f := range mine {
		p.keys = append(p.keys, f.Key)
		s.services.put(f.Key, services.Value{Set: t.number, Flags: f.flags})
		for _, k := range f.keys()[1:] {
			if _, there := s.services.have[k]; !there { // what it says is seen to later
				s.services.put(k, services.Value{})
			}
		}
		if f.clusterIP && !slices.Contains(p.clusterIPs, f.Address) {
			p.clusterIPs = append(p.clusterIPs, f.Address)
		}
	}
	return others
}

// claim returns the frontends that a Service gets, and the younger Services that lose them.
func (s *State) claim(m *Model, p *placed, w wantedSet) (mine []frontend, others []Name) {
	need := 0
	for _, f := range w.frontends {
		if owner := s.olderOwner(m, p.Name, f.Key); owner != nil {
			p.lost = append(p.lost, f.Key)
			s.contested[f.Key] = append(s.contested[f.Key], p.Name)
			p.problems = append(p.problems, Problem{p.Name, Taken, fmt.Sprintf("%v is served for Service %v, which is older", f, owner.Name)})
			continue
		}
		if need += s.keysFor(f); need > s.keysLeft() {
			need -= s.keysFor(f)
			s.refuse(p, services.Name, fmt.Sprintf("%v is not served", f))
			continue
		}
		if owner := s.owner(f.Key); owner != nil && owner.Name != p.Name {
			others = append(others, owner.Name)
		}
		// One that waits may be the older by now: this Service has been made anew.
		for _, n := range s.contested[f.Key] {
			if m.compareAges(n, p.Name) < 0 {
				others = append(others, n)
			}
		}
		mine = append(mine, f)
	}
	return mine, others
}

// olderOwner returns the set that keeps a frontend from a Service; nil: nothing does.
func (s *State) olderOwner(m *Model, n Name, k services.Key) *set {
	owner := s.owner(k)
	if owner == nil || owner.Name == n || m.Service(owner.Name) == nil || m.compareAges(owner.Name, n) > 0 {
		return nil
	}
	return owner
}

// withdraw forgets the frontends that the Service would have had if an older one did not.
func (s *State) withdraw(p *placed) {
	for _, k := range p.lost {
		s.contested[k] = slices.DeleteFunc(s.contested[k], func(n Name) bool { return n == p.Name })
		if len(s.contested[k]) == 0 {
			delete(s.contested, k)
		}
	}
	p.lost = nil
}

// leave removes what the Service had and no longer has, and returns who waits for its frontends.
func (s *State) leave(p, was *placed) (others []Name) {
	for _, k := range was.keys {
		if owner := s.owner(k); owner != nil && owner.Name == p.Name && !slices.Contains(p.keys, k) {
			s.services.remove(k)
			others = append(others, s.contested[k]...)
		}
	}
	for _, t := range was.sets {
		if !slices.Contains(p.sets, t) {
			s.drop(t)
		}
	}
	return others
}

// setOf returns the set that the Service has already, or a new one; nil: there is no room.
func (s *State) setOf(was *placed, id setID) *set {
	if i := slices.IndexFunc(was.sets, func(t *set) bool { return t.setID == id }); i >= 0 {
		return was.sets[i]
	}
	n, ok := s.room.sets.take()
	if !ok {
		return nil
	}
	t := &set{setID: id, number: n, extent: noExtent}
	s.bySet[n] = t
	return t
}

// drop removes a set; its frontends lead elsewhere already, or nowhere.
func (s *State) drop(t *set) {
	s.names.remove(services.SetKey{Set: t.number})
	s.sets.put(t.number, services.Set{})
	s.bySet[t.number] = nil
	for _, m := range t.members {
		s.retire(m.number)
	}
	for _, k := range t.ranges {
		s.ranges.remove(k)
	}
	s.room.giveExtent(t.extent)
	s.room.giveSet(t.number)
}

// retire takes a number from a backend. What it was stays legible, for programs that have just read the number; flows see by
// the generation that it is another's.
func (s *State) retire(n uint32) {
	b := s.backends.have[n]
	b.Set, b.Flags = 0, 0
	b.Generation++
	s.backends.put(n, b)
	s.room.giveBackend(n)
}

// refuse notes that a map has no room.
func (s *State) refuse(p *placed, mapName, what string) {
	s.pending[p.Name] = true
	remedy := "it will be when other Services have gone or have fewer endpoints"
	if mapName == services.RangesName {
		remedy = "they can when other Services have gone or have fewer ranges; give wider ones"
	}
	p.problems = append(p.problems, Problem{p.Name, Full, fmt.Sprintf(
		"map %s has no room (%d entries), so %s; %s", mapName, s.capacity(mapName), what, remedy)})
}

func (s *State) capacity(mapName string) int {
	switch mapName {
	case services.Name:
		return int(s.options.Capacities.Services)
	case services.SetsName:
		return len(s.sets.have)
	case services.RangesName:
		return int(s.options.Capacities.Ranges)
	case backends.Name:
		return len(s.backends.have)
	}
	return len(s.slots.have)
}

// fullFor names a map that has no room for a Service that has nothing yet; empty: all of it fits.
func (s *State) fullFor(m *Model, n Name, sets []wantedSet) string {
	members, count := 0, 0
	var orders []int8
	keys := map[services.Key]bool{}
	for _, w := range sets {
		got := 0
		for _, f := range w.frontends {
			if s.olderOwner(m, n, f.Key) != nil {
				continue
			}
			got++
			for _, k := range f.keys() {
				if s.services.costs(k) {
					keys[k] = true
				}
			}
		}
		if got == 0 {
			continue
		}
		count++
		members += len(w.backends)
		orders = append(orders, orderFor(len(layoutOf(w.backends))))
	}
	switch {
	case len(keys) > s.keysLeft():
		return services.Name
	case count > len(s.room.sets):
		return services.SetsName
	case members > len(s.room.backends):
		return backends.Name
	case !s.room.slots.fit(orders):
		return backends.SlotsName
	}
	return ""
}

// keysFor is how many entries a frontend would add.
func (s *State) keysFor(f frontend) int {
	n := 0
	for _, k := range f.keys() {
		if s.services.costs(k) {
			n++
		}
	}
	return n
}

// keysLeft is how many entries the map services has room for.
func (s *State) keysLeft() int {
	return int(s.options.Capacities.Services) - len(s.services.have) - s.services.gone - s.room.leaving
}

package service

import (
	"fmt"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// apiServer is the Service without which no pod can ask for anything: its last endpoints stay, whatever the API says.
var apiServer = Name{"default", "kubernetes"}

// layoutOf lists the backends of a block: the set Cluster, then the set Local.
func layoutOf(all []Backend) (indexes []int) {
	for i, b := range all {
		if b.Cluster {
			indexes = append(indexes, i)
		}
	}
	for i, b := range all {
		if b.Local {
			indexes = append(indexes, i)
		}
	}
	return indexes
}

// fill gives a set its backends.
func (s *State) fill(p *placed, t *set, w wantedSet) {
	content := s.sets.have[t.number]
	content.Affinity = w.affinity
	s.sets.put(t.number, content)
	serves := slices.ContainsFunc(w.backends, func(b Backend) bool { return b.Cluster })
	if t.Name == apiServer && !serves && content.Block.Cluster() > 0 && !t.unreadable {
		return
	}
	numbers, complete := s.number(t, w.backends)
	if !complete { // not how many: with each change it would be another problem
		s.refuse(p, backends.Name, fmt.Sprintf("some endpoints of port %d get no connections", w.port))
	}
	var cluster, local []uint32
	for i, b := range w.backends {
		if b.Cluster && numbers[i] != 0 {
			cluster = append(cluster, numbers[i])
		}
		if b.Local && numbers[i] != 0 {
			local = append(local, numbers[i])
		}
	}
	switch {
	case s.arrange(t, cluster, local):
	case s.room.soon(orderFor(len(cluster) + len(local))): // no lack of room: a large set changes often
		s.pending[p.Name] = true
	default:
		s.refuse(p, backends.SlotsName, fmt.Sprintf("new endpoints of port %d get fewer connections than others, or none", w.port))
	}
}

// number brings the members of a set in line with what is wanted and returns each one's number; 0 for those that there was no
// room for.
func (s *State) number(t *set, want []Backend) (numbers []uint32, complete bool) {
	numbers, complete = make([]uint32, len(want)), true
	members := make([]member, 0, len(want))
	had := t.members
	for i, b := range want {
		for ; len(had) > 0 && had[0].Compare(b.Target) < 0; had = had[1:] {
			s.retire(had[0].number)
		}
		if len(had) > 0 && had[0].Target == b.Target {
			numbers[i], had = had[0].number, had[1:]
		} else if n, ok := s.room.backends.take(); ok {
			numbers[i] = n
		} else {
			complete = false
			continue
		}
		members = append(members, member{b.Target, numbers[i]})
		s.backends.put(numbers[i], backends.Value{
			Address: b.Address, Port: wire.PortFrom(b.Port), Proto: t.protocol, Flags: flagsOf(b),
			Generation: s.backends.have[numbers[i]].Generation, Set: t.number,
		})
	}
	for _, m := range had {
		s.retire(m.number)
	}
	t.members = members
	return numbers, complete
}

func flagsOf(b Backend) (f backends.Flags) {
	if b.Cluster || b.Local {
		f |= backends.Serving
	}
	if b.Answers {
		f |= backends.Answers
	}
	if b.OnNode {
		f |= backends.OnNode
	}
	return f
}

// arrange makes the block of a set, if it is another than now, in slots that nobody reads; false when there are none, and what
// stands is changed instead as far as that goes.
func (s *State) arrange(t *set, cluster, local []uint32) bool {
	content := s.sets.have[t.number]
	want := slices.Concat(cluster, local)
	if !t.unreadable && s.blockIs(content.Block, cluster, local) {
		return true
	}
	e, ok := s.room.slots.take(orderFor(len(want)))
	if !ok {
		s.patch(t, cluster, local)
		return false
	}
	for i, n := range want {
		s.slots.put(e.first+uint32(i), backends.Slot{Backend: n})
	}
	s.room.giveExtent(t.extent)
	t.extent, t.unreadable = e, false
	content.Block = services.BlockOf(e.first, uint32(len(cluster)), uint32(len(local)))
	s.sets.put(t.number, content)
	return true
}

func (s *State) blockIs(b services.Block, cluster, local []uint32) bool {
	if int(b.Cluster()) != len(cluster) || int(b.Local()) != len(local) {
		return false
	}
	stands := func(first int, want []uint32) bool {
		for i, n := range want {
			if s.slots.have[first+i].Backend != n {
				return false
			}
		}
		return true
	}
	first := int(b.First())
	return stands(first, cluster) && stands(first+len(cluster), local)
}

// patch takes backends that serve no more out of a block where it stands, each slot by itself: another comes in its place.
func (s *State) patch(t *set, cluster, local []uint32) {
	content := s.sets.have[t.number]
	b := content.Block
	if t.unreadable {
		b = 0
	}
	first, clusters, locals := b.First(), b.Cluster(), b.Local()
	if len(cluster) == 0 {
		clusters, locals = 0, 0
	} else if len(local) == 0 {
		locals = 0
	}
	s.replace(first, clusters, cluster)
	s.replace(first+clusters, locals, local)
	content.Block = services.BlockOf(first, clusters, locals)
	s.sets.put(t.number, content)
}

// replace keeps of some slots those that have one of the numbers and gives the others those that have none yet, then any.
func (s *State) replace(first, count uint32, numbers []uint32) {
	missing := make(map[uint32]bool, len(numbers))
	for _, n := range numbers {
		missing[n] = true
	}
	var others []uint32
	for i := first; i < first+count; i++ {
		if n := s.slots.have[i].Backend; missing[n] {
			delete(missing, n)
		} else {
			others = append(others, i)
		}
	}
	next := append(slices.DeleteFunc(slices.Clone(numbers), func(n uint32) bool { return !missing[n] }), numbers...)
	for i, slot := range others {
		s.slots.put(slot, backends.Slot{Backend: next[i%len(next)]})
	}
}

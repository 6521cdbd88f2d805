package service

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// State is what the maps of Services hold, and whose it is. It starts with what a former agent has left.
//
//	state := service.Load(options, content)
//	for update := range updates {
//		changed := model.Apply(update)
//		write(state.Plan(model, changed, time.Now()))
//		state.Written(time.Now())
//	}
type State struct {
	options Options

	services hash[services.Key, services.Value]
	ranges   hash[services.RangeKey, services.Range]
	names    hash[services.SetKey, services.ServiceName]
	sets     array[services.Set]
	backends array[backends.Value]
	slots    array[backends.Slot]

	placed map[Name]*placed
	// bySet has the set of each number; nil: nobody's.
	bySet []*set
	// users are the Services with a frontend at an address; touched are the addresses whose entry may have to change.
	users   map[wire.Addr][]*placed
	touched map[wire.Addr]bool
	// contested are the Services that want a frontend that an older one has.
	contested map[services.Key][]Name
	// pending are the Services that a full map keeps from being served as they say. They were last tried at that time; freed
	// says that there is more room since.
	pending map[Name]bool
	tried   time.Time
	freed   bool
	// troubled are the Services with problems, and problems all of these unless they are stale.
	troubled map[Name]*placed
	problems []Problem
	stale    bool

	room room
	// strays are what a former agent has left and no Service has: numbers of sets and of backends.
	straySets, strayBackends []uint32
	// started says that the first Plan has been made.
	started bool
}

// placed is a Service that has something in the maps, or would have it if there were no problem.
type placed struct {
	Name
	sets []*set
	// keys are the frontends that it has, lost those that an older Service has.
	keys, lost []services.Key
	// addresses are those of keys, each once.
	addresses  []wire.Addr
	clusterIPs []wire.Addr
	problems   []Problem
}

// set is a set in the maps.
type set struct {
	setID
	number uint32
	// extent is where its block is; unreadable says that what the word says is no block of its own.
	extent     extent
	unreadable bool
	// members are all its backends, serving or not, sorted.
	members []member
	// ranges are who may ask its load balancer, sorted.
	ranges []services.RangeKey
}

type member struct {
	Target
	number uint32
}

// Plan returns what has to be written after the named Services or their slices have changed. All of it counts as written from
// now on. Nothing is to be written before the model is complete; the first Plan after that also removes what the maps hold of
// Services that are gone.
func (s *State) Plan(m *Model, changed []Name, now time.Time) Writes {
	if !m.Complete() {
		return Writes{}
	}
	names := append(slices.Clone(changed), s.due(now)...)
	if !s.started {
		names = slices.AppendSeq(names, maps.Keys(m.services))
		names = slices.AppendSeq(names, maps.Keys(s.placed))
	}
	s.admitNodeAddresses()
	queue := newQueue(m, names)
	for n, ok := queue.next(); ok; n, ok = queue.next() {
		queue.add(s.place(m, n))
	}
	if !s.started {
		s.removeStrays()
		s.started = true
	}
	s.touchAddresses()
	return s.flush()
}

// due frees what has waited long enough and returns the Services to try again, if that has made room. Where others change all
// the time something is freed all the time: then all that wait are tried after each Grace, not with each change.
func (s *State) due(now time.Time) []Name {
	s.freed = s.room.release(now) || s.freed
	if !s.freed || now.Sub(s.tried) < Grace {
		return nil
	}
	s.freed, s.tried = false, now
	return slices.Collect(maps.Keys(s.pending))
}

// Written tells that the writes of the last Plan have been carried out: from then on Grace counts.
func (s *State) Written(now time.Time) { s.room.settle(now) }

// Again is when Plan has to be called though nothing has changed, since what is refused may have room then; zero: it need not.
func (s *State) Again() time.Time {
	switch {
	case len(s.pending) == 0:
		return time.Time{}
	case s.freed:
		return s.tried.Add(Grace)
	}
	return s.room.next()
}

// Configure changes the options and returns the Services that have to be planned anew. The capacities stay.
func (s *State) Configure(o Options, m *Model) (changed []Name) {
	was := s.options
	o.Capacities = was.Capacities
	s.options = o.clone()
	if was.NodeName != o.NodeName || was.Zone != o.Zone || was.ExternalIPs != o.ExternalIPs {
		changed = m.Names()
	}
	differs := func(a netip.Addr) bool { return was.HeldAddresses[a.Unmap()] != o.HeldAddresses[a.Unmap()] }
	external := func(a netip.Addr) bool { return differs(a) || was.Broadcast[a.Unmap()] != o.Broadcast[a.Unmap()] }
	for a := range s.users {
		if differs(a.Netip()) {
			s.touched[a] = true
		}
	}
	s.touchOwnAddresses(&was, &o)
	for n, service := range m.services {
		if slices.ContainsFunc(service.ClusterIPs, differs) || slices.ContainsFunc(service.external(), external) || service.meetsOthers(was.HostPorts, o.HostPorts) {
			changed = append(changed, n)
		}
	}
	slices.SortFunc(changed, Name.Compare)
	return slices.Compact(changed)
}

func (o Options) clone() Options {
	o.HeldAddresses, o.OwnAddresses, o.NodeAddresses = maps.Clone(o.HeldAddresses), maps.Clone(o.OwnAddresses), maps.Clone(o.NodeAddresses)
	o.HostPorts, o.Broadcast = maps.Clone(o.HostPorts), maps.Clone(o.Broadcast)
	o.APIServers, o.Guarded = slices.Clone(o.APIServers), slices.Clone(o.Guarded)
	return o
}

// touchOwnAddresses notes on which of the node's addresses something else answers.
func (s *State) touchOwnAddresses(was, is *Options) {
	for _, all := range []map[netip.Addr]bool{was.OwnAddresses, was.NodeAddresses, is.OwnAddresses, is.NodeAddresses} {
		for of := range all {
			if a := wire.AddrFrom(of); was.ownFlags(a) != is.ownFlags(a) {
				s.touched[a] = true
			}
		}
	}
}

// NodePorts are those of all frontends, sorted, each once.
func (s *State) NodePorts() (all []uint16) {
	for k := range s.services.have {
		if k.IsNodePort() {
			all = append(all, k.Port.Host())
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// Problems lists what is wrong now, by the names of the Services. The caller must not change it.
func (s *State) Problems() []Problem {
	if !s.stale {
		return s.problems
	}
	s.stale, s.problems = false, nil
	for _, p := range s.troubled {
		s.problems = append(s.problems, p.problems...)
	}
	slices.SortStableFunc(s.problems, func(a, b Problem) int { return a.Service.Compare(b.Service) })
	return s.problems
}

// flush turns what has changed into writes.
func (s *State) flush() (w Writes) {
	w.Services, w.GoneServices = s.services.flush()
	w.Ranges, w.GoneRanges = s.ranges.flush()
	w.Names, w.GoneNames = s.names.flush()
	s.room.leave(len(w.GoneServices), len(w.GoneRanges))
	s.slots.flush(func(i uint32, _, now backends.Slot) { w.Slots.add(backends.SlotKey{Slot: i}, now) })
	s.sets.flush(func(i uint32, _, now services.Set) { w.addSet(i, now, s.bySet[i] != nil) })
	s.backends.flush(func(i uint32, before, now backends.Value) {
		w.addBackend(i, now, before.Flags)
	})
	return w
}

// addSet says that a set comes before its frontends, or goes after them.
func (w *Writes) addSet(i uint32, v services.Set, named bool) {
	if named {
		w.Sets.add(services.SetKey{Set: i}, v)
	} else {
		w.EmptiedSets.add(services.SetKey{Set: i}, v)
	}
}

// addBackend says that a backend serves before a set names it, and ceases after, as it ceases to answer.
func (w *Writes) addBackend(i uint32, v backends.Value, before backends.Flags) {
	if v.Set == 0 || before&^v.Flags&(backends.Serving|backends.Answers) != 0 {
		w.Retired.add(backends.Key{Backend: i}, v)
	} else {
		w.Backends.add(backends.Key{Backend: i}, v)
	}
}

// queue is the Services that are to be placed, the oldest first, so that it has its frontends before others lose them.
type queue struct {
	model *Model
	names []Name
	in    map[Name]bool
}

func newQueue(m *Model, names []Name) *queue {
	q := &queue{model: m, in: make(map[Name]bool, len(names))}
	for _, n := range names {
		if !q.in[n] {
			q.in[n] = true
			q.names = append(q.names, n)
		}
	}
	slices.SortFunc(q.names, q.compare)
	return q
}

// compare sorts those to be taken first to the end.
func (q *queue) compare(a, b Name) int { return q.model.compareAges(b, a) }

func (q *queue) add(names []Name) {
	for _, n := range names {
		if !q.in[n] {
			q.in[n] = true
			at, _ := slices.BinarySearchFunc(q.names, n, q.compare)
			q.names = slices.Insert(q.names, at, n)
		}
	}
}

func (q *queue) next() (Name, bool) {
	if len(q.names) == 0 {
		return Name{}, false
	}
	n := q.names[len(q.names)-1]
	q.names = q.names[:len(q.names)-1]
	delete(q.in, n)
	return n, true
}

// compareAges sorts Services that are gone first, to make room, then the older ones.
func (m *Model) compareAges(a, b Name) int {
	x, y := m.services[a], m.services[b]
	if x == nil || y == nil {
		return cmp.Or(compareBools(x != nil, y != nil), a.Compare(b))
	}
	return cmp.Or(x.Created.Compare(y.Created), a.Compare(b))
}

package service

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// dice decides what happens next: by chance, or as a fuzzer says.
type dice func(n int) int

func (d dice) one(in int) bool { return d(in) == 0 }

// trial is a planner, the maps that it writes, and what the API says.
type trial struct {
	testing.TB
	roll    dice
	options Options
	model   *Model
	state   *State
	kernel  *kernel
	now     time.Time
	// roomy says that no map gets full, so that all is exactly as it should be.
	roomy bool
}

func newTrial(t testing.TB, c Capacities, roll dice) *trial {
	o := Options{NodeName: "n0", Zone: "z0", HeldAddresses: map[netip.Addr]bool{}, OwnAddresses: map[netip.Addr]bool{}, NodeAddresses: map[netip.Addr]bool{}, ExternalIPs: true, Capacities: c}
	k := newKernel(c)
	r := &trial{TB: t, roll: roll, options: o, model: NewModel(), state: Load(o, k.copy()), kernel: k, now: time.Unix(1000, 0)}
	return r
}

// step lets one thing happen and checks what follows.
func (r *trial) step() {
	r.now = r.now.Add(time.Duration(r.roll(1500)) * time.Millisecond)
	var changed []Name
	switch {
	case r.roll.one(60):
		r.restart()
	case r.roll.one(60):
		r.damage()
	case r.roll.one(30):
		changed = r.reconfigure()
	case r.roll.one(40):
		changed = r.model.Apply(r.relist())
	default:
		u := Update{}
		for range 1 + r.roll(3) {
			r.change(&u)
		}
		changed = r.model.Apply(u)
	}
	r.plan(changed)
}

// plan carries a Plan out and looks at the maps after each list.
func (r *trial) plan(changed []Name) {
	r.Helper()
	r.kernel.note(r.now)
	w := r.state.Plan(r.model, changed, r.now)
	if r.roomy {
		r.kernel.checkReuse(r, w, r.now)
	}
	if w.Empty() {
		r.state.Written(r.now)
		return
	}
	before, after := &kernel{Content: r.kernel.copy()}, &kernel{Content: r.kernel.copy(), limit: r.kernel.limit, rangesLimit: r.kernel.rangesLimit}
	after.apply(r, w, func(string) {})
	r.kernel.apply(r, w, func(list string) { r.compare(list, before, after) })
	r.now = r.now.Add(time.Duration(r.roll(50)) * time.Millisecond)
	r.state.Written(r.now)
	r.kernel.note(r.now)
	r.kernel.checkTidy(r)
	r.checkWanted(r.kernel.lookups(r))
}

// compare fails when a reader between two lists finds what was neither before nor is afterwards.
func (r *trial) compare(list string, before, after *kernel) {
	r.Helper()
	for key, v := range before.Services {
		if _, there := r.kernel.Services[key]; !there && after.Services[key] != (services.Value{}) {
			r.Fatalf("after list %s there is no %v, which was %+v", list, key, v)
		}
	}
	for key, is := range r.kernel.lookups(r) {
		if is.Value != before.Services[key] && is.Value != after.Services[key] {
			r.Fatalf("after list %s, %v is %+v: before %+v, then %+v", list, key, is.Value, before.Services[key], after.Services[key])
		}
		was, will := before.set(is.Set), after.set(is.Set)
		whole := is.content.equal(was) || is.content.equal(will)
		if !whole && r.roomy || !is.content.within(was, will) { // in full maps slots are written where they stand
			r.Fatalf("after list %s, %v leads to %+v: before %+v, then %+v", list, key, is.content, was, will)
		}
		r.compareRanges(list, is, before.rangesOf(is.Value), after.rangesOf(is.Value))
	}
}

// compareRanges fails when a client is let in between two lists whom the same Service lets ask neither before nor afterwards, or
// one is kept out whom it does both times.
func (r *trial) compareRanges(list string, is reading, was, will []string) {
	r.Helper()
	for _, one := range is.ranges {
		if !slices.Contains(was, one) && !slices.Contains(will, one) {
			r.Fatalf("after list %s, %v may ask: before %v, then %v", list, one, was, will)
		}
	}
	for _, one := range was {
		if slices.Contains(will, one) && !slices.Contains(is.ranges, one) {
			r.Fatalf("after list %s, %v may not ask: before %v, then %v", list, one, was, will)
		}
	}
}

// expected is what the objects say that a program should find, by a plain walk: the oldest first.
func (r *trial) expected() (frontends map[services.Key]reading, owners map[services.Key]Name) {
	frontends, owners = map[services.Key]reading{}, map[services.Key]Name{}
	names := r.model.Names()
	slices.SortFunc(names, r.model.compareAges)
	for _, n := range names {
		sets, _ := wanted(r.model.Service(n), r.model, r.options)
		for _, w := range sets {
			want := reading{}
			for _, b := range w.backends {
				if b.Cluster {
					want.cluster = append(want.cluster, b.Target)
				}
				if b.Local {
					want.local = append(want.local, b.Target)
				}
			}
			for _, f := range w.frontends {
				if _, taken := owners[f.Key]; !taken {
					want.Flags, want.ranges = f.flags, nil
					if f.flags&services.Ranges != 0 {
						want.ranges = textsOf(w.ranges)
					}
					frontends[f.Key], owners[f.Key] = want, n
				}
			}
		}
	}
	return frontends, owners
}

func textsOf(ranges []netip.Prefix) (texts []string) {
	for _, one := range ranges {
		texts = append(texts, one.String())
	}
	slices.Sort(texts)
	return slices.Compact(texts)
}

// checkWanted fails when the maps do not say what the objects say, or say it of another Service.
func (r *trial) checkWanted(is map[services.Key]reading) {
	r.Helper()
	should, owners := r.expected()
	for key, reading := range is {
		owner := idOf(r.kernel.Names[services.SetKey{Set: reading.Set}], 0).Name
		want := should[key]
		want.Set = reading.Set
		switch {
		case r.roomy && (owner != owners[key] || !reflect.DeepEqual(reading, want)):
			r.Fatalf("%v of %v leads to %+v, should be of %v: %+v", key, owner, reading, owners[key], want)
		case owner == owners[key]:
			for _, one := range reading.ranges {
				if !slices.Contains(want.ranges, one) {
					r.Fatalf("%v of %v may be asked by %v, should be one of %v", key, owner, one, want.ranges)
				}
			}
			for _, target := range reading.cluster {
				if !slices.Contains(want.cluster, target) {
					r.Fatalf("%v of %v leads to %v, should be one of %+v", key, owner, target, want)
				}
			}
		}
	}
	if r.roomy && len(is) != len(should) {
		r.Fatalf("there are %d frontends, should be %d", len(is), len(should))
	}
	if len(r.state.pending) == 0 && len(is) != len(should) {
		r.Fatalf("there are %d frontends, should be %d, and nothing is said to be refused", len(is), len(should))
	}
	r.checkAddresses(is)
}

// checkAddresses compares the entries of addresses with what a walk over all frontends says.
func (r *trial) checkAddresses(is map[services.Key]reading) {
	r.Helper()
	want := map[services.Key]services.Value{}
	note := func(all map[netip.Addr]bool, flags services.Flags) {
		for a, on := range all {
			key := services.Key{Address: wire.AddrFrom(a)}
			if _, there := r.kernel.Services[key]; on && (there || r.roomy) { // else there is no room
				want[key] = services.Value{Flags: flags}
			}
		}
	}
	note(r.options.OwnAddresses, services.Own)
	note(r.options.NodeAddresses, services.Node|services.Own)
	for key, reading := range is {
		if key.IsNodePort() {
			continue
		}
		address := services.Key{Address: key.Address}
		flags := want[address].Flags
		if len(reading.cluster) > 0 && !r.options.HeldAddresses[key.Address.Netip()] {
			flags |= services.Answers
		}
		owner := r.model.Service(idOf(r.kernel.Names[services.SetKey{Set: reading.Set}], 0).Name)
		if owner != nil && slices.Contains(owner.ClusterIPs, key.Address.Netip()) {
			flags |= services.ClusterIP
		}
		want[address] = services.Value{Flags: flags}
	}
	got := maps.Clone(r.kernel.Services)
	maps.DeleteFunc(got, func(k services.Key, _ services.Value) bool { return k.Port != (wire.Port{}) })
	if !maps.Equal(got, want) {
		r.Fatalf("addresses are %v, should be %v", got, want)
	}
}

// restart begins anew with what is in the maps: it is all recognised.
func (r *trial) restart() {
	r.Helper()
	r.state = Load(r.options, r.kernel.copy())
	sameContent(r, r.kernel.copy(), r.state.content())
	clear(r.kernel.read) // it takes longer than a program
	w := r.state.Plan(r.model, nil, r.now)
	if r.roomy && !w.Empty() {
		r.Fatalf("after a restart with nothing changed this is written: %+v", w)
	}
	r.kernel.apply(r, w, func(string) {})
	r.state.Written(r.now)
}

func (s *State) content() Content {
	return Content{s.services.have, s.ranges.have, s.names.have, s.sets.have, s.backends.have, s.slots.have}
}

// damage writes anything anywhere, and either repairs that or begins anew.
func (r *trial) damage() {
	r.Helper()
	k, more := r.kernel, false
	for range 1 + r.roll(4) {
		set, backend, slot := uint32(r.roll(len(k.Sets))), uint32(r.roll(len(k.Backends))), uint32(r.roll(len(k.Slots)))
		switch r.roll(11) {
		case 0:
			k.Slots[slot].Backend = backend
		case 1:
			k.Sets[set].Block = services.BlockOf(slot, uint32(r.roll(4)), uint32(r.roll(4)))
		case 2:
			k.Sets[set] = services.Set{}
		case 3:
			k.Backends[backend].Set = set
		case 4:
			k.Backends[backend].Address = wire.AddrFrom(r.endpointAddress())
			k.Backends[backend].Port = wire.PortFrom(uint16(r.roll(3)))
		case 5:
			delete(k.Names, services.SetKey{Set: set})
		case 6:
			k.Names[services.SetKey{Set: set}] = k.Names[services.SetKey{Set: uint32(r.roll(len(k.Sets)))}]
		case 7:
			if keys := slices.SortedFunc(maps.Keys(k.Services), compareKeys); len(keys) > 0 {
				delete(k.Services, keys[r.roll(len(keys))])
			}
		case 8:
			k.Ranges[services.RangeKeyFrom(set, r.sourceRange())] = services.Range{Set: backend}
			more = !r.roomy // what a full map lacks would not fit before that has gone
		case 9:
			if keys := slices.SortedFunc(maps.Keys(k.Ranges), compareRanges); len(keys) > 0 {
				delete(k.Ranges, keys[r.roll(len(keys))])
			}
		case 10:
			if keys := slices.SortedFunc(maps.Keys(k.Services), compareKeys); len(keys) > 0 {
				k.Services[keys[r.roll(len(keys))]] = services.Value{Set: set}
			}
		}
	}
	if r.roll.one(2) && !more {
		w := r.state.Repair(k.copy())
		k.apply(r, w, func(string) {})
		sameContent(r, k.Content, r.state.content())
		return
	}
	clear(k.read)
	r.state = Load(r.options, k.copy())
	k.apply(r, r.state.Plan(r.model, nil, r.now), func(string) {})
	r.state.Written(r.now)
	for i, b := range k.Backends {
		if b.Set == 0 {
			k.Backends[i].Flags = 0 // damage that nobody can read
			r.state.backends.have[i].Flags = 0
		}
	}
	k.checkTidy(r)
}

// reconfigure changes the node.
func (r *trial) reconfigure() []Name {
	o := r.options
	o.HeldAddresses, o.OwnAddresses, o.NodeAddresses = maps.Clone(o.HeldAddresses), maps.Clone(o.OwnAddresses), maps.Clone(o.NodeAddresses)
	switch r.roll(6) {
	case 0:
		o.Zone = fmt.Sprint("z", r.roll(2))
	case 1:
		o.ExternalIPs = !o.ExternalIPs
	case 2:
		a := r.serviceAddress()
		o.NodeAddresses[a] = !o.NodeAddresses[a]
	case 3:
		a := r.serviceAddress()
		o.OwnAddresses[a] = !o.OwnAddresses[a]
	default:
		a := r.serviceAddress()
		o.HeldAddresses[a] = !o.HeldAddresses[a]
	}
	r.options = o
	return r.state.Configure(o, r.model)
}

// relist is a complete update after some have been missed.
func (r *trial) relist() Update {
	missed := Update{}
	for range r.roll(4) {
		r.change(&missed)
	}
	u := Update{Complete: true}
	for n, s := range r.model.services {
		if !slices.Contains(missed.GoneServices, n) && !slices.ContainsFunc(missed.Services, func(o Service) bool { return o.Name == n }) {
			u.Services = append(u.Services, *s)
		}
	}
	for n, s := range r.model.slices {
		if !slices.Contains(missed.GoneSlices, n) && !slices.ContainsFunc(missed.Slices, func(o Slice) bool { return o.Name == n }) {
			u.Slices = append(u.Slices, *s)
		}
	}
	u.Services, u.Slices = append(u.Services, missed.Services...), append(u.Slices, missed.Slices...)
	return u
}

// change adds a change of one object to an update.
func (r *trial) change(u *Update) {
	switch r.roll(10) {
	case 0, 1:
		u.Services = append(u.Services, r.service())
	case 2:
		u.GoneServices = append(u.GoneServices, r.name())
	case 3:
		u.GoneSlices = append(u.GoneSlices, r.sliceName())
	default:
		u.Slices = append(u.Slices, r.slice())
	}
}

func (r *trial) name() Name      { return Name{"ns", fmt.Sprint("s", r.roll(7))} }
func (r *trial) sliceName() Name { return Name{"ns", fmt.Sprint("e", r.roll(14))} }

func (r *trial) serviceAddress() netip.Addr {
	if r.roll.one(3) {
		return netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(1 + r.roll(4))})
	}
	return netip.AddrFrom4([4]byte{10, 96, 0, byte(1 + r.roll(8))})
}

func (r *trial) endpointAddress() netip.Addr {
	if r.roll.one(3) {
		return netip.AddrFrom16([16]byte{0: 0xfc, 15: byte(1 + r.roll(4))})
	}
	return netip.AddrFrom4([4]byte{10, 244, 0, byte(1 + r.roll(6))})
}

func (r *trial) portName() string { return []string{"", "a", "b"}[r.roll(3)] }
func (r *trial) protocol() wire.Protocol {
	return []wire.Protocol{wire.TCP, wire.TCP, wire.UDP, sctp}[r.roll(4)]
}

func (r *trial) service() Service {
	s := Service{
		Name: r.name(), Created: time.Unix(int64(r.roll(3)), 0),
		InternalLocal: r.roll.one(4), ExternalLocal: r.roll.one(4), Affinity: uint32(10 * r.roll(2)),
	}
	for range 1 + r.roll(2) {
		s.ClusterIPs = append(s.ClusterIPs, r.serviceAddress())
	}
	if r.roll.one(3) {
		s.ExternalIPs = append(s.ExternalIPs, r.serviceAddress())
	}
	if r.roll.one(4) {
		s.LoadBalancerIPs = append(s.LoadBalancerIPs, r.serviceAddress())
		if r.roll.one(2) {
			s.SourceRanges = []netip.Prefix{}
		}
		for range r.roll(4) {
			s.SourceRanges = append(s.SourceRanges, r.sourceRange())
		}
	}
	nodePorts := r.roll.one(2)
	for range 1 + r.roll(3) {
		p := Port{Name: r.portName(), Protocol: r.protocol(), Port: uint16(80 + r.roll(2))}
		if nodePorts {
			p.NodePort = uint16(79 + r.roll(4))
		}
		s.Ports = append(s.Ports, p)
	}
	return s
}

func (r *trial) sourceRange() netip.Prefix {
	if r.roll.one(3) {
		return netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfe, 1: byte(r.roll(3))}), 16)
	}
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, byte(r.roll(4)), 0}), 22+r.roll(3)).Masked()
}

func (r *trial) slice() Slice {
	s := Slice{Name: r.sliceName(), Service: r.name().Name}
	for range 1 + r.roll(2) {
		s.Ports = append(s.Ports, SlicePort{Name: r.portName(), Protocol: r.protocol(), Port: uint16(80 + r.roll(2))})
	}
	for range r.roll(5) {
		e := Endpoint{Address: r.endpointAddress(), Ready: !r.roll.one(4), Serving: !r.roll.one(3), Terminating: r.roll.one(3)}
		if !r.roll.one(4) {
			e.Node = fmt.Sprint("n", r.roll(2))
		}
		if !r.roll.one(3) {
			e.ForZones = []string{fmt.Sprint("z", r.roll(2))}
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}

var (
	roomy = Capacities{Services: 256, Ranges: 256, Sets: 160, Backends: 1024, Slots: 2048}
	tight = Capacities{Services: 24, Ranges: 5, Sets: 9, Backends: 14, Slots: 37}
)

// changes is how many of them the random test makes: a million in its long form.
func changes() int {
	if priv.Long() {
		return 1_000_000
	}
	return 20_000
}

func TestRandomChanges(t *testing.T) {
	for name, c := range map[string]Capacities{"roomy": roomy, "tight": tight} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const length = 500
			for seed := range changes() / length / 2 {
				random := rand.New(rand.NewPCG(uint64(seed), 17))
				r := newTrial(t, c, random.IntN)
				r.roomy = name == "roomy"
				r.run(seed, length)
			}
		})
	}
}

func (r *trial) run(seed, length int) {
	r.Helper()
	i := 0
	defer func() {
		if r.Failed() {
			r.Logf("seed %d, change %d", seed, i)
		}
	}()
	r.model.Apply(Update{Complete: true})
	for ; i < length; i++ {
		r.step()
	}
}

func FuzzPlan(f *testing.F) {
	f.Add([]byte("a few changes, as good as any others: 0123456789"), true)
	f.Add([]byte("\x01\x02\x03\x00\x00\x00\xff\xfe"), false)
	f.Fuzz(func(t *testing.T, data []byte, isRoomy bool) {
		c := tight
		if isRoomy {
			c = roomy
		}
		r := newTrial(t, c, func(n int) int {
			if len(data) == 0 {
				return 0
			}
			v := int(data[0])
			data = data[1:]
			return v * 7 % n
		})
		r.roomy = isRoomy
		r.model.Apply(Update{Complete: true})
		for len(data) > 0 {
			r.step()
		}
	})
}

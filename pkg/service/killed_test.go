package service

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// An agent that is killed between any two entries leaves maps in which every frontend leads to backends of its own, and from which
// the next one goes on as if nothing had happened.
func TestKilledAtAnyWrite(t *testing.T) {
	for name, c := range map[string]Capacities{"roomy": roomy, "tight": tight} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(8) {
				random := rand.New(rand.NewPCG(seed, 18))
				r := newTrial(t, c, random.IntN)
				r.roomy = name == "roomy"
				r.model.Apply(Update{Complete: true})
				for range 150 {
					r.step()
					if r.roll.one(3) {
						r.kill()
					}
				}
			}
		})
	}
}

// kill makes a change, writes a part of what follows from it, and begins anew.
func (r *trial) kill() {
	r.Helper()
	u := Update{}
	for range 1 + r.roll(4) {
		r.change(&u)
	}
	w := r.state.Plan(r.model, r.model.Apply(u), r.now)
	left := r.roll(1 + w.Len())
	r.kernel.apply(r, w.upTo(left), func(string) {})
	r.kernel.lookups(r)
	r.state = Load(r.options, r.kernel.copy())
	clear(r.kernel.read) // it takes longer than a program
	for range 3 {        // what an interrupted agent has left may be in the way of what is wanted until Grace is over
		r.plan(nil)
		r.now = r.now.Add(Grace)
	}
}

// What has been given up and could not be written is used by nobody else, however long that lasts: packets still find it.
func TestNothingUnwrittenIsUsedAgain(t *testing.T) {
	r := quiet(t, Capacities{Services: 64, Sets: 3, Backends: 3, Slots: 4})
	r.put("old", "10.96.0.1", "10.244.0.1", "10.244.0.2")
	changed := r.model.Apply(Update{GoneServices: []Name{{"ns", "old"}}})
	for range 3 { // and no write succeeds
		r.state.Plan(r.model, changed, r.now)
		r.now = r.now.Add(2 * Grace)
	}
	s, slice := web(t, "new", "10.96.0.2", "10.244.0.3", "10.244.0.4")
	r.state.Plan(r.model, r.model.Apply(Update{Services: []Service{s}, Slices: []Slice{slice}}), r.now)
	r.kernel.apply(t, r.state.Repair(r.kernel.copy()), func(list string) {
		if found := r.find("10.96.0.1"); slices.Contains(found, "10.244.0.3") {
			t.Errorf("after list %s the old Service leads to %v", list, found)
		}
	})
	r.state.Written(r.now)
	r.now = r.now.Add(Grace)
	r.plan(nil)
	r.want("10.96.0.2", "10.244.0.3", "10.244.0.4")
}

// upTo is the first n entries.
func (w Writes) upTo(n int) Writes {
	upTo(&w.Backends, &n)
	upTo(&w.Slots, &n)
	upTo(&w.Sets, &n)
	upTo(&w.Names, &n)
	upTo(&w.Ranges, &n)
	upTo(&w.Services, &n)
	goneUpTo(&w.GoneServices, &n)
	goneUpTo(&w.GoneRanges, &n)
	goneUpTo(&w.GoneNames, &n)
	upTo(&w.EmptiedSets, &n)
	upTo(&w.Retired, &n)
	return w
}

func upTo[K, V any](b *Batch[K, V], n *int) {
	some := min(*n, len(b.Keys))
	b.Keys, b.Values, *n = b.Keys[:some], b.Values[:some], *n-some
}

func goneUpTo[K any](g *Gone[K], n *int) {
	some := min(*n, len(*g))
	*g, *n = (*g)[:some], *n-some
}

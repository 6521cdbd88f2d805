package service

import (
	"slices"
	"time"
)

// room is what of the maps is free. What has been given up is free only after Grace.
type room struct {
	sets, backends numbers
	slots          *buddies
	// leaving and leavingRanges count keys of the maps services and source_range that have been deleted a short while ago.
	leaving, leavingRanges int
	// waiting are what has been given up, the oldest first; those from settled on have not been written yet.
	waiting []waiting
	settled int
}

// waiting is one thing that has been given up: the zero value of what it is not.
type waiting struct {
	since            time.Time // when the maps had lost it
	set              uint32
	backend          uint32
	extent           extent
	frontend, ranges int
}

// numbers are free ones, those to be given first at the end.
type numbers []uint32

// freeNumbers are those from 1 on that are not in use.
func freeNumbers(capacity uint32, used func(uint32) bool) (free numbers) {
	for n := capacity; n > 1; n-- {
		if !used(n - 1) {
			free = append(free, n-1)
		}
	}
	return free
}

func (n *numbers) take() (uint32, bool) {
	if len(*n) == 0 {
		return 0, false
	}
	last := len(*n) - 1
	number := (*n)[last]
	*n = (*n)[:last]
	return number, true
}

func (r *room) giveSet(n uint32) {
	r.waiting = append(r.waiting, waiting{set: n, extent: noExtent})
}

func (r *room) giveBackend(n uint32) {
	r.waiting = append(r.waiting, waiting{backend: n, extent: noExtent})
}

func (r *room) giveExtent(e extent) {
	if e.order >= 0 {
		r.waiting = append(r.waiting, waiting{extent: e})
	}
}

func (r *room) leave(keys, ranges int) {
	if keys+ranges > 0 {
		r.leaving, r.leavingRanges = r.leaving+keys, r.leavingRanges+ranges
		r.waiting = append(r.waiting, waiting{extent: noExtent, frontend: keys, ranges: ranges})
	}
}

// settle says that what was given up until now is in no map any more.
func (r *room) settle(now time.Time) {
	for ; r.settled < len(r.waiting); r.settled++ {
		r.waiting[r.settled].since = now
	}
}

// release frees what has waited long enough, and says whether there was any. What has not been written yet does not wait: packets
// may find it.
func (r *room) release(now time.Time) bool {
	n := 0
	for ; n < r.settled && now.Sub(r.waiting[n].since) >= Grace; n++ {
		w := r.waiting[n]
		r.leaving, r.leavingRanges = r.leaving-w.frontend, r.leavingRanges-w.ranges
		r.slots.put(w.extent)
		if w.set != 0 {
			r.sets = append(r.sets, w.set)
		}
		if w.backend != 0 {
			r.backends = append(r.backends, w.backend)
		}
	}
	r.waiting = append(r.waiting[:0], r.waiting[n:]...)
	r.settled -= n
	return n > 0
}

// soon says whether an extent of that order, or a larger one, will be free without anything else being given up.
func (r *room) soon(order int8) bool {
	return slices.ContainsFunc(r.waiting, func(w waiting) bool { return w.extent.order >= order })
}

// next is when something will be released; zero: nothing waits.
func (r *room) next() time.Time {
	if r.settled == 0 {
		return time.Time{}
	}
	return r.waiting[0].since.Add(Grace)
}

package agent

import "time"

// schedule says when passes are due: the next one over the whole node, and perhaps one before it that events have called
// for. Nothing puts a pass off: on a busy network events may never cease.
type schedule struct {
	timer *time.Timer
	next  time.Time // the next pass
	whole time.Time // the next one over the whole node

	began, ended time.Time     // the newest pass
	took         time.Duration // how long it took
}

func newSchedule(first time.Duration) *schedule {
	now := time.Now()
	return &schedule{timer: time.NewTimer(first), next: now.Add(first), whole: now.Add(first)}
}

// within has the next pass over the whole node begin by then.
func (s *schedule) within(d time.Duration) {
	if at := time.Now().Add(d); at.Before(s.whole) {
		s.whole = at
	}
	s.bring(s.whole)
}

// called has a pass begin for what events have been about, as soon as passes for such reasons may.
func (s *schedule) called(r reason) {
	if r != 0 {
		s.bring(time.Now().Add(max(passDelay, r.pause(s.took)-time.Since(s.ended))))
	}
}

func (s *schedule) bring(at time.Time) {
	if at.Before(s.next) {
		s.next = at
		s.timer.Reset(time.Until(at))
	}
}

// begin reports whether the pass that is due is one over the whole node.
func (s *schedule) begin() (whole bool) {
	s.began = time.Now()
	return !s.began.Before(s.whole)
}

// end notes that it has ended, and by when the whole node is to be looked at again.
func (s *schedule) end(again time.Duration) {
	s.ended = time.Now()
	s.took = s.ended.Sub(s.began)
	if !s.began.Before(s.whole) {
		s.whole = s.ended.Add(resync)
	}
	s.next = s.whole
	s.timer.Reset(time.Until(s.next))
	s.within(again)
}

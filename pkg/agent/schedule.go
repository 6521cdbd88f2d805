package agent

import (
	"time"

	"golang.org/x/sys/unix"
)

// schedule says when passes are due: the next one over the whole node, and perhaps one before it that events have called
// for. Nothing puts a pass off: on a busy network events may never cease.
type schedule struct {
	timer *time.Timer
	next  time.Time // the next pass
	whole time.Time // the next one over the whole node

	began, ended time.Time     // the newest pass
	cost         time.Duration // the processor time that this process used meanwhile
	spent        time.Duration // processor time until it began
	reading      time.Duration // what very many routes took of the cost
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
func (s *schedule) called(t trigger) {
	if t != 0 {
		s.bring(time.Now().Add(max(passDelay, t.pause(s.cost, s.reading)-time.Since(s.ended))))
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
	s.began, s.spent = time.Now(), processorTime()
	return !s.began.Before(s.whole)
}

// end notes that it has ended, and by when the whole node is to be looked at again.
func (s *schedule) end(again time.Duration) {
	s.ended = time.Now()
	s.cost = processorTime() - s.spent
	rest := max(resync, restShare*s.reading)
	if !s.began.Before(s.whole) {
		s.whole = s.ended.Add(rest)
	}
	s.next = s.whole
	s.timer.Reset(time.Until(s.next))
	if again >= resync {
		again = rest
	}
	s.within(again)
}

const (
	// Passes for such reasons take at most one part in so many of a processor.
	casualShare, urgentShare = 50, 10
	// readingShare is that of reading very many routes for such reasons, restShare without a reason.
	readingShare, restShare = 15, 40
	// maxUrgentPause is how long what is ours may be gone although passes take long, maxCasualPause how long others' changes wait.
	maxUrgentPause = 700 * time.Millisecond
	maxCasualPause = 5 * time.Second
)

// pause is how long after a pass that cost so much processor time another one may begin. reading is what very many routes took of it:
// what others change all the time may not have them read too often.
func (t trigger) pause(cost, reading time.Duration) time.Duration {
	share, most := casualShare, maxCasualPause
	if t&(urgent|lost) != 0 {
		share, most = urgentShare, maxUrgentPause
	}
	pause := min(max(minPassInterval, time.Duration(share)*cost), most)
	if t&urgent == 0 {
		pause = max(pause, readingShare*reading)
	}
	return pause
}

// processorTime is what this process has used since it began. By the clock, a pass takes longer on a busy machine, but costs no
// more. The time of one thread says nothing: a goroutine moves from thread to thread, and garbage is collected on others. So
// what else the agent does during a pass counts as the pass's, which only makes passes rarer, up to the longest pauses.
func processorTime() time.Duration {
	var used unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &used) // with these arguments it cannot fail
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

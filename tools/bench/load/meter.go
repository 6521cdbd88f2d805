package load

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// phase is how far a sample has come.
type phase int

const (
	waiting phase = iota // the window is not known, or the start not reached
	warming
	measuring
	over
)

// meter takes the state of the machine and of this process at the two edges of the window, between two turns of the
// end's loop, so that what the loop counts and what the CPUs did are of the same time.
type meter struct {
	base    time.Time // a moment, and
	origin  int64     // what CLOCK_MONOTONIC showed then
	window  atomic.Pointer[window]
	stopped atomic.Bool
	wake    chan struct{} // has an element when a message changed something

	phase         phase
	first, last   snapshot
	stat, delayed *os.File
}

// snapshot is raw: it is parsed when the sample is over.
type snapshot struct {
	at     int64
	usage  unix.Rusage
	stat   []byte
	delays []byte
}

func newMeter() (*meter, error) {
	m := &meter{wake: make(chan struct{}, 16)}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return nil, fmt.Errorf("read the clock: %w", err)
	}
	m.base, m.origin = time.Now(), now.Nano()
	var err error
	if m.stat, err = os.Open("/proc/stat"); err != nil {
		return nil, fmt.Errorf("open what the kernel says about CPU time: %w", err)
	}
	if m.delayed, err = os.Open("/proc/thread-self/schedstat"); err != nil {
		return nil, fmt.Errorf("open what the kernel says about this thread: %w", err)
	}
	for _, s := range []*snapshot{&m.first, &m.last} {
		s.stat, s.delays = make([]byte, 128<<10), make([]byte, 128)
	}
	return m, nil
}

// now is CLOCK_MONOTONIC.
func (m *meter) now() int64 { return m.origin + int64(time.Since(m.base)) }

// tick is called at each turn of a loop. It takes the snapshots when it is time, and returns the phase in which the turn is.
func (m *meter) tick() phase {
	w := m.window.Load()
	if w == nil || m.phase == over {
		return m.phase
	}
	now := m.now()
	if m.phase == waiting && now >= w.Start {
		m.phase = warming
	}
	if m.phase == warming && now >= w.Begin {
		m.begin()
	}
	if m.phase == measuring && now >= w.End {
		m.finish()
	}
	return m.phase
}

// begin opens the window now.
func (m *meter) begin() {
	m.take(&m.first)
	m.phase, m.first.at = measuring, m.now()
}

// finish closes the window now.
func (m *meter) finish() {
	m.phase, m.last.at = over, m.now()
	m.take(&m.last)
}

// take reads without allocating. What can't be read stays empty, and is found out when it is parsed.
func (m *meter) take(s *snapshot) {
	n, _, _ := unix.RawSyscall6(unix.SYS_PREAD64, m.stat.Fd(), address(s.stat), uintptr(len(s.stat)), 0, 0, 0)
	s.stat = s.stat[:min(n, uintptr(len(s.stat)))]
	n, _, _ = unix.RawSyscall6(unix.SYS_PREAD64, m.delayed.Fd(), address(s.delays), uintptr(len(s.delays)), 0, 0, 0)
	s.delays = s.delays[:min(n, uintptr(len(s.delays)))]
	_ = unix.Getrusage(unix.RUSAGE_SELF, &s.usage) // it can't fail for oneself
}

// start waits until the sample starts. It is false when it was stopped instead.
func (m *meter) start() bool {
	for m.window.Load() == nil {
		if m.stopped.Load() {
			return false
		}
		<-m.wake
	}
	time.Sleep(time.Duration(m.window.Load().Start - m.now()))
	return true
}

// fill writes into the report what the meter has measured.
func (m *meter) fill(r *report) error {
	if m.phase != over {
		return unmeasured("the window has not come to its end")
	}
	before, err := parseStat(string(m.first.stat))
	if err != nil {
		return err
	}
	after, err := parseStat(string(m.last.stat))
	if err != nil {
		return err
	}
	if r.CPUs, err = elapsed(before, after); err != nil {
		return err
	}
	r.Measured = time.Duration(m.last.at - m.first.at)
	r.Process = Process{
		User:   time.Duration(m.last.usage.Utime.Nano() - m.first.usage.Utime.Nano()),
		System: time.Duration(m.last.usage.Stime.Nano() - m.first.usage.Stime.Nano()),
	}
	delayed, err := parseDelay(string(m.first.delays))
	if err != nil {
		return err
	}
	until, err := parseDelay(string(m.last.delays))
	if err != nil {
		return err
	}
	r.Process.Delayed = until - delayed
	return nil
}

// parseDelay reads how long a thread was ready to run and did not, from its schedstat: time on the CPU, time waiting for it, turns.
func parseDelay(text string) (time.Duration, error) {
	fields := strings.Fields(text)
	if len(fields) != 3 {
		return 0, fmt.Errorf("parse /proc/thread-self/schedstat: %q has not three fields; the kernel needs CONFIG_SCHED_INFO", text)
	}
	ns, err := strconv.ParseInt(fields[1], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("parse /proc/thread-self/schedstat: %w", err)
	}
	return time.Duration(ns), nil
}

package load

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

const (
	// answerTimeout is for a peer that should answer at once, longNap for loops that look whether they are to end.
	answerTimeout = 5 * time.Second
	longNap       = 10 * time.Millisecond
)

// sample is both ends, and what they tell each other without a packet.
type sample struct {
	Target

	base           time.Time // what all times of the sample count from
	client, server end
	// listening is closed once the server's ports are open: ports from port on.
	listening   chan struct{}
	port, ports int
	// stopped: the sample is given up. done: the client sends nothing more.
	stopped, done atomic.Bool
	phase         atomic.Int32 // the client's, which the server follows

	// What one end writes again and again has a cache line of its own.
	_        [8]uint64
	received atomic.Uint64
	_        [8]uint64
	sent     atomic.Uint64
	_        [8]uint64
}

// phase is how far a sample has come.
type phase int32

const (
	warming phase = iota
	measuring
	over
)

// end is one end of a sample: a thread in its namespace, on its CPU.
type end struct {
	*sample

	started     time.Duration // the client, after the path was tried; 0: not yet, or it goes by what it has counted
	phase       phase
	first, last edge

	total, counted, lost uint64
	latencies            []time.Duration
}

// run takes one sample. It returns when both ends have ended.
func run(ctx context.Context, t Target, k kind) (*sample, error) {
	if err := t.check(); err != nil {
		return nil, err
	}
	restore := undisturbed()
	defer restore()
	ctx, cancel := context.WithTimeoutCause(ctx, t.Warmup+t.Duration+4*answerTimeout, unmeasured("it has not ended %s after its time", 4*answerTimeout))
	defer cancel()
	s := newSample(t)
	forget := context.AfterFunc(ctx, func() { s.stopped.Store(true) })
	defer forget()
	serving := s.server.launch(t.Server, t.ServerCPU, k.server)
	select {
	case err := <-serving:
		return nil, fmt.Errorf("server: %w", err)
	case <-s.listening:
	}
	err := <-s.client.launch(t.Client, t.ClientCPU, k.client)
	if err != nil {
		s.stopped.Store(true)
		err = fmt.Errorf("client: %w", err)
	}
	s.done.Store(true)
	if served := <-serving; served != nil && !errors.Is(served, errStopped) {
		err = errors.Join(err, fmt.Errorf("server: %w", served))
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return s, err
}

func newSample(t Target) *sample {
	s := &sample{Target: t, base: time.Now(), listening: make(chan struct{})}
	s.client.sample, s.server.sample = s, s
	return s
}

// errStopped is how an end ends that was told to.
var errStopped = errors.New("it was stopped")

// check refuses a Target that can't be measured between.
func (t Target) check() error {
	switch {
	case t.Client == nil || t.Server == nil || !t.Server.Addr().IsValid():
		return errors.New("a target needs two namespaces, and the address of the server's")
	case t.Duration <= 0 || t.Warmup < 0:
		return fmt.Errorf("duration %s, warm-up %s: a sample takes some time", t.Duration, t.Warmup)
	}
	return nil
}

// undisturbed keeps Go's runtime away from the loops: no garbage is collected, and beside the two that are always busy there is place for others.
func undisturbed() (undo func()) {
	collect, threads := debug.SetGCPercent(-1), runtime.GOMAXPROCS(runtime.NumCPU()+2)
	return func() {
		runtime.GOMAXPROCS(threads)
		debug.SetGCPercent(collect)
	}
}

// launch runs an end on a thread of its own.
func (e *end) launch(in *lab.Namespace, cpu int, do func(*end) error) <-chan error {
	ended := make(chan error, 1)
	go func() {
		ended <- in.Do(func() error {
			loose, err := pin(cpu)
			if err != nil {
				return err
			}
			defer loose()
			if err := do(e); err != nil {
				return err
			}
			if e.tick() != over {
				return unmeasured("the window has not come to its end")
			}
			return nil
		})
	}()
	return ended
}

// pin keeps the calling thread on a CPU, and has a nap last no longer than asked for: the kernel's default would add 50 us.
func pin(cpu int) (loose func(), err error) {
	var before, after unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return nil, fmt.Errorf("ask for the thread's CPUs: %w", err)
	}
	after.Set(cpu)
	if err := unix.SchedSetaffinity(0, &after); err != nil {
		return nil, fmt.Errorf("pin to CPU %d: %w", cpu, err)
	}
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0) // which cannot fail
	return func() {
		_ = unix.SchedSetaffinity(0, &before)
		_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 0, 0, 0, 0)
	}, nil
}

// start has the warm-up begin.
func (e *end) start() { e.started = e.now() }

func (e *end) now() time.Duration { return time.Since(e.base) }

// enter has a phase begin for both ends.
func (e *end) enter(p phase) {
	e.sample.phase.Store(int32(p))
	e.tick()
}

// tick is called at each turn of a loop. It looks at the machine when a phase begins, so that what the loop counts and what the CPUs did are of the same
// time, and returns the phase in which the turn is.
func (e *end) tick() phase {
	if e.stopped.Load() {
		return over
	}
	if e.started > 0 && e.phase != over {
		switch since := e.now() - e.started; {
		case since >= e.Warmup+e.Duration && e.phase == measuring:
			e.sample.phase.Store(int32(over))
		case since >= e.Warmup && e.phase == warming:
			e.sample.phase.Store(int32(measuring))
		}
	}
	for e.phase < phase(e.sample.phase.Load()) {
		if e.phase++; e.phase == measuring {
			e.first.look()
			e.first.at = e.now()
		} else {
			e.last.at = e.now()
			e.last.look()
		}
	}
	return e.phase
}

// look reads what has gone by until now.
func (at *edge) look() {
	stat, err := os.ReadFile("/proc/stat")
	if err == nil {
		at.cpus, err = parseStat(string(stat))
	}
	delays, err2 := os.ReadFile("/proc/thread-self/schedstat")
	if err2 == nil {
		at.delayed, err2 = parseDelay(string(delays))
	}
	at.err = errors.Join(err, err2)
	var usage unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_THREAD, &usage) // it can't fail for oneself
	at.busy = time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

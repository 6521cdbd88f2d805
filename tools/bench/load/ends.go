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
	// lead is how long before its start both ends learn of a sample.
	lead = 2 * time.Millisecond
	// patience is for a peer that should answer at once, longNap for loops that look whether they are to end.
	patience = 5 * time.Second
	longNap  = 10 * time.Millisecond
)

// sample is both ends, and what they tell each other without a packet.
type sample struct {
	Target

	base           time.Time // what all times of the sample count from
	client, server end
	window         atomic.Pointer[window]
	// listening is closed once the server's ports are open: ports from port on.
	listening   chan struct{}
	port, ports int
	// stopped: the sample is given up. done: the client sends nothing more.
	stopped, done atomic.Bool
	phase         atomic.Int32 // of the client, for servers that follow it

	// What one end writes again and again has a cache line of its own.
	_        [8]uint64
	received atomic.Uint64
	_        [8]uint64
	sent     atomic.Uint64
	_        [8]uint64
}

// window says when a sample starts, when it begins to be measured, and when it ends.
type window struct{ start, begin, end time.Duration }

// phase is how far a sample has come.
type phase int

const (
	waiting phase = iota // the window is not known, or the start not reached
	warming
	measuring
	over
)

// end is one end of a sample: a thread in its namespace, on its CPU.
type end struct {
	*sample

	phase         phase
	first, last   edge
	stat, delayed *os.File

	total, counted, lost uint64
	latencies            []time.Duration
}

// edge is the state of the machine and of an end's thread at one edge of the window, between two turns of the end's loop, so that what the
// loop counts and what the CPUs did are of the same time. It is raw: it is parsed when the sample is over.
type edge struct {
	at           time.Duration
	usage        unix.Rusage
	stat, delays []byte
}

// run takes one sample. It returns when both ends have ended.
func run(ctx context.Context, t Target, what string, client, server func(*end) error) (*sample, error) {
	if err := t.check(); err != nil {
		return nil, err
	}
	restore := undisturbed()
	defer restore()
	ctx, cancel := context.WithTimeoutCause(ctx, t.Warmup+t.Duration+4*patience, unmeasured("it has not ended %s after its time", 4*patience))
	defer cancel()
	s := newSample(t)
	forget := context.AfterFunc(ctx, func() { s.stopped.Store(true) })
	defer forget()
	serving := s.server.launch(t.Server, t.ServerCPU, server)
	select {
	case err := <-serving:
		return nil, fmt.Errorf("%s: server: %w", what, err)
	case <-s.listening:
	}
	err := <-s.client.launch(t.Client, t.ClientCPU, client)
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
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return s, nil
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
	case t.ClientCPU < 0 || t.ServerCPU < 0:
		return fmt.Errorf("CPUs %d and %d: a CPU's number is not negative", t.ClientCPU, t.ServerCPU)
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
			if e.stat, err = os.Open("/proc/stat"); err != nil {
				return fmt.Errorf("open what the kernel says about CPU time: %w", err)
			}
			defer e.stat.Close()
			if e.delayed, err = os.Open("/proc/thread-self/schedstat"); err != nil {
				return fmt.Errorf("open what the kernel says about this thread: %w", err)
			}
			defer e.delayed.Close()
			for _, edge := range []*edge{&e.first, &e.last} {
				edge.stat, edge.delays = make([]byte, 128<<10), make([]byte, 128)
			}
			return do(e)
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

// listens tells the client that it may come.
func (e *end) listens() { close(e.listening) }

// start makes the window known to both ends, and waits until it opens.
func (e *end) start() {
	w := &window{start: e.now() + lead}
	w.begin = w.start + e.Warmup
	w.end = w.begin + e.Duration
	e.window.Store(w)
	time.Sleep(lead)
}

func (e *end) now() time.Duration { return time.Since(e.base) }

// tick is called at each turn of a loop. It looks at the machine when it is time, and returns the phase in which the turn is.
func (e *end) tick() phase {
	if e.stopped.Load() {
		return over
	}
	w := e.window.Load()
	if w == nil || e.phase == over {
		return e.phase
	}
	now := e.now()
	if e.phase == waiting && now >= w.start {
		e.phase = warming
	}
	if e.phase == warming && now >= w.begin {
		e.begin()
	}
	if e.phase == measuring && now >= w.end {
		e.finish()
	}
	return e.phase
}

// begin opens the window now.
func (e *end) begin() {
	e.look(&e.first)
	e.phase, e.first.at = measuring, e.now()
}

// finish closes the window now.
func (e *end) finish() {
	e.phase, e.last.at = over, e.now()
	e.look(&e.last)
}

// follow opens and closes the window when the client does.
func (e *end) follow() {
	now := phase(e.sample.phase.Load())
	if now >= measuring && e.phase < measuring {
		e.begin()
	}
	if now == over && e.phase == measuring {
		e.finish()
	}
}

// look reads into what there is. What can't be read stays empty, and is found out when it is parsed.
func (e *end) look(at *edge) {
	n, _ := e.stat.ReadAt(at.stat, 0)
	at.stat = at.stat[:n]
	n, _ = e.delayed.ReadAt(at.delays, 0)
	at.delays = at.delays[:n]
	_ = unix.Getrusage(unix.RUSAGE_THREAD, &at.usage) // it can't fail for oneself
}

// ended is nil for an end whose window has come to its end.
func (e *end) ended() error {
	if e.phase == over {
		return nil
	}
	if e.stopped.Load() {
		return errStopped
	}
	return unmeasured("the window has not come to its end")
}

// result is what the end that counts has counted.
func (s *sample) result(counter *end) Result {
	r := Result{Sent: s.client.total, Counted: counter.counted, Usage: usage(counter, &s.client, &s.server)}
	if r.Usage.Window > 0 {
		r.Rate = float64(r.Counted) / r.Usage.Window.Seconds()
	}
	return r
}

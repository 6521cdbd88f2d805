package load

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// WorkerCommand is the first argument of a process that is one end of a sample: the executable that calls this package
// must hand over to Worker when it finds it, before anything else (its tests too, in TestMain).
const WorkerCommand = "worker"

// works is what each kind of end does once it is in its place.
var works = map[string]func(*end) (report, error){
	udpSender: sendDatagrams, udpReceiver: receiveDatagrams,
	streamSender: sendStreams, streamReceiver: receiveStreams,
	requester: request, responder: respond,
	connector: connect, acceptor: accept,
	flowOpener: openFlows, flowAnswerer: answerFlows, flowHolder: holdFlows,
}

// end is one end of a sample, in its process.
type end struct {
	*meter
	*order
	shared *shared
	out    *json.Encoder
}

// shared is memory that both ends see. It is how they pace each other without a packet that the other modes of the comparison would not see.
type shared struct {
	received atomic.Uint64
	_        [7]uint64 // a cache line each
	sent     atomic.Uint64
	done     atomic.Bool // sent does not grow any more
	phase    atomic.Int32
}

// sharedSize is a page.
const sharedSize = 4096

// Worker is one end of a sample: it takes its orders from standard input. What it returns is the exit status.
func Worker() int {
	// The thread that is moved into the namespace and pinned to the CPU is the one that makes the sockets and runs the loop.
	runtime.LockOSThread()
	debug.SetGCPercent(-1)
	out := json.NewEncoder(os.Stdout)
	result, err := work(out)
	if err != nil {
		result.Error, result.NotMeasured = err.Error(), errors.Is(err, ErrNotMeasured)
	}
	if err := out.Encode(result); err != nil || result.Error != "" {
		return 1
	}
	return 0
}

func work(out *json.Encoder) (report, error) {
	in := json.NewDecoder(os.Stdin)
	var first message
	if err := in.Decode(&first); err != nil || first.Order == nil {
		return report{}, errors.New("standard input has no order: this command is for the benchmark's own use")
	}
	e := &end{order: first.Order, out: out}
	do, ok := works[e.Work]
	if !ok {
		return report{}, fmt.Errorf("there is no work called %q", e.Work)
	}
	if err := e.settle(); err != nil {
		return report{}, err
	}
	go e.listen(in)
	result, err := do(e)
	if err != nil {
		return report{}, err
	}
	return result, nil
}

// settle brings the thread into its namespace and onto its CPU.
func (e *end) settle() (err error) {
	namespace, err := unix.Open(e.Netns, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open network namespace %s: %w", e.Netns, err)
	}
	defer unix.Close(namespace)
	if err := unix.Setns(namespace, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", e.Netns, err)
	}
	var cpus unix.CPUSet
	cpus.Set(e.CPU)
	if err := unix.SchedSetaffinity(0, &cpus); err != nil {
		return fmt.Errorf("pin to CPU %d: %w", e.CPU, err)
	}
	// A nap is as long as asked for: the default would add 50 us.
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set the timer slack: %w", err)
	}
	if e.meter, err = newMeter(); err != nil {
		return err
	}
	page, err := unix.Mmap(sharedMemory, 0, sharedSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map the memory that both ends share: %w", err)
	}
	e.shared = (*shared)(unsafe.Pointer(&page[0]))
	return nil
}

// listen takes what the parent says meanwhile. When the parent is gone, so is the sample.
func (e *end) listen(in *json.Decoder) {
	for {
		var m message
		if err := in.Decode(&m); err != nil {
			os.Exit(1)
		}
		if m.Window != nil {
			e.window.Store(m.Window)
		}
		if m.Stop {
			e.stopped.Store(true)
		}
		select {
		case e.wake <- struct{}{}:
		default:
		}
	}
}

// ready tells the parent that the other end, or the window, may come.
func (e *end) ready() error {
	if err := e.out.Encode(report{Port: e.Port}); err != nil {
		return fmt.Errorf("report to the parent: %w", err)
	}
	return nil
}

// tell sends a report that is not the last.
func (e *end) tell(r report) error {
	if err := e.out.Encode(r); err != nil {
		return fmt.Errorf("report to the parent: %w", err)
	}
	return nil
}

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// unmeasured is an error that matches ErrNotMeasured.
func unmeasured(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrNotMeasured, fmt.Sprintf(format, args...))
}

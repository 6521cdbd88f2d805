package attach

import (
	"encoding/binary"
	"errors"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// etherType of the frames that the tests count (IEEE 802, local experimental).
const etherType = 0x88b5

// counter loads a program that counts frames of etherType in m and passes all on.
func counter(t *testing.T, m *ebpf.Map, index int32) *ebpf.Program {
	t.Helper()
	const protocolOffset = 16 // of struct __sk_buff
	wire := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, etherType))
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "ec_from_pod", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R1, asm.R1, protocolOffset, asm.Word),
			asm.JNE.Imm(asm.R1, int32(wire), "out"),
			asm.StoreImm(asm.R10, -4, int64(index), asm.Word),
			asm.LoadMapPtr(asm.R1, m.FD()),
			asm.Mov.Reg(asm.R2, asm.R10),
			asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "out"),
			asm.Mov.Imm(asm.R1, 1),
			asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
			asm.Mov.Imm(asm.R0, -1).WithSymbol("out"),
			asm.Return(),
		},
	})
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// stream sends frames into an interface while the test changes its program.
type stream struct {
	count *ebpf.Map
	stop  chan struct{}
	sent  chan uint64
}

// burst is how many frames are sent before the programs must have seen them: far
// fewer than the queue between the two ends holds.
const burst = 128

// enough is how many frames each of the two programs must have seen for the test to
// show something.
const enough = 100

func (d *device) stream(count *ebpf.Map) *stream {
	d.t.Helper()
	// Made in this thread's network namespace; usable from any.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		d.t.Fatal(err)
	}
	frame := make([]byte, 64)
	for i := range 12 {
		frame[i] = 0xff
	}
	binary.BigEndian.PutUint16(frame[12:], etherType)
	s := &stream{count: count, stop: make(chan struct{}), sent: make(chan uint64, 1)}
	go func() {
		defer unix.Close(fd)
		var n uint64
		for {
			select {
			case <-s.stop:
				s.sent <- n
				return
			default:
			}
			if unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: d.peer}) == nil {
				n++
			}
			if n%burst == 0 {
				s.await(n)
			}
		}
	}()
	return s
}

// metBoth says whether each of the two programs has seen enough frames.
func (s *stream) metBoth() bool {
	first, second := s.await(0)
	return first >= enough && second >= enough
}

// await waits until the programs have seen n frames, or will not any more.
func (s *stream) await(n uint64) (first, second uint64) {
	for deadline := time.Now().Add(2 * time.Second); ; time.Sleep(20 * time.Microsecond) {
		// A failing lookup leaves zeroes, and the test fails.
		_ = errors.Join(s.count.Lookup(uint32(0), &first), s.count.Lookup(uint32(1), &second))
		if first+second >= n || time.Now().After(deadline) {
			return first, second
		}
	}
}

// TestReplacementMissesNoPacket replaces the program, then the mechanism, under
// a stream of frames: each must meet a program of ours.
func TestReplacementMissesNoPacket(t *testing.T) {
	for name, c := range map[string]struct {
		modes []Mode
		exact bool
	}{
		"tcx":     {[]Mode{TCX, TCX}, true},
		"clsact":  {[]Mode{Clsact, Clsact}, true},
		"between": {[]Mode{TCX, Clsact}, false}, // for a moment a frame meets both
	} {
		t.Run(name, func(t *testing.T) {
			d := newDevice(t, c.modes[0])
			m, err := ebpf.NewMap(&ebpf.MapSpec{Name: "count", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 2})
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			programs := []*ebpf.Program{counter(t, m, 0), counter(t, m, 1)}
			d.attach(FromPod, programs[0])
			s := d.stream(m)
			// Until both have been met often enough to show something: on a busy
			// machine the sender may run seldom.
			start := time.Now()
			for i := 0; i < 100 || time.Since(start) < 300*time.Millisecond || !s.metBoth() && time.Since(start) < 30*time.Second; i++ {
				d.Mode = c.modes[i%2]
				d.attach(FromPod, programs[i%2])
			}
			close(s.stop)
			n := <-s.sent
			first, second := s.await(n)
			if first < enough || second < enough {
				t.Fatalf("too few to show anything: %d sent, %d and %d seen", n, first, second)
			}
			if got := first + second; got < n || c.exact && got != n {
				t.Errorf("%d frames sent, programs saw %d", n, got)
			}
		})
	}
}

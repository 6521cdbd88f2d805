package attach

import (
	"encoding/binary"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/pins"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// etherType of the frames that the tests count (IEEE 802, local experimental).
const etherType = 0x88b5

// device is one end of a veth pair in a network namespace of the test's own.
type device struct {
	Attacher
	t     *testing.T
	index int
	peer  int
}

// newDevice gives the interface an index that a later one can have again.
func newDevice(t *testing.T, mode Mode) *device {
	t.Helper()
	dir := bpffs.Dir(priv.Isolate(t) + "/ebpf-cni")
	if err := dir.Prepare(); err != nil {
		t.Fatal(err)
	}
	d := &device{Attacher: Attacher{Dir: dir, Mode: mode}, t: t, index: 77}
	d.create()
	return d
}

func (d *device) create() {
	d.t.Helper()
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "ecat0", Index: d.index}, PeerName: "ecat1"}
	if err := netlink.LinkAdd(veth); err != nil {
		d.t.Fatal(err)
	}
	for _, name := range []string{"ecat0", "ecat1"} {
		l, err := netlink.LinkByName(name)
		if err != nil {
			d.t.Fatal(err)
		}
		if err := netlink.LinkSetUp(l); err != nil {
			d.t.Fatal(err)
		}
		d.peer = l.Attrs().Index
	}
}

func (d *device) remove() {
	d.t.Helper()
	if err := netlink.LinkDel(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "ecat0", Index: d.index}}); err != nil {
		d.t.Fatal(err)
	}
}

func (d *device) attach(hook Hook, p *ebpf.Program) Result {
	d.t.Helper()
	r, err := d.Attach(d.index, hook, p)
	if err != nil {
		d.t.Fatal(err)
	}
	return r
}

// assert checks what is attached, and that the other mechanism has nothing of ours.
func (d *device) assert(hook Hook, mode Mode, id ebpf.ProgramID) {
	d.t.Helper()
	got, err := d.Attached(d.index, hook)
	if err != nil || got != (State{mode, id}) {
		d.t.Errorf("%s: attached is %+v, %v; want %s, program %d", hook, got, err, mode, id)
	}
	_, err = os.Stat(d.Dir.Link(string(hook), d.index))
	if pinned := err == nil; pinned != (mode == TCX) {
		d.t.Errorf("%s: link pinned: %v with mode %q", hook, pinned, mode)
	}
	f, err := findFilter(d.index, hook)
	if err != nil || (f != nil) != (mode == Clsact) {
		d.t.Errorf("%s: filter %v, %v with mode %q", hook, f, err, mode)
	}
}

func hookProgram(t *testing.T, hook Hook, tag int32) *ebpf.Program {
	t.Helper()
	return pins.Program(t, hook.Program(), tag)
}

func TestParseMode(t *testing.T) {
	for in, want := range map[string]Mode{"": Auto, "auto": Auto, "tcx": TCX, "clsact": Clsact} {
		if got, err := ParseMode(in); err != nil || got != want {
			t.Errorf("ParseMode(%q) = %q, %v", in, got, err)
		}
	}
	if _, err := ParseMode("xdp"); err == nil || !strings.Contains(err.Error(), "auto, tcx, clsact") {
		t.Errorf("an unknown mode: %v", err)
	}
}

func TestAttachReplaceDetach(t *testing.T) {
	for _, mode := range []Mode{TCX, Clsact, Auto} {
		for _, hook := range []Hook{FromPod, ToPod, FromUplink, ToUplink, FromTunnel} {
			t.Run(string(mode)+"/"+string(hook), func(t *testing.T) {
				d := newDevice(t, mode)
				got := mode
				if mode == Auto {
					got = TCX // every kernel that the tests run on has it, or the test says so
				}
				old, replacement := hookProgram(t, hook, 1), hookProgram(t, hook, 2)
				d.assert(hook, "", 0)
				if r := d.attach(hook, old); r != (Result{Mode: got, QdiscCreated: got == Clsact}) {
					t.Errorf("first attach: %+v", r)
				}
				d.assert(hook, got, pins.ID(t, old))
				if r := d.attach(hook, replacement); r != (Result{Mode: got}) {
					t.Errorf("second attach: %+v", r)
				}
				d.assert(hook, got, pins.ID(t, replacement))
				for range 2 { // nothing there is no error
					if err := d.Detach(d.index, hook); err != nil {
						t.Errorf("detach: %v", err)
					}
					d.assert(hook, "", 0)
				}
			})
		}
	}
}

func TestBothDirectionsOfOneInterface(t *testing.T) {
	for _, mode := range []Mode{TCX, Clsact} {
		t.Run(string(mode), func(t *testing.T) {
			d := newDevice(t, mode)
			in, out := hookProgram(t, FromUplink, 1), hookProgram(t, ToUplink, 2)
			d.attach(FromUplink, in)
			d.attach(ToUplink, out)
			d.assert(FromUplink, mode, pins.ID(t, in))
			d.assert(ToUplink, mode, pins.ID(t, out))
			if err := d.Detach(d.index, FromUplink); err != nil {
				t.Fatal(err)
			}
			d.assert(FromUplink, "", 0)
			d.assert(ToUplink, mode, pins.ID(t, out))
		})
	}
}

func TestAttachOutlivesTheProcess(t *testing.T) {
	for _, mode := range []Mode{TCX, Clsact} {
		t.Run(string(mode), func(t *testing.T) {
			d := newDevice(t, mode)
			p := hookProgram(t, FromPod, 1)
			id := pins.ID(t, p)
			d.attach(FromPod, p)
			// All that the process holds of the program.
			if err := p.Close(); err != nil {
				t.Fatal(err)
			}
			d.assert(FromPod, mode, id)
		})
	}
}

func TestSwitchModes(t *testing.T) {
	d := newDevice(t, TCX)
	p := hookProgram(t, ToUplink, 1)
	for _, mode := range []Mode{TCX, Clsact, TCX, Clsact, Auto} {
		d.Mode = mode
		d.attach(ToUplink, p)
		if mode == Auto {
			mode = TCX
		}
		d.assert(ToUplink, mode, pins.ID(t, p))
	}
}

func TestRefusals(t *testing.T) {
	for _, mode := range []Mode{TCX, Clsact, Auto} {
		t.Run(string(mode), func(t *testing.T) {
			d := newDevice(t, mode)
			p := hookProgram(t, FromPod, 1)
			for name, c := range map[string]struct {
				ifindex int
				hook    Hook
			}{
				"no interface":      {0, FromPod},
				"negative":          {-1, FromPod},
				"no such interface": {9999, FromPod},
				"no such hook":      {d.index, "from_nowhere"},
			} {
				if _, err := d.Attach(c.ifindex, c.hook, p); err == nil || !strings.Contains(err.Error(), string(c.hook)) {
					t.Errorf("%s: error must name the hook: %v", name, err)
				}
			}
			if err := d.Detach(9999, FromPod); err != nil {
				t.Errorf("detach from an interface that is not there: %v", err)
			}
			if s, err := d.Attached(9999, FromPod); err != nil || s != (State{}) {
				t.Errorf("attached to an interface that is not there: %+v, %v", s, err)
			}
			if entries, err := os.ReadDir(d.Dir.Links()); err != nil || len(entries) != 0 {
				t.Errorf("pins are left: %v, %v", entries, err)
			}
		})
	}
}

// TestDeviceGone deletes the interface under its attachment, and makes one that
// has the same index.
func TestDeviceGone(t *testing.T) {
	for _, mode := range []Mode{TCX, Clsact} {
		t.Run(string(mode), func(t *testing.T) {
			d := newDevice(t, mode)
			old, next := hookProgram(t, FromPod, 1), hookProgram(t, FromPod, 2)
			d.attach(FromPod, old)
			d.remove()
			if s, err := d.Attached(d.index, FromPod); err != nil || s != (State{}) {
				t.Errorf("without its interface: %+v, %v", s, err)
			}
			if _, err := os.Stat(d.Dir.Link(string(FromPod), d.index)); mode == TCX && err != nil {
				t.Fatalf("the test means a pin that outlives the interface: %v", err)
			}

			d.create()
			if s, err := d.Attached(d.index, FromPod); err != nil || s != (State{}) {
				t.Errorf("on the next interface of the index: %+v, %v", s, err)
			}
			d.attach(FromPod, next)
			d.assert(FromPod, mode, pins.ID(t, next))

			d.remove()
			if err := d.Detach(d.index, FromPod); err != nil {
				t.Errorf("detach from an interface that is gone: %v", err)
			}
			if _, err := os.Stat(d.Dir.Link(string(FromPod), d.index)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the severed pin is left: %v", err)
			}
		})
	}
}

// foreignFilter adds somebody else's clsact filter.
func (d *device) foreignFilter(name string, priority uint16, handle uint32, p *ebpf.Program) {
	d.t.Helper()
	if _, err := ensureQdisc(d.index); err != nil {
		d.t.Fatal(err)
	}
	err := netlink.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: d.index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: handle, Protocol: unix.ETH_P_ALL, Priority: priority,
		},
		Fd: p.FD(), Name: name, DirectAction: true,
	})
	if err != nil {
		d.t.Fatal(err)
	}
}

func (d *device) filterNames() []string {
	d.t.Helper()
	filters, err := listFilters(d.index, FromPod)
	if err != nil {
		d.t.Fatal(err)
	}
	var names []string
	for _, f := range filters {
		if b, ok := f.(*netlink.BpfFilter); ok {
			names = append(names, b.Name)
		}
	}
	return names
}

func TestForeignFiltersAreLeftAlone(t *testing.T) {
	for _, mode := range []Mode{TCX, Clsact} {
		t.Run(string(mode), func(t *testing.T) {
			d := newDevice(t, mode)
			p, foreign := hookProgram(t, FromPod, 1), pins.Program(t, "foreign", 2)
			d.foreignFilter("first", 1, 1, foreign)
			d.foreignFilter("same_priority", filterPriority, 1, foreign)
			d.foreignFilter("same_handle", 200, filterHandle, foreign)
			d.foreignFilter("ec_from_pod", 300, 1, foreign) // same name
			before := strings.Join(d.filterNames(), " ")

			d.assert(FromPod, "", 0)
			if r := d.attach(FromPod, p); r.QdiscCreated {
				t.Error("the qdisc was there")
			}
			d.assert(FromPod, mode, pins.ID(t, p))
			d.attach(FromPod, hookProgram(t, FromPod, 3))
			if err := d.Detach(d.index, FromPod); err != nil {
				t.Fatal(err)
			}
			if after := strings.Join(d.filterNames(), " "); after != before {
				t.Errorf("filters before: %s; after: %s", before, after)
			}
			if err := RemoveQdisc(d.index); err != nil {
				t.Fatal(err)
			}
			if after := strings.Join(d.filterNames(), " "); after != before {
				t.Errorf("RemoveQdisc took others' filters: %s", after)
			}
		})
	}
}

// TestPlaceTakenByForeignFilter: somebody has our priority and our handle.
func TestPlaceTakenByForeignFilter(t *testing.T) {
	d := newDevice(t, Clsact)
	d.foreignFilter("foreign", filterPriority, filterHandle, pins.Program(t, "foreign", 2))
	_, err := d.Attach(d.index, FromPod, hookProgram(t, FromPod, 1))
	if err == nil || !strings.Contains(err.Error(), "foreign") {
		t.Errorf("error must name the filter in the way: %v", err)
	}
	if names := d.filterNames(); len(names) != 1 || names[0] != "foreign" {
		t.Errorf("filters: %v", names)
	}
}

func TestForeignTCXIsLeftAlone(t *testing.T) {
	d := newDevice(t, TCX)
	foreign := pins.Program(t, "foreign", 2)
	l, err := link.AttachTCX(link.TCXOptions{Interface: d.index, Program: foreign, Attach: ebpf.AttachTCXIngress})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ours := hookProgram(t, FromPod, 1)
	d.attach(FromPod, ours)
	if ids := d.tcx(); len(ids) != 2 || ids[0] != pins.ID(t, foreign) || ids[1] != pins.ID(t, ours) {
		t.Errorf("programs on the hook: %v", ids)
	}
	if err := d.Detach(d.index, FromPod); err != nil {
		t.Fatal(err)
	}
	if ids := d.tcx(); len(ids) != 1 || ids[0] != pins.ID(t, foreign) {
		t.Errorf("programs after detach: %v", ids)
	}
}

func (d *device) tcx() (ids []ebpf.ProgramID) {
	d.t.Helper()
	got, err := link.QueryPrograms(link.QueryOptions{Target: d.index, Attach: ebpf.AttachTCXIngress})
	if err != nil {
		d.t.Fatal(err)
	}
	for _, p := range got.Programs {
		ids = append(ids, p.ID)
	}
	return ids
}

func TestRemoveQdisc(t *testing.T) {
	d := newDevice(t, Clsact)
	if err := RemoveQdisc(d.index); err != nil {
		t.Errorf("no qdisc: %v", err)
	}
	if err := RemoveQdisc(9999); err != nil {
		t.Errorf("no interface: %v", err)
	}
	d.attach(ToUplink, hookProgram(t, ToUplink, 1))
	if err := RemoveQdisc(d.index); err != nil {
		t.Fatal(err)
	}
	if !d.hasQdisc() {
		t.Error("a qdisc with a filter of ours was removed")
	}
	if err := d.Detach(d.index, ToUplink); err != nil {
		t.Fatal(err)
	}
	if !d.hasQdisc() {
		t.Error("Detach has removed the qdisc")
	}
	if err := RemoveQdisc(d.index); err != nil {
		t.Fatal(err)
	}
	if d.hasQdisc() {
		t.Error("an empty qdisc is left")
	}
}

func (d *device) hasQdisc() bool {
	d.t.Helper()
	l, err := netlink.LinkByIndex(d.index)
	if err != nil {
		d.t.Fatal(err)
	}
	all, err := netlink.QdiscList(l)
	if err != nil {
		d.t.Fatal(err)
	}
	for _, q := range all {
		if q.Type() == "clsact" {
			return true
		}
	}
	return false
}

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

// await waits until the programs have seen n frames, or will not any more.
func (s *stream) await(n uint64) (first, second uint64) {
	for deadline := time.Now().Add(200 * time.Millisecond); ; time.Sleep(20 * time.Microsecond) {
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
			// Until both have been met often enough to show something.
			enough := time.Now().Add(300 * time.Millisecond)
			for i := 0; i < 100 || time.Now().Before(enough); i++ {
				d.Mode = c.modes[i%2]
				d.attach(FromPod, programs[i%2])
			}
			close(s.stop)
			n := <-s.sent
			first, second := s.await(n)
			if first < 100 || second < 100 {
				t.Fatalf("too few to show anything: %d sent, %d and %d seen", n, first, second)
			}
			if got := first + second; got < n || c.exact && got != n {
				t.Errorf("%d frames sent, programs saw %d", n, got)
			}
		})
	}
}

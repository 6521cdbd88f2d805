package attach

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/pins"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

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
	if mode == TCX {
		priv.NeedTCX(t)
	}
	dir := bpffs.Dir(priv.Isolate(t) + "/ebpf-cni")
	if err := dir.Prepare(); err != nil {
		t.Fatal(err)
	}
	d := &device{Attacher: Attacher{Dir: dir, Mode: mode}, t: t, index: 77}
	d.create()
	return d
}

// chosen is what Auto chooses.
func chosen(t *testing.T, hook Hook) Mode {
	t.Helper()
	if hook != ToPod && priv.HasTCX(t) {
		return TCX
	}
	return Clsact
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

func (d *device) attach(hook Hook, p *ebpf.Program) (qdisc bool) {
	d.t.Helper()
	qdisc, err := d.Attach(d.index, hook, p)
	if err != nil {
		d.t.Fatal(err)
	}
	return qdisc
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

func TestNewInterfaceIsNotSearched(t *testing.T) {
	d := newDevice(t, TCX)
	p := hookProgram(t, FromPod, 1)
	d.Mode = Clsact
	d.attach(FromPod, p)
	d.Mode, d.New = TCX, true
	d.attach(FromPod, p)
	if f, err := findFilter(d.index, FromPod); f == nil || err != nil {
		t.Errorf("an interface said to be new was searched for a filter: %v, %v", f, err)
	}
	if s, err := d.Attached(d.index, FromPod); s.Mode != TCX || err != nil {
		t.Errorf("attached is %+v, %v; want tcx", s, err)
	}
	d.New = false
	d.attach(FromPod, p)
	if f, err := findFilter(d.index, FromPod); f != nil || err != nil {
		t.Errorf("the filter is left: %v, %v", f, err)
	}
}

func TestAttachReplaceDetach(t *testing.T) {
	for _, mode := range []Mode{TCX, Clsact, Auto} {
		for _, hook := range Hooks() {
			t.Run(string(mode)+"/"+string(hook), func(t *testing.T) {
				d := newDevice(t, mode)
				got := mode
				if mode == Auto {
					got = chosen(t, hook)
				}
				old, replacement := hookProgram(t, hook, 1), hookProgram(t, hook, 2)
				d.assert(hook, "", 0)
				if made := d.attach(hook, old); made != (got == Clsact) {
					t.Errorf("first attach: made a qdisc: %v", made)
				}
				d.assert(hook, got, pins.ID(t, old))
				if d.attach(hook, replacement) {
					t.Error("second attach: made a qdisc")
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

func TestRemoveQdisc(t *testing.T) {
	d := newDevice(t, Clsact)
	if _, err := RemoveQdisc(d.index); err != nil {
		t.Errorf("no qdisc: %v", err)
	}
	if _, err := RemoveQdisc(9999); err != nil {
		t.Errorf("no interface: %v", err)
	}
	d.attach(ToUplink, hookProgram(t, ToUplink, 1))
	if removed, err := RemoveQdisc(d.index); removed || err != nil {
		t.Fatal(removed, err)
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
	if removed, err := RemoveQdisc(d.index); !removed || err != nil {
		t.Fatal(removed, err)
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

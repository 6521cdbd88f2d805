package attach

import (
	"maps"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/ebpf-cni/ebpf-cni/test/pins"
)

// A look finds what is attached by a pinned link: not what somebody has detached, nor what has lost its pin, which ends with the look.
func TestWatch(t *testing.T) {
	d := newDevice(t, TCX)
	w := &Watch{Dir: d.Dir, Hook: FromPod}
	defer w.Close()
	assert := func(when string, pinned bool, want ebpf.ProgramID) {
		t.Helper()
		found, err := w.Look()
		if err != nil {
			t.Fatal(err)
		}
		id, there := found[d.index]
		if id != want || there != pinned || len(found) > 1 {
			t.Errorf("%s: found %v, want program %d, pinned %t", when, found, want, pinned)
		}
	}
	first, second := hookProgram(t, FromPod, 1), hookProgram(t, FromPod, 2)
	assert("nothing attached", false, 0)
	d.attach(ToUplink, hookProgram(t, ToUplink, 3)) // another hook's
	d.attach(FromPod, first)
	assert("attached", true, pins.ID(t, first))
	d.attach(FromPod, second)
	assert("replaced in place", true, pins.ID(t, second))

	l, err := link.LoadPinnedLink(d.Dir.Link(string(FromPod), d.index), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := l.Detach(); err != nil {
		t.Fatal(err)
	}
	assert("detached", true, 0)
	if err := os.Remove(d.Dir.Link(string(FromPod), d.index)); err != nil {
		t.Fatal(err)
	}
	d.attach(FromPod, first)
	assert("another link, not known of", true, 0)
	w.Forget(d.index)
	assert("another link", true, pins.ID(t, first))

	if err := os.Remove(d.Dir.Link(string(FromPod), d.index)); err != nil {
		t.Fatal(err)
	}
	assert("without its pin", false, 0)
	if ids := d.tcx(); len(ids) != 0 {
		t.Errorf("after that look, programs %v are attached", ids)
	}
	d.attach(FromPod, first)
	assert("once more", true, pins.ID(t, first))
	d.remove()
	assert("its device is gone", true, 0)
}

// A link that can't be read keeps no other from being looked at, and is not taken for one without a program.
func TestWatchOfALinkThatCannotBeRead(t *testing.T) {
	d := newDevice(t, TCX)
	w := &Watch{Dir: d.Dir, Hook: FromPod}
	defer w.Close()
	prog := hookProgram(t, FromPod, 1)
	d.attach(FromPod, prog)
	const bad = 5
	if err := os.Mkdir(d.Dir.Link(string(FromPod), bad), 0o700); err != nil {
		t.Fatal(err)
	}
	found, err := w.Look()
	if want := (map[int]ebpf.ProgramID{d.index: pins.ID(t, prog), bad: Unread}); !maps.Equal(found, want) {
		t.Errorf("found %v, want %v", found, want)
	}
	if err == nil || !strings.Contains(err.Error(), "read link "+d.Dir.Link(string(FromPod), bad)) {
		t.Errorf("the error says %v", err)
	}
}

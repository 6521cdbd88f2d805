package cni

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// smallState gives the node a state directory that is easily filled, with options of tmpfs.
func (w *fixture) smallState(options string) {
	w.t.Helper()
	w.must(unix.Mount("state", w.stateDir, "tmpfs", 0, options))
	w.t.Cleanup(func() { _ = unix.Unmount(w.stateDir, unix.MNT_DETACH) })
}

// fill takes all space, and all inodes, that are left in the state directory.
func (w *fixture) fill() {
	w.t.Helper()
	for i := range 10000 {
		name := filepath.Join(w.stateDir, fmt.Sprintf("filler%d", i))
		err := os.WriteFile(name, make([]byte, 64<<10), 0o600)
		if _, there := os.Lstat(name); there != nil && errors.Is(err, unix.ENOSPC) {
			return // not even an empty file
		}
		if i > 100 && errors.Is(err, unix.ENOSPC) {
			return // no content, and files without any for as long as one likes
		}
	}
	w.t.Fatal("the state directory does not fill")
}

func (w *fixture) unfill() {
	w.t.Helper()
	fillers, err := filepath.Glob(filepath.Join(w.stateDir, "filler*"))
	w.must(err)
	for _, name := range fillers {
		w.must(os.Remove(name))
	}
}

func TestDelWithAFullStateDirectory(t *testing.T) {
	for _, options := range []string{"size=256k", "nr_inodes=40"} {
		for _, verb := range []string{"DEL", "GC"} {
			t.Run(options+" "+verb, func(t *testing.T) {
				w := newFixture(t)
				w.smallState(options)
				other := w.newPod()
				w.add(other, nil)
				before := w.everything()
				p := w.newPod()
				w.add(p, nil)
				w.fill()
				if verb == "GC" {
					w.ok("GC", nil, gcList(other))
				} else {
					w.ok("DEL", p, nil)
				}
				w.ok("DEL", w.newPod(), nil) // of an ADD that found no space
				w.unfill()
				w.unchanged(before)
			})
		}
	}
}

func TestDelOfADelegatedPodWithAFullStateDirectory(t *testing.T) {
	d := newDelegating(t)
	d.smallState("size=256k,nr_inodes=40")
	d.answer("172.20.3.4/16")
	p := d.newPod()
	d.add(p, nil)
	d.asked("ADD")
	d.fill()
	d.ok("DEL", p, nil)
	d.asked("DEL")
	d.unfill()
	d.unchanged(d.before)
}

// The first pod of a node finds it full: no lock file is there yet, and its DEL has to succeed all the same.
func TestDelWithAStateDirectoryThatWasAlwaysFull(t *testing.T) {
	w := newFixture(t)
	before := w.everything()
	w.smallState("nr_inodes=40")
	w.fill()
	p := w.newPod()
	if _, e := w.call("ADD", p, nil); e == nil {
		t.Error("ADD succeeded without space")
	}
	w.ok("DEL", p, nil)
	w.unfill()
	w.unchanged(before)
}

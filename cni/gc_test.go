package cni

import (
	"context"
	"encoding/json"
	"maps"
	"path/filepath"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// TestPodsAreAddedWhileGCReleases: each release waits for the kernel, and of pods there may be hundreds.
func TestPodsAreAddedWhileGCReleases(t *testing.T) {
	w := newFixture(t)
	before := w.everything()
	stale, other := w.newPod(), w.newPod()
	w.add(stale, nil)
	w.add(other, nil)
	held, err := endpoint.Acquire(context.Background(), w.stateDir, stale.id) // GC can't go on with this one
	w.must(err)
	defer held.Release()
	list := gcList(other)
	maps.Copy(list, w.conf)
	conf, err := json.Marshal(list)
	w.must(err)
	p := w.newPod()
	wait := w.start("GC", nil, conf)
	w.eventually("GC holds the lock, but not alone", func() bool {
		notes, err := filepath.Glob(filepath.Join(w.stateDir, "holders", "*"))
		if err != nil || len(notes) == 0 {
			return false
		}
		brief, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		l, err := bpffs.Shared(brief, w.stateDir, "test")
		l.Release()
		return err == nil
	})
	w.add(p, nil, waitTime+"=2s")
	held.Release()
	if out, err := wait(); err != nil {
		t.Fatalf("GC: %v\n%s", err, out)
	}
	if used := w.used(); len(used) != 2 {
		t.Errorf("in use after GC: %v, want the two pods that stay", used)
	}
	w.ok("DEL", p, nil)
	w.ok("DEL", other, nil)
	w.unchanged(before)
}

// The runtime may try an ADD again that was killed, while GC is about to release what that has left.
func TestGCSparesWhatALaterAddHasMade(t *testing.T) {
	w := newFixture(t)
	p := w.newPod()
	conf, err := json.Marshal(w.conf)
	w.must(err)
	pl := &plugin{stdout: discard{}, stderr: discard{}, wait: lockWait}
	c, done, err := pl.begin("GC", &skel.CmdArgs{StdinData: conf})
	w.must(err)
	defer done()
	nobody := map[endpoint.ID]bool{}
	w.killed(p, "pod")
	stale, err := c.findStale(nobody)
	w.must(err)
	created, found := stale[p.id]
	if !found {
		t.Fatalf("what the killed ADD has left is not stale: %v", stale)
	}
	r := w.add(p, nil)
	if _, released, err := c.releaseOne(t.Context(), p.id, created); err != nil || released {
		t.Errorf("released: %v, %v", released, err)
	}
	w.ok("CHECK", p, prevResult(t, r))
	if stale, err = c.findStale(nobody); err != nil || len(stale) != 1 {
		t.Fatalf("stale: %v, %v", stale, err)
	}
	if _, released, err := c.releaseOne(t.Context(), p.id, stale[p.id]); err != nil || !released {
		t.Errorf("released: %v, %v", released, err)
	}
	if used := w.used(); len(used) != 0 {
		t.Errorf("in use: %v", used)
	}
}

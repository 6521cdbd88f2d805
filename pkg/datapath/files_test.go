package datapath

import (
	"context"
	"errors"
	"os"
	"runtime/debug"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

// openFiles counts this process's file descriptors.
func openFiles(t *testing.T) int {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	check(t, err)
	return len(files)
}

// Whatever a load fails at, it keeps no file open: an agent tries again and again.
func TestFailedLoadClosesItsFiles(t *testing.T) {
	n := newNode(t, isolated(t, attach.Auto))
	grown := n.opts
	grown.Spec = embedded(t)
	grow(grown.Spec, snat.Name, 8)
	grow(grown.Spec, snat.ReverseName, 8)
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // which would close what was forgotten
	for what, c := range map[string]struct {
		opts  Options
		steps []step
	}{
		"the same maps":  {n.opts, []step{stepOpened, stepLoaded, stepAttached}},
		"maps that move": {grown, []step{stepOpened, stepCommitted, stepAttached, stepMerged}},
	} {
		for _, at := range c.steps {
			fail := func(s step) error {
				if s == at {
					return errors.New("made to fail")
				}
				return nil
			}
			before := openFiles(t)
			if _, err := load(context.Background(), c.opts, fail); err == nil {
				t.Fatalf("%s: a load that fails at %q succeeded", what, at)
			}
			if left := openFiles(t) - before; left != 0 {
				t.Errorf("%s: failed at %q, %d files are still open", what, at, left)
			}
		}
	}
}

func TestFailedReconfigurationClosesItsFiles(t *testing.T) {
	n := newNode(t, isolated(t, attach.Auto))
	dp := mustLoad(t, n.opts)
	other := n.opts.NodeConfig
	other.SnatPorts[0].First++
	// Where the last pod's link should be pinned stands something that can't be opened.
	broken := n.opts.Dir.Link(string(attach.FromPod), 1<<30)
	check(t, os.Mkdir(broken, 0o700))
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	before := openFiles(t)
	for range 2 {
		if err := dp.Reconfigure(context.Background(), other, false); err == nil {
			t.Fatal("succeeded although an attachment can't be looked at")
		}
	}
	if left := openFiles(t) - before; left != 0 {
		t.Errorf("%d files are still open after two tries", left)
	}
	check(t, os.Remove(broken))
	check(t, dp.Reconfigure(context.Background(), other, false))
	if left := openFiles(t) - before; left != 0 {
		t.Errorf("%d files more are open after one that succeeded", left)
	}
}

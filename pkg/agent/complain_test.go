package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// logged has a reconciler's log at hand, and counts in it.
func logged(r *reconciler) (count func(what string) int) {
	log := &bytes.Buffer{}
	r.log = slog.New(slog.NewTextHandler(log, nil))
	return func(what string) int { return strings.Count(log.String(), what) }
}

// Who holds a lock, and for how long by now, is no other complaint.
func TestLockThatIsNotToBeHadIsToldOnce(t *testing.T) {
	r := &reconciler{reported: map[string]bool{}}
	count := logged(r)
	dir := t.TempDir()
	holder, err := bpffs.Shared(t.Context(), dir, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Release()
	texts := map[string]bool{}
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		_, err := bpffs.Exclusive(ctx, dir, "test")
		cancel()
		if !errors.Is(err, bpffs.ErrLocked) {
			t.Fatal(err)
		}
		texts[err.Error()] = true
		r.modeChanged(t.Context(), outcome{true, explainMode(fmt.Errorf("replace the programs: %w", err), true)}, time.Now())
	}
	if n := count("about=\"netfilter's translation\""); n != 1 || len(texts) == 1 {
		t.Errorf("%d texts are told %d times, want several once", len(texts), n)
	}
	r.modeChanged(t.Context(), outcome{true, errors.New("another reason")}, time.Now())
	if n := count("about=\"netfilter's translation\""); n != 2 {
		t.Errorf("told %d times after another reason, want twice", n)
	}
}

func TestTooManyUplinksAreToldOnce(t *testing.T) {
	r := newReconciler(t)
	count := logged(r)
	for more := range 4 {
		v := &view{}
		for i := range uplinks.Bits + 1 + more%3 {
			v.uplinks = append(v.uplinks, plan.Link{Index: uint32(1000 + i)})
		}
		if err := r.prepareUplinks(v); err != nil {
			t.Fatal(err)
		}
	}
	if n := count("more than 64 uplinks"); n != 1 {
		t.Errorf("told %d times, want once", n)
	}
}

func TestBrokenStateIsToldOnce(t *testing.T) {
	r := newReconciler(t)
	ready(t, r)
	count := logged(r)
	if err := os.MkdirAll(endpoint.Dir(r.cfg.State), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(endpoint.Dir(r.cfg.State), "c1:eth0.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		r.pass(t.Context())
	}
	if n := count("some endpoints' state"); n != 1 {
		t.Errorf("told %d times", n)
	}
}

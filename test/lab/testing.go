package lab

import (
	"bytes"
	"cmp"
	"context"
	"os"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// ForTest builds a lab for one test, of the families that $EBPF_CNI_FAMILY names unless the test has named some. When the test ends, drops for other than the expected reasons fail it, a failure
// is explained by Diagnose, the lab is closed, and anything that it leaves behind is an error.
func ForTest(tb testing.TB, opts Options, expected ...drops.Reason) *Lab {
	tb.Helper()
	priv.Require(tb)
	if opts.Families == nil {
		opts.Families = chosenFamilies(tb)
	}
	l, err := New(tb.Context(), opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := l.UnexpectedDrops(expected...); err != nil {
			tb.Error(err)
		}
		if tb.Failed() {
			var story bytes.Buffer
			l.Diagnose(context.Background(), &story) // the test's own context has ended
			tb.Log(story.String())
		}
		if err := l.Close(); err != nil {
			tb.Error(err)
		}
		assertNothingRemains(tb, l.ID)
	})
	return l
}

// chosenFamilies lets a whole suite run in other families than IPv4: make test FAMILY=dual.
func chosenFamilies(tb testing.TB) []wire.Family {
	tb.Helper()
	name := cmp.Or(os.Getenv("EBPF_CNI_FAMILY"), "ipv4")
	families := FamiliesByName[name]
	if families == nil {
		tb.Fatalf("EBPF_CNI_FAMILY=%s: takes ipv4, ipv6 or dual", name)
	}
	return families
}

// assertNothingRemains gives what the kernel ends in the background a moment.
func assertNothingRemains(tb testing.TB, id string) {
	tb.Helper()
	var found []string
	for deadline := time.Now().Add(priv.Patience(2 * time.Second)); ; time.Sleep(10 * time.Millisecond) {
		var err error
		found, err = Remains(id)
		if err != nil {
			tb.Error(err)
			return
		}
		if len(found) == 0 {
			return
		}
		if time.Now().After(deadline) {
			break
		}
	}
	tb.Errorf("lab %s left behind: %q", id, found)
}

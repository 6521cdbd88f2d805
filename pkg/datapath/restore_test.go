package datapath

import (
	"os"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

func TestPinsThatSomebodyRemovedComeBack(t *testing.T) {
	opts := isolated(t, attach.Auto)
	dp := mustLoad(t, opts)
	n := node{opts: opts}
	before := n.pins(t)
	if restored, err := dp.RestorePins(); len(restored) > 0 || err != nil {
		t.Errorf("nothing is missing, restored %v (%v)", restored, err)
	}
	gone := []string{opts.Dir.Map(snat.Name), opts.Dir.Program("ec_from_pod")}
	for _, path := range gone {
		check(t, os.Remove(path))
	}
	restored, err := dp.RestorePins()
	check(t, err)
	slices.Sort(restored)
	if diff := cmp.Diff(gone, restored); diff != "" {
		t.Errorf("restored (-want +got):\n%s", diff)
	}
	check(t, os.RemoveAll(string(opts.Dir)))
	if _, err := dp.RestorePins(); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(before, n.pins(t)); diff != "" {
		t.Errorf("pins (-before +after):\n%s", diff)
	}
}

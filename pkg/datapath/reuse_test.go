package datapath

import (
	"context"
	"maps"
	"os"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

// attachedPrograms are the IDs of the programs on all places.
func attachedPrograms(t *testing.T, opts Options) map[attach.Place]ebpf.ProgramID {
	t.Helper()
	all, err := findAttachments(opts)
	check(t, err)
	defer closeAttachments(all)
	out := make(map[attach.Place]ebpf.ProgramID)
	for _, a := range all {
		out[a.Place] = a.id
	}
	return out
}

// A start that would load what is there already loads nothing; whatever has changed makes it load everything.
func TestRestartUsesProgramsOn(t *testing.T) {
	n := newNode(t, isolated(t, attach.Auto))
	check(t, mustLoad(t, n.opts).Close())
	for _, c := range []struct {
		name   string
		change func(*Options)
		loads  bool
	}{
		{"nothing", func(*Options) {}, false},
		{"a constant", func(o *Options) { o.NodeConfig.SnatPorts[0].First++ }, true},
		{"nothing more", func(*Options) {}, false},
		{"a capacity", func(o *Options) { o.SnatEntries *= 2 }, true},
		{"a program's pin is gone", func(o *Options) { check(t, os.Remove(o.Dir.Program("ec_from_pod"))) }, true},
		{"another program is pinned", func(o *Options) {
			check(t, os.Rename(o.Dir.Program("ec_to_pod"), o.Dir.Program("ec_from_pod")))
		}, true},
		{"a map is new", func(o *Options) { check(t, os.Remove(o.Dir.Map(destinations.Name))) }, true},
		{"the record is cut off", func(o *Options) { check(t, os.Truncate(o.recordPath(), 30)) }, true},
		{"the record is gone", func(o *Options) { check(t, os.Remove(o.recordPath())) }, true},
		{"nothing at all", func(*Options) {}, false},
	} {
		before := attachedPrograms(t, n.opts)
		c.change(&n.opts)
		dp := mustLoad(t, n.opts)
		after := attachedPrograms(t, n.opts)
		if len(after) == 0 || len(after) != len(before) || maps.Equal(before, after) == c.loads {
			t.Errorf("%s: programs loaded: %t, want %t; before %v, now %v", c.name, !c.loads, c.loads, before, after)
		}
		for place, id := range after {
			if dp.ids[place.Hook.Program()] != id {
				t.Errorf("%s: on %v is program %d, the datapath's is %d", c.name, place, id, dp.ids[place.Hook.Program()])
			}
		}
		check(t, dp.Close())
	}
}

// What is attached after a start that has used programs on is those.
func TestProgramsUsedOnAreAttached(t *testing.T) {
	n := newNode(t, isolated(t, attach.Auto))
	check(t, mustLoad(t, n.opts).Close())
	before := attachedPrograms(t, n.opts)
	check(t, n.opts.attacher().Detach(n.pods[0], attach.FromPod))
	dp := mustLoad(t, n.opts)
	check(t, dp.Attach(n.pods[0], attach.FromPod))
	if after := attachedPrograms(t, n.opts); !maps.Equal(before, after) {
		t.Errorf("before %v, now %v", before, after)
	}
	check(t, Remove(context.Background(), n.opts))
	if _, err := os.Stat(n.opts.recordPath()); !os.IsNotExist(err) {
		t.Errorf("the record is left after removal: %v", err)
	}
}

// Package migrate brings the maps of a node from one build to the next: it finds
// those that are pinned, makes those that are missing, and for a map whose values
// grow or whose capacity changes a new one, to which the content moves while
// programs write to both. What each map holds, and so how, maps/registry says.
//
// A map that takes over is pinned below Dir from Commit until Publish puts it in
// its place; whoever is killed in between leaves the next start both.
package migrate

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/registry"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// ErrLayout is returned (wrapped) when the pinned maps cannot become the maps of
// this build.
var ErrLayout = errors.New("map layout does not fit")

// startOver is the way to a build that cannot use the maps that are there.
const startOver = "or drain the node and reboot it; `ebpf-agent cleanup` removes the maps too, but takes the network from every pod that lives"

// Dir holds the pins of an upgrade that is under way: the maps that take over,
// from before the first program uses one until it stands at its final path, and
// new programs on their way to theirs.
func Dir(d bpffs.Dir) string { return filepath.Join(string(d), "next") }

// Path is the pin of that name in Dir.
func Path(d bpffs.Dir, name string) string { return filepath.Join(Dir(d), name) }

// Tables are all maps of a build that are pinned, and where their content comes
// from. Its methods are called in their order below, from one goroutine; after a
// failure of one that follows Commit, GiveBack.
type Tables struct {
	dir    bpffs.Dir
	tables []*table
}

// Open finds or makes the maps of a build by its specs. It changes nothing that
// runs: a map that has to take over from another one is not pinned yet.
func Open(dir bpffs.Dir, specs map[string]*ebpf.MapSpec, log *slog.Logger) (_ *Tables, err error) {
	if err := checkLayout(dir); err != nil {
		return nil, err
	}
	all := &Tables{dir: dir}
	defer func() {
		if err != nil {
			all.Close()
		}
	}()
	if err := all.sweep(); err != nil {
		return nil, err
	}
	for _, d := range registry.Pinned() {
		spec := specs[d.Name]
		if spec == nil {
			return nil, fmt.Errorf("the programs have no map %s", d.Name)
		}
		t := &table{Definition: d, counters: d.Counters(), spec: spec}
		all.tables = append(all.tables, t)
		if err := t.open(dir); err != nil {
			return nil, err
		}
		if t.moves() {
			log.Info("map moves to a new layout", "map", t.Name, "layout", spec.String(), "was", t.sources[0].m.String())
		}
	}
	return all, nil
}

// Maps returns the maps that the new programs use, by name. They stay Tables'.
func (all *Tables) Maps() map[string]*ebpf.Map {
	out := make(map[string]*ebpf.Map)
	for _, t := range all.tables {
		out[t.Name] = t.m
	}
	return out
}

// FlowsMove reports whether flows move from one map to another.
func (all *Tables) FlowsMove() bool {
	for _, t := range all.tables {
		if t.moves() && t.Flows != nil {
			return true
		}
	}
	return false
}

// Fill copies what moves, before any new program runs.
func (all *Tables) Fill() error { return all.each((*table).fill) }

// Commit catches up with the maps that move and pins them, so that a process that
// is killed from now on leaves the next one both maps. The running programs are
// told that flows move.
func (all *Tables) Commit() error {
	if err := all.sayFlowsMove(true); err != nil {
		return err
	}
	return all.each(func(t *table) error {
		if !t.moves() {
			return nil
		}
		if err := t.fill(); err != nil || t.pinned {
			return err
		}
		return pinOver(t.m, Path(all.dir, t.Name))
	})
}

// Merge brings what the old programs wrote since the last pass into the maps that
// the new programs write to.
func (all *Tables) Merge() error { return all.each((*table).merge) }

// Done tells the programs that no flow moves any more.
func (all *Tables) Done() error { return all.sayFlowsMove(false) }

// Publish puts the maps that took over in their places, calls after each time,
// and notes in the maps which layout they have now.
func (all *Tables) Publish(after func() error) error {
	err := all.each(func(t *table) error {
		if t.pinned {
			return nil
		}
		if err := os.Rename(Path(all.dir, t.Name), all.dir.Map(t.Name)); err != nil {
			return fmt.Errorf("publish map %s: %w", t.Name, err)
		}
		t.pinned = true
		return after()
	})
	if err != nil {
		return err
	}
	return all.writeLayout()
}

// GiveBack brings what the new programs wrote into the pinned maps, which the old
// programs go on using after all. The maps that were to take over are forgotten,
// unless keep says that some new program may still run.
func (all *Tables) GiveBack(keep bool) error {
	var errs []error
	for _, t := range all.tables {
		errs = append(errs, t.giveBack())
	}
	if err := errors.Join(errs...); err != nil || keep {
		return err
	}
	for _, t := range all.tables {
		if t.moves() && !t.pinned && !t.live {
			errs = append(errs, RemovePin(Path(all.dir, t.Name)))
		}
	}
	return errors.Join(append(errs, all.sayFlowsMove(false))...)
}

// Release closes all but the maps that the new programs use, which become the caller's.
func (all *Tables) Release() map[string]*ebpf.Map {
	out := all.Maps()
	for _, t := range all.tables {
		t.m = nil
	}
	all.Close()
	return out
}

// Close closes every map.
func (all *Tables) Close() {
	for _, t := range all.tables {
		t.close()
	}
}

func (all *Tables) each(do func(*table) error) error {
	for _, t := range all.tables {
		if err := do(t); err != nil {
			return err
		}
	}
	return nil
}

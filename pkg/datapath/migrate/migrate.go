// Package migrate brings the maps of a node from one build to the next. It opens
// the pinned maps and creates those that are missing. A map whose values grow or
// whose capacity changes is replaced by a new one, to which the content moves while
// programs write to both. How depends on the content, by its maps/registry entry.
//
// A new map is pinned below Dir from Commit until Publish renames it over the old
// one. If the process is killed in between, the next start finds both.
package migrate

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/registry"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// ErrLayout is returned (wrapped) when the pinned maps cannot become the maps of
// this build.
var ErrLayout = errors.New("map layout does not fit")

// startOver tells operators how to install a build that cannot use the pinned maps.
const startOver = "or drain the node and reboot it; `ebpf-agent cleanup` removes the maps too, but disconnects every running pod"

// Dir is the directory for the pins of an upgrade that is under way: new maps, until
// they are renamed to their final paths, and new programs likewise.
func Dir(d bpffs.Dir) string { return filepath.Join(string(d), "next") }

// Path is the pin of that name in Dir.
func Path(d bpffs.Dir, name string) string { return filepath.Join(Dir(d), name) }

// Tables are all pinned maps of a build, and the maps that their content comes from.
// Its methods are called by one goroutine, in the order below; after an error from
// Commit on, Rollback is called.
type Tables struct {
	dir    bpffs.Dir
	tables []*table
}

// Open opens or creates the maps of a build by its specs. It changes nothing that
// runs: a map that replaces another one is not pinned yet.
func Open(dir bpffs.Dir, specs map[string]*ebpf.MapSpec, log *slog.Logger) (_ *Tables, err error) {
	all := &Tables{dir: dir}
	defer func() {
		if err != nil {
			all.Close()
		}
	}()
	for _, d := range registry.Pinned() {
		spec := specs[d.Name]
		if spec == nil {
			return nil, fmt.Errorf("the programs have no map %s", d.Name)
		}
		all.tables = append(all.tables, &table{Definition: d, counters: d.Counters(), spec: spec})
	}
	// A build that is refused leaves everything as it was.
	if err := checkLayout(dir); err != nil {
		return nil, err
	}
	if err := all.each(func(t *table) error { return t.check(dir) }); err != nil {
		return nil, err
	}
	if err := all.removeInterrupted(); err != nil {
		return nil, err
	}
	for _, t := range all.tables {
		if err := t.open(dir); err != nil {
			return nil, err
		}
		if t.moves() {
			log.Info("map moves to a new layout", "map", t.Name, "layout", t.spec.String(), "was", t.sources[0].m.String())
		}
	}
	return all, nil
}

// Maps returns the maps for the new programs, by name. Tables still owns them.
func (all *Tables) Maps() map[string]*ebpf.Map {
	out := make(map[string]*ebpf.Map)
	for _, t := range all.tables {
		out[t.Name] = t.m
	}
	return out
}

// New reports whether the node had none of the maps before: no program runs with them.
func (all *Tables) New() bool {
	return !slices.ContainsFunc(all.tables, func(t *table) bool { return !t.created })
}

// FlowsMove reports whether a flow table moves to a new map.
func (all *Tables) FlowsMove() bool {
	for _, t := range all.tables {
		if t.moves() && t.Flows != nil {
			return true
		}
	}
	return false
}

// Fill copies the content of the maps that move, before any new program runs.
func (all *Tables) Fill() error { return all.each((*table).fill) }

// Commit copies what has changed since Fill and pins the new maps, so that a process
// that is killed from now on leaves both maps to the next one. It tells the running
// programs that flow tables move.
func (all *Tables) Commit() error {
	if err := all.setFlowsMove(true); err != nil {
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

// Merge merges what the old programs have written since the last pass into the new
// maps, to which the new programs write.
func (all *Tables) Merge() error { return all.each((*table).merge) }

// Done tells the programs that no flow table moves any more.
func (all *Tables) Done() error { return all.setFlowsMove(false) }

// Publish renames the pins of the new maps over the old, calls after for each, and
// writes the layout to the map config.
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

// Rollback merges what the new programs have written into the old maps, which the old
// programs keep using. The new maps are unpinned, unless keep is set because some new
// program may still run.
func (all *Tables) Rollback(keep bool) error {
	var errs []error
	for _, t := range all.tables {
		errs = append(errs, t.rollback())
	}
	if err := errors.Join(errs...); err != nil || keep {
		return err
	}
	for _, t := range all.tables {
		if t.moves() && !t.pinned && !t.live {
			errs = append(errs, RemovePin(Path(all.dir, t.Name)))
		}
	}
	return errors.Join(append(errs, all.setFlowsMove(false))...)
}

// Release returns the maps of the new programs, which the caller now owns, and closes all others.
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

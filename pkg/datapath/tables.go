package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// table is one map of the new programs and where its content comes from.
type table struct {
	name string
	spec *ebpf.MapSpec
	// m is the map that the new programs use.
	m *ebpf.Map
	// sources are the maps whose content moves into m: the pinned one, and one that
	// an interrupted upgrade left behind. None: m is the pinned map.
	sources []*source
	// live says that running programs write to m already.
	live bool
	// pinned says that m stands at its final path.
	pinned bool
}

// moves says that m takes over from another map.
func (t *table) moves() bool { return len(t.sources) > 0 }

func (t *table) close() {
	if t.m != nil {
		_ = t.m.Close()
	}
	for _, s := range t.sources {
		_ = s.m.Close()
	}
}

// nextDir holds the pins of an upgrade that is under way: the maps that take
// over, from before the first program uses one until it stands at its final path,
// and new programs on their way to theirs.
func nextDir(d bpffs.Dir) string { return filepath.Join(string(d), "next") }

func nextPath(d bpffs.Dir, name string) string { return filepath.Join(nextDir(d), name) }

// isData says that a map is the data section of one load.
func isData(name string) bool { return strings.Contains(name, ".") }

// isPrivate says that a map belongs to the programs of one load, and is not
// pinned: its constants, and what they keep for a moment.
func isPrivate(name string) bool {
	return isData(name) || name == "paths" || name == "refusals" || name == "scratch"
}

// openTable finds or makes the map of that name. It changes nothing that runs:
// a map that has to take over from another one is not pinned yet.
func openTable(dir bpffs.Dir, name string, spec *ebpf.MapSpec) (_ *table, err error) {
	t := &table{name: name, spec: spec}
	defer func() {
		if err != nil {
			t.close()
		}
	}()
	pinned, err := openPin(dir.Map(name))
	if err != nil {
		return nil, err
	}
	left, err := openPin(nextPath(dir, name))
	if err != nil {
		closeMap(pinned)
		return nil, err
	}
	if pinned == nil && left != nil {
		// An interrupted upgrade leaves both; somebody has removed one. Its map is
		// all there is, and becomes the pinned one.
		pinned, left = left, nil
		if err := os.Rename(nextPath(dir, name), dir.Map(name)); err != nil {
			closeMap(pinned)
			return nil, fmt.Errorf("pin map %s: %w", name, err)
		}
	}
	switch {
	case pinned == nil:
		return t, t.create(dir)
	case left == nil && spec.Compatible(pinned) == nil:
		t.m, t.pinned = pinned, true
		return t, nil
	}
	return t, t.takeOver(pinned, left)
}

// create makes and pins a map that the node does not have yet.
func (t *table) create(dir bpffs.Dir) error {
	if err := t.make(); err != nil {
		return err
	}
	t.pinned = true
	if err := t.m.Pin(dir.Map(t.name)); err != nil {
		return fmt.Errorf("pin map %s: %w", t.name, err)
	}
	return nil
}

func (t *table) make() error {
	m, err := ebpf.NewMap(t.spec)
	if err != nil {
		return fmt.Errorf("make map %s: %w", t.name, err)
	}
	t.m = m
	return nil
}

// takeOver chooses which map the new programs use: the one that an interrupted
// upgrade left, the pinned one, or a third.
func (t *table) takeOver(pinned, left *ebpf.Map) error {
	if left != nil && t.spec.Compatible(left) == nil {
		t.m, t.live = left, true
		t.sources = []*source{newSource(pinned)}
		return t.checkGrowth(pinned)
	}
	if left != nil && t.spec.Compatible(pinned) == nil {
		t.m, t.live, t.pinned = pinned, true, true
		t.sources = []*source{newSource(left)}
		return nil
	}
	t.sources = []*source{newSource(pinned)}
	if left != nil {
		t.sources = append(t.sources, newSource(left))
	}
	if err := t.checkGrowth(pinned); err != nil {
		return err
	}
	return t.make()
}

// checkGrowth refuses a change of layout that copying cannot follow.
func (t *table) checkGrowth(old *ebpf.Map) error {
	if contentOf(t.name) == hints {
		return nil
	}
	var diffs []string
	differ := func(what string, is, was any) {
		diffs = append(diffs, fmt.Sprintf("%s is %v, was %v", what, is, was))
	}
	if t.spec.Type != old.Type() {
		differ("type", t.spec.Type, old.Type())
	}
	if t.spec.KeySize != old.KeySize() {
		differ("size of a key", t.spec.KeySize, old.KeySize())
	}
	if t.spec.ValueSize < old.ValueSize() {
		differ("size of a value", t.spec.ValueSize, old.ValueSize())
	}
	if len(diffs) > 0 {
		return fmt.Errorf("map %s: %s (a layout grows only at the end of its values): %w; "+
			"run the build that made it or a newer one, %s", t.name, strings.Join(diffs, ", "), ErrLayout, startOver)
	}
	return nil
}

// openPin opens a pinned map; nil when nothing is pinned at path.
func openPin(path string) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	return m, nil
}

func closeMap(m *ebpf.Map) {
	if m != nil {
		_ = m.Close()
	}
}

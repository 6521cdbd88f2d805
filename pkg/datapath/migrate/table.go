package migrate

import (
	"fmt"
	"os"
	"reflect"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/raw"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// table is one map of the new programs and where its content comes from.
type table struct {
	typed.Definition
	// counters are the fields of a value that the programs add to.
	counters []reflect.StructField
	spec     *ebpf.MapSpec
	// m is the map that the new programs use.
	m *ebpf.Map
	// sources are the maps whose content moves into m: the pinned one, and one that
	// an interrupted upgrade has left. None: m is the pinned map.
	sources []*source
	// live: running programs write to m already.
	live bool
	// pinned: m is pinned at its final path.
	pinned bool
	// created: the node did not have the map.
	created bool
}

// moves reports whether m replaces another map.
func (t *table) moves() bool { return len(t.sources) > 0 }

// configured reports whether the pinned map is the truth, except for counters.
func (t *table) configured() bool { return t.Content == typed.Configured }

// empty reports whether nothing moves into the map when it is replaced.
func (t *table) empty() bool { return !t.configured() && len(t.counters) == 0 && t.Flows == nil }

func (t *table) close() {
	closeMap(t.m)
	for _, s := range t.sources {
		closeMap(s.m)
	}
}

func closeMap(m *ebpf.Map) {
	if m != nil {
		_ = m.Close()
	}
}

// open opens or creates the map.
func (t *table) open(dir bpffs.Dir) error {
	pinned, err := raw.Open(dir.Map(t.Name))
	if err != nil {
		return err
	}
	left, err := raw.Open(Path(dir, t.Name))
	if err != nil {
		closeMap(pinned)
		return err
	}
	if pinned == nil && left != nil {
		// An interrupted upgrade leaves both, but somebody has removed one. The other
		// becomes the pinned one.
		pinned, left = left, nil
		if err := os.Rename(Path(dir, t.Name), dir.Map(t.Name)); err != nil {
			closeMap(pinned)
			return fmt.Errorf("pin map %s: %w", t.Name, err)
		}
	}
	switch {
	case pinned == nil:
		return t.create(dir)
	case left == nil && t.spec.Compatible(pinned) == nil:
		t.m, t.pinned = pinned, true
		return nil
	}
	return t.takeOver(pinned, left)
}

// create creates and pins a map that the node does not have yet.
func (t *table) create(dir bpffs.Dir) error {
	if err := t.make(); err != nil {
		return err
	}
	t.pinned, t.created = true, true
	if err := t.m.Pin(dir.Map(t.Name)); err != nil {
		return fmt.Errorf("pin map %s: %w", t.Name, err)
	}
	return nil
}

func (t *table) make() error {
	m, err := ebpf.NewMap(t.spec)
	if err != nil {
		return fmt.Errorf("make map %s: %w", t.Name, err)
	}
	t.m = m
	return nil
}

// takeOver chooses the map for the new programs: the one that an interrupted upgrade
// has left, the pinned one, or a new one.
func (t *table) takeOver(pinned, left *ebpf.Map) error {
	if left != nil && t.spec.Compatible(left) == nil {
		t.m, t.live = left, true
		t.sources = []*source{{m: pinned}}
		return nil
	}
	if left != nil && t.spec.Compatible(pinned) == nil {
		t.m, t.live, t.pinned = pinned, true, true
		t.sources = []*source{{m: left, leftover: true}}
		return nil
	}
	t.sources = []*source{{m: pinned}}
	if left != nil {
		t.sources = append(t.sources, &source{m: left, leftover: true})
	}
	return t.make()
}

// check refuses a pinned map whose content cannot be copied into one of this build.
func (t *table) check(dir bpffs.Dir) error {
	old, err := raw.Open(dir.Map(t.Name))
	if old == nil && err == nil {
		old, err = raw.Open(Path(dir, t.Name)) // see open
	}
	if old == nil || err != nil {
		return err
	}
	defer old.Close()
	if t.empty() || t.spec.Compatible(old) == nil {
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
		return fmt.Errorf("map %s: %s (values can only grow, at their end): %w; "+
			"run the build that made it or a newer one, %s", t.Name, strings.Join(diffs, ", "), ErrLayout, startOver)
	}
	return nil
}

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// pinOver pins a map at path, in place of what is pinned there.
func pinOver(m *ebpf.Map, path string) error {
	if m.IsPinned() {
		return nil
	}
	next := path + "_next"
	if err := removePin(next); err != nil {
		return err
	}
	if err := m.Pin(next); err != nil {
		return fmt.Errorf("pin map: %w", err)
	}
	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("pin map: %w", err)
	}
	return nil
}

// sweepNext removes the pins of an interrupted upgrade but for its maps, in which
// flows may live.
func sweepNext(dir bpffs.Dir, known map[string]*ebpf.MapSpec) error {
	entries, err := os.ReadDir(nextDir(dir))
	if err != nil {
		return fmt.Errorf("list pins of an upgrade: %w", err)
	}
	for _, e := range entries {
		if known[e.Name()] != nil {
			continue
		}
		if err := removePin(nextPath(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// removePin unpins what stands at path, if anything does.
func removePin(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("unpin: %w", err)
	}
	return nil
}

// writeLayout notes in the maps which layout they have now.
func (l *loader) writeLayout() error {
	m := l.tables[config.Name].m
	key := make([]byte, m.KeySize())
	v, err := lookup(m, key)
	if err != nil {
		return err
	}
	now := decode[config.Value](v[0])
	if now.Layout == wire.LayoutVersion {
		return nil
	}
	now.Layout = wire.LayoutVersion
	if err := put(m, key, value{encode(v[0], now)}, ebpf.UpdateAny); err != nil {
		return fmt.Errorf("write layout to map %s: %w", config.Name, err)
	}
	return nil
}

// publish puts the pins in their places: maps, layout, programs.
func (l *loader) publish() error {
	for _, t := range l.tables {
		if t.pinned {
			continue
		}
		if err := os.Rename(nextPath(l.opts.Dir, t.name), l.opts.Dir.Map(t.name)); err != nil {
			return fmt.Errorf("publish map %s: %w", t.name, err)
		}
		t.pinned = true
		if err := l.at(stepPublished); err != nil {
			return err
		}
	}
	if err := l.writeLayout(); err != nil {
		return err
	}
	for name, p := range l.programs {
		if err := p.Pin(nextPath(l.opts.Dir, name)); err != nil {
			return fmt.Errorf("pin program %s: %w", name, err)
		}
		if err := os.Rename(nextPath(l.opts.Dir, name), l.opts.Dir.Program(name)); err != nil {
			return fmt.Errorf("publish program %s: %w", name, err)
		}
		if err := l.at(stepPublished); err != nil {
			return err
		}
	}
	if err := removeUnknown(l.opts.Dir, l.programs); err != nil {
		return err
	}
	if err := os.RemoveAll(nextDir(l.opts.Dir)); err != nil {
		return fmt.Errorf("remove pins of the upgrade: %w", err)
	}
	return nil
}

// removeUnknown deletes pins of programs that this build does not have.
func removeUnknown(dir bpffs.Dir, known map[string]*ebpf.Program) error {
	entries, err := os.ReadDir(dir.Programs())
	if err != nil {
		return fmt.Errorf("list pinned programs: %w", err)
	}
	for _, e := range entries {
		if known[e.Name()] != nil {
			continue
		}
		if err := removePin(dir.Program(e.Name())); err != nil {
			return err
		}
	}
	return nil
}

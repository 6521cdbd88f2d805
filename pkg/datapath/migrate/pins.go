package migrate

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/registry"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
)

// pinOver pins a map at path, replacing what is pinned there.
func pinOver(m *ebpf.Map, path string) error {
	if m.IsPinned() {
		return nil
	}
	next := path + "_next"
	if err := RemovePin(next); err != nil {
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

// removeInterrupted removes the pins of an interrupted upgrade, except its maps,
// which may have flows.
func (all *Tables) removeInterrupted() error {
	if err := os.MkdirAll(Dir(all.dir), 0o700); err != nil {
		return fmt.Errorf("make pin directory: %w", err)
	}
	entries, err := os.ReadDir(Dir(all.dir))
	if err != nil {
		return fmt.Errorf("list pins of an upgrade: %w", err)
	}
	for _, e := range entries {
		if slices.ContainsFunc(registry.Pinned(), func(d typed.Definition) bool { return d.Name == e.Name() }) {
			continue
		}
		if err := RemovePin(Path(all.dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// RemovePin removes the pin at path, if there is one.
func RemovePin(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("unpin: %w", err)
	}
	return nil
}

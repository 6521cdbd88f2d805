package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// RestorePins restores missing pins, and returns their paths. The programs and maps
// still exist, since they are attached and open here.
func (d *Datapath) RestorePins() ([]string, error) {
	d.running.RLock()
	defer d.running.RUnlock()
	pins := make(map[string]func(path string) error)
	for name, m := range d.Maps.all {
		pins[d.opts.Dir.Map(name)] = func(path string) error { return pinClone(path, m.Clone) }
	}
	for name, p := range d.programs {
		pins[d.opts.Dir.Program(name)] = func(path string) error { return pinClone(path, p.Clone) }
	}
	var restored []string
	for path, pin := range pins {
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := d.opts.Dir.Prepare(); err != nil {
			return restored, err
		}
		if err := pin(path); err != nil {
			return restored, fmt.Errorf("pin again: %w", err)
		}
		restored = append(restored, path)
	}
	return restored, nil
}

// pinClone pins a clone of a map or program: the original remembers the old pin, and would not pin again.
func pinClone[T interface {
	Pin(path string) error
	Close() error
}](path string, clone func() (T, error)) error {
	c, err := clone()
	if err != nil {
		return err
	}
	return errors.Join(c.Pin(path), c.Close())
}

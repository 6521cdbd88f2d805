package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// RestorePins pins again what somebody unpinned, and returns the paths. Programs
// and maps live on in the meantime, since they are attached and open here.
func (d *Datapath) RestorePins() ([]string, error) {
	d.running.RLock()
	defer d.running.RUnlock()
	pins := make(map[string]func(path string) error)
	for name, m := range d.Maps.all {
		pins[d.opts.Dir.Map(name)] = func(path string) error {
			// A clone does not know where the map was pinned, so it really pins.
			c, err := m.Clone()
			if err != nil {
				return err
			}
			return errors.Join(c.Pin(path), c.Close())
		}
	}
	for name, p := range d.programs {
		pins[d.opts.Dir.Program(name)] = func(path string) error {
			c, err := p.Clone()
			if err != nil {
				return err
			}
			return errors.Join(c.Pin(path), c.Close())
		}
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

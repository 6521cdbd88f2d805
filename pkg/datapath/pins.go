package datapath

import (
	"fmt"
	"os"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath/migrate"
)

// publish renames the new pins over the old: maps first, then programs.
func (l *loader) publish() error {
	if err := l.tables.Publish(func() error { return l.at(stepPublished) }); err != nil {
		return err
	}
	if err := l.publishPrograms(); err != nil {
		return err
	}
	if err := removeUnknown(l.opts.Dir, l.programs); err != nil {
		return err
	}
	if err := os.RemoveAll(migrate.Dir(l.opts.Dir)); err != nil {
		return fmt.Errorf("remove pins of the upgrade: %w", err)
	}
	return nil
}

func (l *loader) publishPrograms() error {
	if l.reused {
		return nil
	}
	for name, p := range l.programs {
		if err := p.Pin(migrate.Path(l.opts.Dir, name)); err != nil {
			return fmt.Errorf("pin program %s: %w", name, err)
		}
		if err := os.Rename(migrate.Path(l.opts.Dir, name), l.opts.Dir.Program(name)); err != nil {
			return fmt.Errorf("publish program %s: %w", name, err)
		}
		if err := l.at(stepPublished); err != nil {
			return err
		}
	}
	l.remember()
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
		if err := migrate.RemovePin(dir.Program(e.Name())); err != nil {
			return err
		}
	}
	return nil
}

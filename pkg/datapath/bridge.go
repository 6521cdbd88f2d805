package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

// bridge attaches the new program for arriving packets behind the old one while
// flows move to other maps, so that a reply finds its flow in either map. It is not
// pinned, so it ends with the process.
type bridge struct {
	progs map[attach.Hook]*ebpf.Program
	links []link.Link
}

func (b *bridge) close() {
	if b == nil {
		return
	}
	for _, l := range b.links {
		_ = l.Close()
	}
	for _, p := range b.progs {
		_ = p.Close()
	}
}

// bridge builds the bridge, nil when no flows move. With an error it returns what it
// has built, to be closed.
func (l *loader) bridge(olds []attachment) (b *bridge, err error) {
	arrivals, _ := splitArrivals(olds)
	if len(arrivals) == 0 || !l.tables.FlowsMove() {
		return nil, nil
	}
	b = &bridge{progs: map[attach.Hook]*ebpf.Program{}}
	for _, old := range arrivals {
		prog := b.progs[old.Hook]
		if prog == nil {
			if prog, err = l.loadTwin(old.Hook.Program()); err != nil {
				return b, err
			}
			b.progs[old.Hook] = prog
		}
		// An old program attached by clsact runs after all tcx links.
		anchor := link.Tail()
		if old.mode == attach.TCX {
			anchor = link.AfterProgramByID(old.id)
		}
		one, err := link.AttachTCX(link.TCXOptions{
			Interface: old.Ifindex, Program: prog, Attach: ebpf.AttachTCXIngress, Anchor: anchor,
		})
		if errors.Is(err, ebpf.ErrNotSupported) || (err != nil && !interfaceExists(old.Ifindex)) {
			continue
		}
		if err != nil {
			return b, fmt.Errorf("run both programs on interface %d: %w", old.Ifindex, err)
		}
		b.links = append(b.links, one)
	}
	return b, nil
}

// loadTwin loads one program a second time: the kernel attaches a program to a hook
// only once, and the pinned link gets the first copy.
func (l *loader) loadTwin(name string) (*ebpf.Program, error) {
	spec := l.spec.Copy()
	spec.Programs = map[string]*ebpf.ProgramSpec{name: spec.Programs[name]}
	coll, err := loadCollection(spec, l.tables.Maps())
	if err != nil {
		return nil, err
	}
	defer coll.Close()
	return coll.DetachProgram(name), nil
}

package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

// bridge has the uplinks run a new program next to the old one while flows move
// to other maps: what the first does not know it passes on to the second. It is
// not pinned, so it ends with the process.
type bridge struct {
	prog  *ebpf.Program
	links []link.Link
}

func (b *bridge) close() {
	if b == nil {
		return
	}
	for _, l := range b.links {
		_ = l.Close()
	}
	_ = b.prog.Close()
}

// bridge builds the bridge, which is nil when no flows move. What it built before
// an error is returned with it.
func (l *loader) bridge(olds []attachment) (*bridge, error) {
	arrivals, _ := splitArrivals(olds)
	if len(arrivals) == 0 || !l.tables.FlowsMove() {
		return nil, nil
	}
	prog, err := l.loadTwin(attach.FromUplink.Program())
	if err != nil {
		return nil, err
	}
	b := &bridge{prog: prog}
	for _, old := range arrivals {
		// A filter comes after all links.
		anchor := link.Tail()
		if old.mode == attach.TCX {
			anchor = link.AfterProgramByID(old.id)
		}
		one, err := link.AttachTCX(link.TCXOptions{
			Interface: old.ifindex, Program: prog, Attach: ebpf.AttachTCXIngress, Anchor: anchor,
		})
		if errors.Is(err, ebpf.ErrNotSupported) || (err != nil && !interfaceExists(old.ifindex)) {
			continue
		}
		if err != nil {
			return b, fmt.Errorf("run both programs on interface %d: %w", old.ifindex, err)
		}
		b.links = append(b.links, one)
	}
	return b, nil
}

// loadTwin loads one program a second time: the kernel takes a program onto a
// hook only once, and the pinned link needs the other.
func (l *loader) loadTwin(name string) (*ebpf.Program, error) {
	spec := l.spec.Copy()
	spec.Programs = map[string]*ebpf.ProgramSpec{name: spec.Programs[name]}
	programs, err := l.loadCollection(spec)
	if err != nil {
		return nil, err
	}
	return programs[name], nil
}

package datapath

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

// AttachUplink attaches the programs to an interface that leads out of the node.
// Programs of other builds are replaced.
func (d *Datapath) AttachUplink(ifindex int) error {
	for _, hook := range attach.UplinkHooks() {
		if err := d.Attach(ifindex, hook); err != nil {
			return err
		}
	}
	return nil
}

// DetachUplink removes the programs, and a qdisc that we created, from an interface.
// It is no error if there is nothing, or no such interface.
func (d *Datapath) DetachUplink(ifindex int) error {
	d.changes.Lock()
	defer d.changes.Unlock()
	var errs []error
	for _, hook := range slices.Backward(attach.UplinkHooks()) {
		errs = append(errs, d.opts.attacher().Detach(ifindex, hook))
	}
	errs = append(errs, d.qdiscs.remove(ifindex))
	return errors.Join(errs...)
}

// Attach attaches this build's program to the hook of the interface, unless it is
// there already.
func (d *Datapath) Attach(ifindex int, hook attach.Hook) error {
	d.changes.Lock()
	defer d.changes.Unlock()
	prog := d.Program(hook.Program())
	if prog == nil {
		return fmt.Errorf("attach to interface %d: no program %s is loaded", ifindex, hook.Program())
	}
	if ok, err := d.Attached(ifindex, hook); ok && err == nil {
		return nil
	}
	return d.qdiscs.attach(d.opts.attacher(), ifindex, hook, prog)
}

// Attached reports whether this build's program is on the hook of the interface.
func (d *Datapath) Attached(ifindex int, hook attach.Hook) (bool, error) {
	d.running.RLock()
	defer d.running.RUnlock()
	state, err := d.opts.attacher().Attached(ifindex, hook)
	if err != nil {
		return false, err
	}
	id, err := d.programID(hook.Program())
	return err == nil && state.Mode != "" && state.ProgramID == id, err
}

// programID returns the ID of a loaded program. The caller holds running.
func (d *Datapath) programID(name string) (ebpf.ProgramID, error) {
	p := d.programs[name]
	if p == nil {
		return 0, fmt.Errorf("no program %s is loaded", name)
	}
	info, err := p.Info()
	if err != nil {
		return 0, fmt.Errorf("read program %s: %w", name, err)
	}
	id, _ := info.ID()
	return id, nil
}

// Attachments lists the places of all programs of ours that are attached.
func (d *Datapath) Attachments() ([]attach.Place, error) {
	places, err := knownPlaces(d.opts)
	if err != nil {
		return nil, err
	}
	var out []attach.Place
	for _, p := range places {
		state, err := d.opts.attacher().Attached(p.Ifindex, p.Hook)
		if err != nil {
			return nil, err
		}
		if state.Mode != "" {
			out = append(out, p)
		}
	}
	return out, nil
}

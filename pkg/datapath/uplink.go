package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

// AttachUplink puts the programs onto an interface that leads out of the node.
// Where they are already, nothing changes; where they are not the newest they are
// replaced.
func (d *Datapath) AttachUplink(ifindex int) error {
	for _, hook := range attach.UplinkHooks() {
		if err := d.Attach(ifindex, hook); err != nil {
			return err
		}
	}
	return nil
}

// DetachUplink takes the programs, and a qdisc that we made, off an interface
// again. Nothing there, or no such interface, is no error.
func (d *Datapath) DetachUplink(ifindex int) error {
	d.changes.Lock()
	defer d.changes.Unlock()
	var errs []error
	for _, hook := range attach.UplinkHooks() {
		errs = append(errs, d.opts.attacher().Detach(ifindex, hook))
	}
	errs = append(errs, d.qdiscs.remove(ifindex))
	return errors.Join(errs...)
}

// Attach makes this build's program the one on the hook of the interface, such as
// attach.FromPod on a pod's host-side veth whose link pin somebody removed.
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

// Detach takes our program off the hook of an interface, and the qdisc with the
// last one if we made it.
func (d *Datapath) Detach(ifindex int, hook attach.Hook) error {
	d.changes.Lock()
	defer d.changes.Unlock()
	return errors.Join(d.opts.attacher().Detach(ifindex, hook), d.qdiscs.remove(ifindex))
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

// programID is for a caller that holds running.
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

// Attachment is a program of ours on an interface.
type Attachment struct {
	Ifindex int
	Hook    attach.Hook
}

// Attachments lists every program of ours that is attached.
func (d *Datapath) Attachments() ([]Attachment, error) {
	places, err := knownPlaces(d.opts)
	if err != nil {
		return nil, err
	}
	var out []Attachment
	for _, p := range places {
		state, err := d.opts.attacher().Attached(p.ifindex, p.hook)
		if err != nil {
			return nil, err
		}
		if state.Mode != "" {
			out = append(out, Attachment{p.ifindex, p.hook})
		}
	}
	return out, nil
}

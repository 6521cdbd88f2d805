package datapath

import (
	"errors"
	"fmt"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

// AttachUplink attaches the programs of these hooks to an interface that leads out of the node: attach.UplinkHooks, or attach.BareHooks.
// Programs of other builds are replaced.
func (d *Datapath) AttachUplink(ifindex int, hooks []attach.Hook) error {
	return d.attachAll(ifindex, hooks)
}

// AttachTunnel attaches the programs to the tunnel device, as AttachUplink does to an uplink.
func (d *Datapath) AttachTunnel(ifindex int) error { return d.attachAll(ifindex, attach.TunnelHooks()) }

func (d *Datapath) attachAll(ifindex int, hooks []attach.Hook) error {
	for _, hook := range hooks {
		if err := d.Attach(ifindex, hook); err != nil {
			return err
		}
	}
	return nil
}

// DetachUplink removes the programs, and a qdisc that we created, from an interface.
// It is no error if there is nothing, or no such interface.
func (d *Datapath) DetachUplink(ifindex int) error {
	return d.detachAll(ifindex, slices.Concat(attach.UplinkHooks(), attach.BareHooks()))
}

// DetachBridge removes the programs from a bridge, as DetachUplink does from an uplink.
func (d *Datapath) DetachBridge(ifindex int) error { return d.detachAll(ifindex, attach.PodHooks()) }

func (d *Datapath) detachAll(ifindex int, hooks []attach.Hook) error {
	d.changes.Lock()
	defer d.changes.Unlock()
	var errs []error
	for _, hook := range slices.Backward(hooks) {
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
	if hook == attach.FromPod {
		defer d.pods.Forget(ifindex)
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
	id, loaded := d.ids[hook.Program()]
	if !loaded {
		return false, fmt.Errorf("no program %s is loaded", hook.Program())
	}
	return state.Mode != "" && state.ProgramID == id, nil
}

// AttachedPods returns the interfaces that have this build's program for pods, by a tcx link. One of which that can't be
// found out counts as if it had, and comes with an error; without a result it is so of all.
func (d *Datapath) AttachedPods() (map[int]bool, error) {
	d.running.RLock()
	defer d.running.RUnlock()
	found, err := d.pods.Look()
	if found == nil {
		return nil, err
	}
	attached := make(map[int]bool, len(found))
	for index, program := range found {
		attached[index] = program == d.ids[attach.FromPod.Program()] || program == attach.Unread
	}
	return attached, err
}

// RemovalIsTold reports whether the kernel notifies of a program's removal. It does of clsact's filters and qdiscs, but a
// tcx link can be removed unnoticed.
func (d *Datapath) RemovalIsTold() bool { return !d.tcx }

// Attachments lists the places with these hooks at which programs of ours are attached.
func (d *Datapath) Attachments(hooks ...attach.Hook) ([]attach.Place, error) {
	places, err := knownPlaces(d.opts)
	if err != nil {
		return nil, err
	}
	var out []attach.Place
	for _, p := range places {
		if !slices.Contains(hooks, p.Hook) {
			continue
		}
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

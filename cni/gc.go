package cni

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
)

// gc is GC: whatever of this network is not in the runtime's list is released, and what killed calls have left.
func (c *call) gc() error {
	valid, err := c.validAttachments()
	if err != nil {
		return err
	}
	given, err := c.collectOwn(valid)
	if err != nil {
		return err // the ipam plugin must not free an address whose link could not be deleted
	}
	ctx, cancel := context.WithTimeout(context.Background(), c.delegateWait)
	defer cancel()
	err = c.giveAllBack(ctx, given)
	if ctx.Err() != nil || !c.delegatesVerb("1.1.0") {
		return err
	}
	if e := c.ask(ctx, c.listed(), c.delegateArgs("GC")); e != nil && !unsupported(e) {
		return errors.Join(err, fmt.Errorf("ipam plugin %s: %w", c.ipamType, e))
	}
	return err
}

// giveAllBack has ipam plugins free what they gave released endpoints. One that hangs is waited for once, not once for
// each pod: what is not asked for now, the next GC finds in the state files. In no order, so that one pod for which the
// plugin always hangs is not always in front of the others.
func (c *call) giveAllBack(ctx context.Context, given map[endpoint.ID]giver) error {
	asked, failed := 0, 0
	var first error
	for id, by := range given {
		args := &invoke.Args{Command: "DEL", ContainerID: id.ContainerID, IfName: id.IfName, Path: c.args.Path}
		err := c.giveBack(ctx, by, id, args)
		asked++
		if err == nil {
			continue
		}
		c.log.Debug("addresses not given back, the next GC tries again", "ipam", by.ipam,
			"container", id.ContainerID, "ifname", id.IfName, "error", err)
		failed++
		if first == nil || ctx.Err() != nil {
			first = err
		}
		if ctx.Err() != nil || errors.Is(err, bpffs.ErrLocked) {
			break
		}
	}
	if first == nil {
		return nil
	}
	return fmt.Errorf("addresses of %d of %d pods not given back, %d of them not asked for; the next GC tries again: %w",
		failed+len(given)-asked, len(given), len(given)-asked, first)
}

// collectOwn holds the lock exclusively: an ADD under way has not written its state yet and looks like a killed one.
// It returns the released attachments whose addresses an ipam plugin gave.
func (c *call) collectOwn(valid map[endpoint.ID]bool) (map[endpoint.ID]giver, error) {
	ctx, cancel := context.WithTimeout(context.Background(), c.wait)
	defer cancel()
	started := time.Now()
	l, err := bpffs.Exclusive(ctx, c.stateDir, c.verb)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // no state directory: nothing was ever added
	}
	if err != nil {
		return nil, err
	}
	defer l.Release()
	c.log.Info("no work on a pod is under way", "waited", time.Since(started))

	store, err := ipam.Open(c.stateDir, c.network, ipam.Options{Quarantine: c.quarantine})
	if err != nil {
		return nil, err
	}
	keep := make(map[ipam.Owner]bool, len(valid))
	for id := range valid {
		keep[ipam.Owner(id)] = true
	}
	given := map[endpoint.ID]giver{}
	stale, err := c.stale(store, valid)
	errs := []error{err}
	for _, id := range stale {
		by, err := c.collectOne(ctx, id)
		if err != nil {
			errs, keep[ipam.Owner(id)] = append(errs, err), true // its link may still have the address
			continue
		}
		c.log.Info("stale endpoint released", "container", id.ContainerID, "ifname", id.IfName)
		if !by.hostLocal() {
			given[id] = by
		}
	}
	_, err = store.ReleaseExcept(ctx, keep) // owners that no endpoint can have, and files without one
	return given, errors.Join(append(errs, err, c.releaser().Sweep(valid))...)
}

// collectOne releases a stale endpoint.
func (c *call) collectOne(ctx context.Context, id endpoint.ID) (giver, error) {
	by, err := c.findGiver(id)
	if err != nil {
		return by, err
	}
	r := c.releaser()
	r.KeepState = !by.hostLocal()
	return by, r.Release(ctx, id, c.network)
}

// stale are the attachments of this network that are not valid: those with a state file, and those of killed ADDs
// that have got no further than their address.
func (c *call) stale(store *ipam.Store, valid map[endpoint.ID]bool) ([]endpoint.ID, error) {
	var found []endpoint.ID
	seen := map[endpoint.ID]bool{}
	note := func(id endpoint.ID) {
		if !valid[id] && !seen[id] && id.Validate() == nil {
			seen[id] = true
			found = append(found, id)
		}
	}
	list, broken := endpoint.List(c.stateDir)
	if broken != nil {
		c.log.Warn("state of some endpoints is unreadable", "error", broken)
	}
	for _, e := range list {
		if e.Network == c.network {
			note(e.ID)
		}
	}
	entries, err := store.Entries()
	for _, e := range entries {
		if e.State == ipam.Used {
			note(endpoint.ID(e.Owner))
		}
	}
	return found, err
}

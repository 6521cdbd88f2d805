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

// gc is GC: it releases every attachment of this network that is not in the runtime's list, and what killed calls have
// left.
func (c *call) gc() error {
	valid, err := c.validAttachments()
	if err != nil {
		return err
	}
	given, err := c.releaseStale(valid)
	if err != nil {
		return err // the ipam plugin must not free an address whose link could not be deleted
	}
	ctx, cancel := context.WithTimeout(context.Background(), c.delegateWait)
	defer cancel()
	err = c.returnAll(ctx, given)
	if ctx.Err() != nil || !c.delegatesVerb("1.1.0") {
		return err
	}
	if e := c.ask(ctx, c.configured(), c.delegateArgs("GC")); e != nil && !unsupported(e) {
		return errors.Join(err, fmt.Errorf("ipam plugin %s: %w", c.ipamType, e))
	}
	return err
}

// returnAll has ipam plugins free the addresses of released endpoints. The time limit is for all together, not for each,
// in case a plugin hangs: the next GC finds the others by their state files. The order is random, so that one pod for
// which the plugin always hangs does not always come first.
func (c *call) returnAll(ctx context.Context, given map[endpoint.ID]ipamSource) error {
	asked, failed := 0, 0
	var first error
	for id, src := range given {
		args := &invoke.Args{Command: "DEL", ContainerID: id.ContainerID, IfName: id.IfName, Path: c.args.Path}
		err := c.returnAddresses(ctx, src, id, args)
		asked++
		if err == nil {
			continue
		}
		c.log.Debug("addresses not given back, the next GC tries again", "ipam", src.ipam,
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
	return fmt.Errorf("addresses of %d of %d pods not given back, for %d of them the ipam plugin was not called; the next GC tries again: %w",
		failed+len(given)-asked, len(given), len(given)-asked, first)
}

// releaseStale releases the attachments that are not valid, and returns those whose addresses an ipam plugin has
// allocated. It holds the lock exclusively: an ADD under way has no state file yet and looks like a killed one.
func (c *call) releaseStale(valid map[endpoint.ID]bool) (map[endpoint.ID]ipamSource, error) {
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
	given := map[endpoint.ID]ipamSource{}
	stale, err := c.stale(store, valid)
	errs := []error{err}
	for _, id := range stale {
		src, err := c.releaseOne(ctx, id)
		if err != nil {
			errs, keep[ipam.Owner(id)] = append(errs, err), true // its link may still have the address
			continue
		}
		c.log.Info("stale endpoint released", "container", id.ContainerID, "ifname", id.IfName)
		if !src.hostLocal() {
			given[id] = src
		}
	}
	_, err = store.ReleaseExcept(ctx, keep) // owners that are no valid attachment, and files without an owner
	return given, errors.Join(append(errs, err, c.releaser().RemoveOrphans(valid))...)
}

// releaseOne releases one stale attachment.
func (c *call) releaseOne(ctx context.Context, id endpoint.ID) (ipamSource, error) {
	src, err := c.findSource(id)
	if err != nil {
		return src, err
	}
	r := c.releaser()
	r.KeepState = !src.hostLocal()
	return src, r.Release(ctx, id, c.network)
}

// stale returns the attachments of this network that are not valid, of those with a state file, and of those that have
// only addresses, from killed ADDs.
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

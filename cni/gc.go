package cni

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
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
	stale, err := c.findStale(valid)
	given, failed := c.releaseStale(stale)
	if err := errors.Join(err, failed); err != nil {
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
		err := c.returnAddresses(ctx, src, id, c.delArgs(id))
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

// findStale returns the attachments of this network that are not valid, with the time of their ADD, zero if that is not
// known, and removes what belongs to none. It holds the lock exclusively: an ADD under way has no state file yet and looks
// like a killed one.
func (c *call) findStale(valid map[endpoint.ID]bool) (map[endpoint.ID]time.Time, error) {
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
	stale, err := c.stale(store, valid)
	attachments, owners := maps.Clone(valid), map[ipam.Owner]bool{}
	for id := range stale {
		attachments[id] = true
	}
	for id := range attachments {
		owners[ipam.Owner(id)] = true
	}
	_, freed := store.ReleaseExcept(ctx, owners) // files without an owner, and owners that can't be an attachment
	return stale, errors.Join(err, freed, c.releaser().RemoveOrphans(attachments))
}

// releaseStale releases stale attachments, one by one, so that ADDs come in between, and returns those whose addresses an
// ipam plugin has allocated.
func (c *call) releaseStale(stale map[endpoint.ID]time.Time) (map[endpoint.ID]ipamSource, error) {
	ctx, cancel := context.WithTimeout(context.Background(), c.delegateWait) // for portmap, with all of them
	defer cancel()
	given := map[endpoint.ID]ipamSource{}
	var errs []error
	for id, created := range stale {
		src, released, err := c.releaseOne(ctx, id, created)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if !released {
			continue
		}
		c.log.Info("stale endpoint released", "container", id.ContainerID, "ifname", id.IfName)
		if !src.hostLocal() {
			given[id] = src
		}
	}
	return given, errors.Join(errs...)
}

// releaseOne releases a stale attachment, unless a later ADD has made it anew.
func (c *call) releaseOne(ctx context.Context, id endpoint.ID, created time.Time) (src ipamSource, released bool, err error) {
	portmap := false
	err = c.sharedFor(id, func(ctx context.Context) (err error) {
		if e, err := endpoint.Read(c.stateDir, id); err == nil && !e.Created.Equal(created) {
			return nil
		}
		if src, err = c.findSource(id); err != nil {
			return err
		}
		portmap = c.hadPortmap(id)
		r := c.releaser()
		r.KeepState = !src.hostLocal()
		released = true
		return r.ReleaseLocked(ctx, id, c.network)
	})
	if err == nil && portmap {
		c.removePortmap(ctx, c.delArgs(id))
	}
	return src, released, err
}

// delArgs are those of DEL for another plugin, on an attachment whose pod is gone.
func (c *call) delArgs(id endpoint.ID) *invoke.Args {
	return &invoke.Args{Command: "DEL", ContainerID: id.ContainerID, IfName: id.IfName, Path: c.args.Path}
}

// stale returns the attachments of this network that are not valid, of those with a state file, and of those that have
// only addresses, from killed ADDs.
func (c *call) stale(store *ipam.Store, valid map[endpoint.ID]bool) (map[endpoint.ID]time.Time, error) {
	found := map[endpoint.ID]time.Time{}
	list, broken := endpoint.List(c.stateDir)
	if broken != nil {
		c.log.Warn("state of some endpoints is unreadable", "error", broken)
	}
	entries, err := store.Entries()
	for _, e := range entries {
		if id := endpoint.ID(e.Owner); e.State == ipam.Used && !valid[id] && id.Validate() == nil {
			found[id] = time.Time{}
		}
	}
	for _, e := range list {
		if e.Network == c.network && !valid[e.ID] {
			found[e.ID] = e.Created
		}
	}
	return found, err
}

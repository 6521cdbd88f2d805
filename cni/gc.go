package cni

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/ebpf-cni/ebpf-cni/cni/ipam"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// gc is GC: whatever of this network is not in the runtime's list is released, and what killed calls have left.
func (p *plugin) gc(args *skel.CmdArgs) error {
	c, done, err := p.begin("GC", args)
	if err != nil {
		return err
	}
	defer done()
	return c.finish(c.collect())
}

func (c *call) collect() error {
	valid, err := c.validAttachments()
	if err != nil {
		return err
	}
	err = c.collectOwn(valid)
	if c.delegatesVerb("1.1.0") {
		if gcErr := c.delegate("GC", c.raw); gcErr != nil && !unsupported(gcErr) {
			err = errors.Join(err, fmt.Errorf("ipam plugin %s: %w", c.ipamType, gcErr))
		}
	}
	return err
}

// collectOwn holds the lock exclusively: an ADD under way has not written its state yet and looks like a killed one.
func (c *call) collectOwn(valid map[endpoint.ID]bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), c.wait)
	defer cancel()
	started := time.Now()
	l, err := bpffs.Exclusive(ctx, c.stateDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // no state directory: nothing was ever added
	}
	if err != nil {
		return err
	}
	defer l.Release()
	c.log.Info("no work on a pod is under way", "waited", time.Since(started))

	store, err := ipam.Open(c.stateDir, c.network, ipam.Options{Quarantine: c.quarantine})
	if err != nil {
		return err
	}
	stale, err := c.stale(store, valid)
	errs := []error{err}
	for _, id := range stale {
		err := c.releaser().Release(ctx, id, c.network)
		if err == nil {
			c.log.Info("stale endpoint released", "container", id.ContainerID, "ifname", id.IfName)
		}
		errs = append(errs, err)
	}
	keep := make(map[ipam.Owner]bool, len(valid))
	for id := range valid {
		keep[ipam.Owner(id)] = true
	}
	_, err = store.ReleaseExcept(ctx, keep) // owners that no endpoint can have, and files without one
	return errors.Join(append(errs, err, c.releaser().Sweep(valid))...)
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

package cni

import (
	"context"
	"errors"

	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// del is DEL. It removes whatever is left, even if namespace, link, state file or maps are gone.
func (c *call) del() error {
	var src ipamSource
	portmap := false
	release := func(ctx context.Context) (err error) {
		if src, err = c.findSource(c.id); err != nil {
			return err
		}
		portmap = c.hadPortmap(c.id) && !c.portmap // else the runtime has called it
		r := c.releaser()
		r.KeepState = !src.hostLocal()
		return r.ReleaseLocked(ctx, c.id, c.network)
	}
	err := c.shared(release)
	if errors.Is(err, endpoint.ErrNoDataplane) || errors.Is(err, errNoRoom) {
		// There is no lock file, and none can be made: nobody else can hold the lock.
		err = release(context.Background())
	}
	if err == nil && portmap {
		ctx, cancel := context.WithTimeout(context.Background(), c.delegateWait)
		defer cancel()
		c.removePortmap(ctx, c.delegateArgs("DEL"))
	}
	if err == nil && !src.hostLocal() {
		err = c.returnAddresses(context.Background(), src, c.id, c.delegateArgs("DEL")) // last: only a free address may be allocated again
	}
	if err == nil {
		c.log.Info("endpoint released")
	}
	return err
}

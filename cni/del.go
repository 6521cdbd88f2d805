package cni

import (
	"context"
	"errors"

	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// del is DEL. It needs no namespace, no link, no state and no maps: whatever of them is left is taken away.
func (c *call) del() error {
	var by giver
	release := func(ctx context.Context) (err error) {
		if by, err = c.findGiver(c.id); err != nil {
			return err
		}
		r := c.releaser()
		r.KeepState = !by.hostLocal()
		return r.ReleaseLocked(ctx, c.id, c.network)
	}
	err := c.shared(release)
	if errors.Is(err, endpoint.ErrNoDataplane) || errors.Is(err, errNoRoom) {
		// No lock file, and none can be made: there is nobody to exclude.
		err = release(context.Background())
	}
	if err == nil && !by.hostLocal() {
		err = c.giveBack(context.Background(), by, c.id, c.delegateArgs("DEL")) // last, so that the address is nobody's before it is given on
	}
	if err == nil {
		c.log.Info("endpoint released")
	}
	return err
}

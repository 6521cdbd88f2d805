package cni

import (
	"context"
	"errors"

	"github.com/containernetworking/cni/pkg/skel"
)

// del is DEL. It needs no namespace, no link, no state and no maps: whatever of them is left is taken away.
func (p *plugin) del(args *skel.CmdArgs) error {
	c, done, err := p.begin("DEL", args)
	if err != nil {
		return err
	}
	defer done()
	return c.finish(c.delEndpoint())
}

func (c *call) delEndpoint() error {
	release := func(ctx context.Context) error { return c.releaser().ReleaseLocked(ctx, c.id, c.network) }
	err := c.shared(release)
	if errors.Is(err, errNoDataplane) {
		// No state directory, so no lock and nobody to exclude: only links and pins can be left.
		err = release(context.Background())
	}
	if err == nil && !c.hostLocal() {
		err = c.delegateDel() // last, so that the address is nobody's before it is given on
	}
	if err == nil {
		c.log.Info("endpoint released")
	}
	return err
}

package agent

import (
	"context"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

const (
	// sweeping is how often what belongs to no endpoint is searched for.
	sweeping = time.Minute
	// sweepWait bounds the wait for work on pods to end, which keeps new work waiting.
	sweepWait = 3 * time.Second
)

// sweepOrphans searches for what no endpoint explains, now and then until ctx ends:
// links of killed ADDs, entries and pins of links that are gone.
func (a *agent) sweepOrphans(ctx context.Context) error {
	failing := false
	for {
		err, again := a.sweep(ctx), sweeping
		if err != nil {
			again = resync
		}
		if err != nil && !failing && ctx.Err() == nil {
			a.log.Warn("what killed plugins may have left can't be searched for, trying again", "error", err)
		}
		failing = err != nil
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(again):
		}
	}
}

func (a *agent) sweep(ctx context.Context) error {
	wait, cancel := context.WithTimeout(ctx, sweepWait)
	defer cancel()
	node, err := bpffs.Exclusive(wait, a.cfg.State, "sweep")
	if err != nil {
		return err
	}
	defer node.Release()
	return a.cfg.releaser().RemoveOrphans(nil)
}

package agent

import (
	"context"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

const (
	// leftoversInterval is how often what belongs to no endpoint is searched for.
	leftoversInterval = time.Minute
	// leftoversWait bounds the wait for work on pods to end, which keeps new work waiting.
	leftoversWait = 3 * time.Second
)

// releaseLeftovers takes away what no endpoint explains, now and then until ctx ends:
// links of killed ADDs, entries and pins of links that are gone.
func (a *agent) releaseLeftovers(ctx context.Context) error {
	failing := false
	for {
		err, again := a.releaseLeftoversOnce(ctx), leftoversInterval
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

func (a *agent) releaseLeftoversOnce(ctx context.Context) error {
	wait, cancel := context.WithTimeout(ctx, leftoversWait)
	defer cancel()
	node, err := bpffs.Exclusive(wait, a.cfg.State, "sweep")
	if err != nil {
		return err
	}
	defer node.Release()
	return a.cfg.releaser().RemoveOrphans(nil)
}

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
	return repeat(ctx, func() (time.Duration, error) {
		wait, cancel := context.WithTimeout(ctx, leftoversWait)
		defer cancel()
		node, err := bpffs.Exclusive(wait, a.cfg.State, "sweep")
		if err != nil {
			return resync, err
		}
		defer node.Release()
		if err := a.cfg.releaser().RemoveOrphans(nil); err != nil {
			return resync, err
		}
		return leftoversInterval, nil
	}, func(err error) {
		a.log.Warn("what killed plugins may have left can't be searched for, trying again", "error", err)
	})
}

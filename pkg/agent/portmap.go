package agent

import (
	"context"
	"fmt"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/install"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
)

// sweepPortmap removes, until ctx ends, the rules of pods that are gone and were made while the portmap plugin was chained: its DEL is
// called no more. While it is chained by --portmap=on, that is its own matter. It sweeps soon after pods have gone, and now and then.
func (a *agent) sweepPortmap(ctx context.Context) error {
	if a.cfg.Portmap {
		return nil
	}
	rules := netfilter.Portmap{Network: install.Network, Living: a.cfg.containers}
	defer rules.Close()
	var (
		pods  stamp // of the directory of state files, at the newest sweep
		swept time.Time
	)
	return repeat(ctx, func() time.Duration {
		is, now := stampOf(endpoint.Dir(a.cfg.State)), time.Now()
		if is == pods && now.Sub(swept) < leftoversInterval {
			return releaseDelay
		}
		err := a.sweepPortmapNow(&rules, now)
		if err != nil || !rules.Late() { // what is wrong with a table is not over because it has not been looked at
			a.complaints.note("endpoints/portmap's rules", err)
		}
		if !rules.Late() {
			pods, swept = is, now
		}
		return releaseDelay
	})
}

func (a *agent) sweepPortmapNow(rules *netfilter.Portmap, now time.Time) error {
	c, err := a.dp.Maps.Config.Get(config.Key{})
	if err != nil {
		return err
	}
	rules.Pods = c.PodCIDRs() // other networks' containers may have addresses of a wider range
	gone, err := rules.Sweep(now)
	if len(gone) > 0 {
		a.log.Info("rules of portmap's removed: their pods are gone", "containers", gone)
	}
	if err != nil {
		return fmt.Errorf("host ports of pods that are gone stay translated: %w", err)
	}
	return nil
}

// containers are those of this node's pods.
func (d Directories) containers() (map[string]bool, error) {
	list, err := endpoint.List(d.State)
	if err != nil {
		return nil, err
	}
	are := make(map[string]bool, len(list))
	for _, e := range list {
		are[e.ContainerID] = true
	}
	return are, nil
}

package agent

import (
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// noteStep notes whether the maps hold what is known of Services.
func (c *serviceController) noteStep(in bool) {
	if in {
		c.status.set(func(f *figures) { f.inStep = time.Now() })
	}
}

// await has changes waited for until the maps hold them, however often that is tried.
func (c *serviceController) await(changes []service.Change) {
	room := service.MostChanges - len(c.unsynced)
	c.unsynced = append(c.unsynced, changes[:min(len(changes), room)]...)
}

// noteSynced notes how long the changes took that the maps hold by now.
func (c *serviceController) noteSynced() {
	if c.failed {
		return
	}
	c.status.servicesSynced(c.unsynced)
	c.unsynced = nil
}

package agent

import (
	"fmt"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
)

// bridgeController owns the table of ours by which connections that netfilter translates live on when the rules go that have translated
// them: where the programs serve Services nobody needs those rules any more, and whoever removes them asks nobody. It stands for as long
// as there are such connections, since with it netfilter looks at every packet of the node's.
type bridgeController struct {
	*node
	mode  *modeController
	table netfilter.Bridge
	// stands says that the table is there as this agent wants it, gone that it is not.
	stands, gone bool
}

// follow writes the table as soon as netfilter is seen to translate, and removes it when it does not, by rules or connections.
func (c *bridgeController) follow(*state) error {
	switch found := c.mode.found; {
	case found == netfilter.Nothing && c.gone:
		return nil
	case found == netfilter.Nothing:
		return c.remove()
	case found == netfilter.Translates && c.cfg.servesServices() || c.stands:
		return c.ensure()
	}
	c.gone = false // a cleanup of kube-proxy's rules may make it
	return nil
}

func (c *bridgeController) ensure() error {
	wrote, err := c.table.Ensure(time.Now())
	switch {
	case err != nil:
		return fmt.Errorf("connections that netfilter translates would end with the last of its rules: %w", err)
	case wrote && c.stands:
		c.log.Warn("table by which connections that netfilter translates outlive its rules restored", "table", netfilter.BridgeName)
	case wrote:
		c.log.Info("connections that netfilter translates outlive its rules", "table", netfilter.BridgeName)
	}
	c.stands, c.gone = true, false
	return nil
}

// remove removes also what an earlier agent has left.
func (c *bridgeController) remove() error {
	if err := netfilter.RemoveBridge(); err != nil {
		return err
	}
	if c.stands {
		c.log.Info("no connection is left that netfilter translates", "table removed", netfilter.BridgeName)
	}
	c.stands, c.gone = false, true
	return nil
}

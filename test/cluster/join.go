package cluster

import (
	"context"
	"fmt"
	"os"
	"slices"
)

// AddNode has one more node join, and waits until the API has its Node, with a podCIDR. To be ready it takes an agent.
func (c *Cluster) AddNode(ctx context.Context) (*Machine, error) {
	m, err := c.makeNode(ctx)
	if err != nil {
		return nil, err
	}
	if err := c.startNode(ctx, m); err != nil {
		return nil, err
	}
	return m, c.waitRegistered(ctx)
}

// RemoveNode takes the last node's machine away, with its disk. The Node is for Kubernetes to forget.
func (c *Cluster) RemoveNode(ctx context.Context, m *Machine) error {
	last := len(c.Nodes) - 1
	if last == 0 || c.Nodes[last] != m {
		return fmt.Errorf("remove %s: only the last node can be, and not the first", m.Name)
	}
	if err := m.end(ctx); err != nil {
		return err
	}
	if err := removeCgroups(c.ID, m.Name); err != nil {
		return err
	}
	c.Nodes = slices.Delete(c.Nodes, last, last+1)
	if err := os.RemoveAll(m.dir); err != nil {
		return fmt.Errorf("remove %s: %w", m.Name, err)
	}
	return c.waitUnplugged(ctx, m)
}

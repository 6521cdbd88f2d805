package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"syscall"

	core "k8s.io/api/core/v1"
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

// AddFamily gives a cluster one more family while it runs. The world, Services and the nodes that join from then on have it. A Node
// that is there keeps what it has: its podCIDRs can't be changed.
func (c *Cluster) AddFamily(ctx context.Context, family core.IPFamily) error {
	c.Options.Families = append(slices.Clone(c.Options.Families), family)
	old := c.Fabric.Addrs
	c.Fabric.Addrs = c.addresses(worldNumber)
	fabric, err := c.Fabric.netlink()
	if err != nil {
		return err
	}
	defer fabric.Close()
	for link, addrs := range map[string][]netip.Prefix{switchName: onLink(c.Fabric.Addrs), "lo": c.worldPrefixes()} {
		if err := configure(fabric, link, addrs[len(old):]); err != nil {
			return err
		}
	}
	if err := c.Fabric.Stop(ctx, "world", syscall.SIGTERM); err != nil {
		return err
	}
	if err := c.startWorld(ctx); err != nil {
		return err
	}
	if err := c.Nodes[0].Stop(ctx, "kube-apiserver", syscall.SIGTERM); err != nil {
		return err
	}
	if err := c.StartAPIServer(ctx); err != nil {
		return err
	}
	return c.RestartClients(ctx)
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

package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/vishvananda/netlink"
)

// Reboot takes a node's power and turns it on again: processes, namespaces and everything in memory are gone, what is on
// disk is there. It does not wait for Kubernetes. The first node can't be: the control plane is on it.
func (c *Cluster) Reboot(ctx context.Context, m *Machine) error {
	if m == c.Nodes[0] {
		return fmt.Errorf("reboot %s: etcd is there, in memory", m.Name)
	}
	if err := c.powerCycle(ctx, m); err != nil {
		return err
	}
	if err := c.StartContainerd(ctx, m); err != nil {
		return err
	}
	if err := c.StartKubelet(ctx, m); err != nil {
		return err
	}
	return c.StartKubeProxy(ctx, m)
}

// powerCycle is Reboot without the programs.
func (c *Cluster) powerCycle(ctx context.Context, m *Machine) error {
	if err := m.end(ctx); err != nil {
		return err
	}
	if err := removeCgroups(c.ID, m.Name); err != nil {
		return err
	}
	if err := os.Remove(m.path(socketFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("reboot %s: %w", m.Name, err)
	}
	if err := c.waitUnplugged(ctx, m); err != nil {
		return err
	}
	if err := c.boot(ctx, m); err != nil {
		return err
	}
	return c.plug(m)
}

// waitUnplugged waits until the kernel has taken the machine's link away, which it does in its own time.
func (c *Cluster) waitUnplugged(ctx context.Context, m *Machine) error {
	fabric, err := c.Fabric.netlink()
	if err != nil {
		return err
	}
	defer fabric.Close()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return poll(ctx, 10*time.Millisecond, m.Name+" is off the fabric", func(context.Context) error {
		_, err := fabric.LinkByName(m.Name)
		if _, gone := errors.AsType[netlink.LinkNotFoundError](err); gone {
			return nil
		}
		return errors.Join(err, errors.New("its link is there"))
	})
}

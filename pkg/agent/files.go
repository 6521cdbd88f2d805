package agent

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/install"
	"github.com/ebpf-cni/ebpf-cni/pkg/lease"
)

// fileController owns the files by which the runtime finds us: the plugin, and the
// network configuration list, which says that this node carries pods.
type fileController struct {
	*node
	list    stamp // of the list as written
	portmap struct {
		stamp stamp // of the portmap plugin at the newest look
		found *install.Chained
	}
	plugin [2]stamp // of what is installed, and of what it was installed from
	subnet stamp    // of the subnet file as written
}

// stamp identifies a file's content without reading it. The time is that of the
// last change of any kind: nobody can set it.
type stamp struct {
	inode   uint64
	size    int64
	changed unix.Timespec
}

// stampOf returns the zero value for a file that is not there.
func stampOf(path string) stamp {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return stamp{}
	}
	return stamp{st.Ino, st.Size, st.Ctim}
}

func (c *fileController) listPath() string    { return filepath.Join(c.cfg.Conf, install.Conflist) }
func (c *fileController) portmapPath() string { return filepath.Join(c.cfg.Bin, install.Portmap) }
func (c *fileController) pluginPath() string  { return filepath.Join(c.cfg.Bin, install.Plugin) }

// installPlugin puts the plugin in its place.
func (c *fileController) installPlugin(*state) error {
	if c.cfg.Bin == "" || c.plugin[0] != (stamp{}) && c.plugin == c.pluginStamps() {
		return nil
	}
	wrote, err := install.WritePlugin(c.cfg.Plugin, c.cfg.Bin)
	if err != nil {
		return err
	}
	if wrote && c.plugin[0] != (stamp{}) {
		c.status.repaired(repairedPlugin, 1)
	}
	c.plugin = c.pluginStamps()
	if wrote {
		c.log.Info("plugin installed", "dir", c.cfg.Bin)
	}
	return nil
}

func (c *fileController) pluginStamps() [2]stamp {
	return [2]stamp{stampOf(c.pluginPath()), stampOf(c.cfg.Plugin)}
}

// publish writes what says that this node carries pods: first for container engines, then for the runtime.
func (c *fileController) publish(s *state) error {
	if err := c.writeSubnet(s); err != nil {
		return err
	}
	return c.writeList(s)
}

// mtu is that of new pods, in bytes of IP packet.
func (c *fileController) mtu(s *state) int { return cmp.Or(c.cfg.MTU, s.plan.MTU) }

// writeSubnet writes the subnet file, where the subnet comes of a registry.
func (c *fileController) writeSubnet(s *state) error {
	if c.registry == nil {
		return nil
	}
	e := lease.Environment{MTU: c.mtu(s), Masquerade: c.cfg.Masquerade[wire.IPv4]}
	for f, r := range c.network.Ranges {
		e.Networks[f] = r.Prefix
	}
	for _, p := range s.plan.PodCIDRs {
		e.Subnets[wire.FamilyOf(p.Addr())] = p
	}
	path := c.cfg.Registry.SubnetFile
	wrote, err := e.Write(path)
	if wrote {
		c.log.Info("subnet file written", "file", path, "subnet", listOf(s.plan.PodCIDRs), "mtu", e.MTU)
	}
	c.subnet = stampOf(path)
	return err
}

// writeList writes the list, by which the runtime knows that this node carries pods. There is none where bridges have the podCIDR,
// since their containers get its addresses by somebody else.
func (c *fileController) writeList(s *state) error {
	if len(c.cfg.Bridges) > 0 {
		_, err := install.RemoveList(c.cfg.Conf)
		c.list = stampOf(c.listPath())
		return err
	}
	l := install.List{
		BPFFS: string(c.cfg.BPFFS), StateDir: c.cfg.State, MTU: c.mtu(s), Attach: string(c.cfg.Attach),
		Quarantine: c.cfg.Quarantine, LogLevel: c.cfg.LogLevel,
		PodCIDRs: s.plan.PodCIDRs,
	}
	var err error
	if l.Portmap, err = c.findPortmap(); err != nil {
		return err
	}
	wrote, err := install.WriteList(c.cfg.Conf, l)
	if wrote {
		c.log.Info("network configuration list written", "file", c.listPath(), "podCIDR", listOf(l.PodCIDRs), "mtu", l.MTU, "portmap", l.Portmap != nil)
	}
	c.list = stampOf(c.listPath())
	return err
}

// findPortmap returns the plugin that is to be chained for host ports, if any.
func (c *fileController) findPortmap() (*install.Chained, error) {
	if !c.cfg.Portmap {
		return nil, nil
	}
	if now := stampOf(c.portmapPath()); now == (stamp{}) || now != c.portmap.stamp {
		found, err := install.FindPortmap(c.cfg.Bin)
		if err != nil {
			return nil, err
		}
		c.portmap.stamp, c.portmap.found = now, found
	}
	if c.portmap.found == nil {
		return nil, fmt.Errorf("--portmap on: there is no %s; put it there, or leave host ports to our own programs: --portmap off", c.portmapPath())
	}
	return c.portmap.found, nil
}

// inspect writes the list again when somebody else has changed it, or when the plugin
// for host ports is another, which may speak other versions. Our own plugin that is
// gone is for the next pass.
func (c *fileController) inspect(s *state) error {
	if c.cfg.Bin != "" {
		if _, err := os.Stat(c.pluginPath()); errors.Is(err, os.ErrNotExist) {
			s.lookAgain(0)
		}
	}
	if !c.status.isReady() {
		return nil
	}
	if c.registry != nil && stampOf(c.cfg.Registry.SubnetFile) != c.subnet {
		c.log.Warn("subnet file was changed or removed, writing it again", "file", c.cfg.Registry.SubnetFile)
		if err := c.writeSubnet(s); err != nil {
			return err
		}
	}
	changed := stampOf(c.listPath()) != c.list
	if changed {
		c.log.Warn("network configuration list was changed or removed, writing it again", "file", c.listPath())
	}
	if changed || c.cfg.Portmap && stampOf(c.portmapPath()) != c.portmap.stamp {
		if err := c.writeList(s); err != nil {
			return err
		}
	}
	if changed {
		c.status.repaired(repairedList, 1)
	}
	return nil
}

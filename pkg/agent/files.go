package agent

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/install"
	"github.com/ebpf-cni/ebpf-cni/pkg/lease"
)

// fileController owns the files by which the runtime finds us: the plugin, and the
// network configuration list, which says that this node carries pods.
type fileController struct {
	*node
	list    stamp              // of the list as written
	chained map[string]chained // other plugins of the list, by type, at the newest look
	plugin  [2]stamp           // of what is installed, and of what it was installed from
	subnet  stamp              // of the subnet file as written
}

// chained is another plugin of the list.
type chained struct {
	stamp  stamp  // of its executable
	newest string // version of the CNI specification that it supports; empty: the executable is not there
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

func (c *fileController) listPath() string   { return filepath.Join(c.cfg.Conf, install.Conflist) }
func (c *fileController) pluginPath() string { return filepath.Join(c.cfg.Bin, install.Plugin) }

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
	_, err := c.writeList(s)
	return err
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

// writeList writes the list, by which the runtime knows that this node carries pods, and keeps what other programs have put into it. There
// is none where bridges have the podCIDR, since a container engine gives their containers its addresses. It reports whether it wrote one.
func (c *fileController) writeList(s *state) (wrote bool, err error) {
	defer func() { c.list = stampOf(c.listPath()) }()
	if len(c.cfg.Bridges) > 0 {
		_, err := install.RemoveList(c.cfg.Conf)
		return false, err
	}
	l := install.List{
		BPFFS: string(c.cfg.BPFFS), StateDir: c.cfg.State, MTU: c.mtu(s), Attach: string(c.cfg.Attach),
		Quarantine: c.cfg.Quarantine, LogLevel: c.cfg.LogLevel,
		PodCIDRs: s.plan.PodCIDRs, Portmap: c.cfg.Portmap, Chain: c.cfg.Chain,
	}
	if l.Others, err = install.ReadOthers(c.cfg.Conf); err != nil {
		return false, err
	}
	if l.Newest, err = c.examine(l); err != nil {
		return false, err
	}
	wrote, err = install.WriteList(c.cfg.Conf, l)
	if wrote {
		c.log.Info("network configuration list written", "file", c.listPath(), "podCIDR", listOf(l.PodCIDRs), "mtu", l.MTU, "chained", l.Chained())
	}
	return wrote, err
}

// examine looks at the executables of the plugins chained after ours. It returns the newest version of the CNI specification that they
// all support.
func (c *fileController) examine(l install.List) (newest string, err error) {
	known := c.chained
	c.chained = map[string]chained{}
	var missing []string
	for _, plugin := range l.Chained() {
		if c.cfg.Bin == "" {
			continue
		}
		path := filepath.Join(c.cfg.Bin, plugin)
		is, now := known[plugin], stampOf(path)
		if now == (stamp{}) || now != is.stamp {
			is.stamp = now
			if is.newest, err = install.NewestVersion(c.cfg.Bin, plugin); err != nil {
				return "", err
			}
		}
		c.chained[plugin] = is
		newest = install.Older(newest, is.newest)
		if is.newest == "" && plugin == install.Portmap && l.Portmap {
			return "", fmt.Errorf("--portmap on: there is no %s; put it there, or leave host ports to our own programs: --portmap off", path)
		}
		if is.newest == "" {
			missing = append(missing, plugin)
		}
	}
	if missing == nil {
		c.complaints.note("files/chained plugins", nil)
		return newest, nil
	}
	c.complaints.note("files/chained plugins", fmt.Errorf("%s names plugins that are not in %s: %s; unless the runtime has another directory with them, it starts no pod: "+
		"install them, or take them out of the list", c.listPath(), c.cfg.Bin, strings.Join(missing, ", ")))
	return newest, nil
}

// chainChanged reports whether another executable stands for a chained plugin, which may support other versions.
func (c *fileController) chainChanged() bool {
	for plugin, was := range c.chained {
		if stampOf(filepath.Join(c.cfg.Bin, plugin)) != was.stamp {
			return true
		}
	}
	return false
}

// inspect writes the list again when our part of it has changed, or when a chained plugin is another one. Our own plugin that is gone is for
// the next pass.
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
	if !changed && !c.chainChanged() {
		return nil
	}
	wrote, err := c.writeList(s)
	if changed && wrote {
		c.log.Warn("our part of the network configuration list was changed or removed, written again", "file", c.listPath())
		c.status.repaired(repairedList, 1)
	}
	return err
}

package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
	"github.com/ebpf-cni/ebpf-cni/pkg/install"
	"github.com/ebpf-cni/ebpf-cni/pkg/lease"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
)

// Cleanup removes everything that agent and plugin ever made on the node, live
// pods' links included. It refuses while an agent runs. What can't be removed is
// reported when all the rest is; a second call goes on from there.
func Cleanup(ctx context.Context, d Directories, log *slog.Logger) error {
	made, err := makeAll(d.State) // for the locks
	if err != nil {
		return fmt.Errorf("make the state directory: %w", err)
	}
	var held locks
	defer held.release()
	if err := held.take(d); err != nil {
		return err
	}
	host, err := device.Open()
	if err != nil {
		return err
	}
	defer host.Close()
	c := &cleaner{Directories: d, log: log, host: host}
	if c.record, err = readRecord(d.State); err != nil {
		return err
	}
	c.record.Made = append(c.record.Made, made...)
	return c.run(ctx)
}

// cleanupWait is how long work on pods is waited for: longer than it takes on one.
const cleanupWait = 30 * time.Second

type cleaner struct {
	Directories
	log    *slog.Logger
	host   *device.Handle
	record *record
	pods   []netip.Prefix // the addresses of those that were released
}

// run goes from what makes new things to what remembers the old ones.
func (c *cleaner) run(ctx context.Context) error {
	for _, step := range []struct {
		what string
		do   func(context.Context) error
	}{
		{"network configuration list", func(context.Context) error { _, err := install.RemoveList(c.Conf); return err }},
		{"endpoints", c.releaseEndpoints},
		{"tunnel", c.removeTunnel}, // without its programs the stack would take what anybody sends there
		{"dataplane", func(ctx context.Context) error {
			return datapath.Remove(ctx, datapath.Options{Dir: c.BPFFS, StateDir: c.State, Log: c.log})
		}},
		// A plugin that was at work until then finds no pins any more.
		{"late endpoints", c.releaseEndpoints},
		{"host ports", c.sweepPortmap},
		{"connections of netfilter's", func(context.Context) error { return netfilter.RemoveBridge() }},
		{"accepts in forward chains", func(context.Context) error { return netfilter.RemoveForward() }},
		{"routes", c.deleteRoutes},
		{"plugin", c.removePlugin},
		{"sysctls", func(context.Context) error {
			return newSysctls(&node{cfg: Config{Directories: c.Directories}, log: c.log}, c.record).restore()
		}},
		{"files", c.removeFiles},
	} {
		if err := step.do(ctx); err != nil {
			return fmt.Errorf("clean up %s: %w", step.what, err)
		}
		c.log.Debug("cleaned up", "what", step.what)
	}
	c.log.Info("everything of ours is removed from this node; net.ipv4.ip_forward is left as it is")
	return nil
}

// releaseEndpoints takes every pod's attachment away, then what killed plugins
// have left. Nobody can come in between: the node's lock is ours throughout.
func (c *cleaner) releaseEndpoints(ctx context.Context) error {
	wait, cancel := context.WithTimeout(ctx, cleanupWait)
	defer cancel()
	lock, err := bpffs.Exclusive(wait, c.State, "cleanup")
	if err != nil {
		return err
	}
	defer lock.Release()
	list, err := endpoint.List(c.State)
	if err != nil {
		c.log.Warn("some endpoints' state can't be read; their links are found by name", "error", err)
	}
	r := endpoint.Releaser{StateDir: c.State, Pins: c.BPFFS, Log: c.log}
	var errs []error
	for _, e := range list {
		for _, a := range e.Addresses {
			c.pods = append(c.pods, netip.PrefixFrom(a, a.BitLen()))
		}
		errs = append(errs, r.Release(ctx, e.ID, e.Network))
	}
	// Without their files all links of ours are orphans.
	errs = append(errs, os.RemoveAll(endpoint.Dir(c.State)), r.RemoveOrphans(nil), c.deleteLinks())
	return errors.Join(errs...)
}

// deleteLinks deletes pods' links that are in no file and no map.
func (c *cleaner) deleteLinks() error {
	links, err := c.host.Links()
	if err != nil {
		return err
	}
	var errs []error
	for _, l := range links {
		if l.Kind == "veth" && endpoint.IsHostLinkName(l.Name) {
			errs = append(errs, c.host.DeleteLink(l.Index))
		}
	}
	return errors.Join(errs...)
}

// sweepPortmap removes what the portmap plugin made for pods of ours. It is no fault of ours where that can't be done.
func (c *cleaner) sweepPortmap(context.Context) error {
	rules := netfilter.Portmap{Network: install.Network, Pods: c.pods, Living: c.containers}
	defer rules.Close()
	if _, err := rules.Sweep(time.Now()); err != nil {
		c.log.Warn("rules that the portmap plugin made for pods are left", "error", err)
	}
	return nil
}

func (c *cleaner) deleteRoutes(context.Context) error {
	routes, err := c.host.OwnRoutes()
	if err != nil {
		return err
	}
	var errs []error
	for _, r := range routes {
		errs = append(errs, c.host.DeleteRoute(r))
	}
	return errors.Join(errs...)
}

// removeTunnel leaves a device of somebody else's that has its name.
func (c *cleaner) removeTunnel(context.Context) error {
	err := netfilter.RemoveTable()
	link, findErr := c.host.LinkByName(tunnelName)
	switch {
	case errors.Is(findErr, device.ErrNotFound):
	case findErr != nil:
		err = errors.Join(err, findErr)
	case link.VXLAN.FlowBased:
		err = errors.Join(err, c.host.DeleteLink(link.Index))
	}
	return err
}

func (c *cleaner) removePlugin(context.Context) error {
	if c.Bin == "" {
		return nil
	}
	_, err := install.RemovePlugin(c.Plugin, c.Bin)
	return err
}

// removeFiles empties the state directory of what is ours, and removes the
// directories that were not there before us.
func (c *cleaner) removeFiles(context.Context) error {
	names := append(bpffs.LockFiles(), datapath.LoadLock, bpffs.AgentLock, kubeProxyLock, "qdiscs", "qdiscs.next",
		recordName, recordName+".next", endpoint.HostPortsFile, endpoint.IgnoredFile, endpoint.GuardFile, endpoint.GuardFile+".next", observe.ClusterFile, observe.ClusterFile+".next", apiServersName, apiServersName+".next", lease.KeptFile, lease.KeptFile+".next")
	errs := []error{os.RemoveAll(endpoint.Dir(c.State)), os.RemoveAll(ipam.Dir(c.State))}
	for _, name := range names {
		errs = append(errs, os.RemoveAll(filepath.Join(c.State, name)))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	// The deepest first; one that others use by now is not empty and stays.
	dirs := slices.Clone(c.record.Made)
	slices.SortFunc(dirs, func(a, b string) int { return len(b) - len(a) })
	for _, dir := range dirs {
		if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			c.log.Info("directory left", "dir", dir, "error", err)
		}
	}
	return nil
}

package agent

import (
	"context"
	"os"
	"path/filepath"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/lease"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
)

// machineIDFile has what tells this machine from all others.
const machineIDFile = "/etc/machine-id"

// reachRegistry reads what flannel's registry says of the network, before there is anything in the kernel that goes by it. It waits
// for that, unless an earlier agent has read it.
func (a *agent) reachRegistry(ctx context.Context) (err error) {
	if a.cfg.Registry == nil {
		return nil
	}
	if a.registry, err = lease.Open(*a.cfg.Registry, a.log); err != nil {
		return err
	}
	if a.network, err = a.registry.Network(ctx, a.cfg.State, a.waits()); err != nil {
		return err
	}
	b := a.network.Backend
	a.cfg.VXLANPort, a.cfg.VXLANVNI = b.Port, b.VNI
	switch {
	case b.Kind == lease.HostGW:
		a.cfg.RoutingMode = RouteDirect
	case b.Direct:
		a.cfg.RoutingMode = RouteAuto
	default:
		a.cfg.RoutingMode = RouteVXLAN
	}
	if b.MTU != 0 && a.cfg.MTU == 0 {
		a.cfg.MTU = plan.InnerMTU(uint32(b.MTU), wire.IPv4)
	}
	if b.Absent {
		a.log.Warn("the network names no backend, by which flannel means udp: it is served by vxlan", "port", b.Port, "vni", b.VNI)
	}
	a.log.Info("network of the registry", "network", a.network.Ranges[wire.IPv4].Prefix.String(), "backend", string(b.Kind), "routing-mode", string(a.cfg.RoutingMode))
	return nil
}

// waits returns what says, once in the log and all the time to people, for what a start waits.
func (a *agent) waits() func(error) {
	said := ""
	return func(err error) {
		if text := err.Error(); text != said {
			said = text
			a.log.Warn("the network's configuration is not to be had", "error", err)
		}
		a.published.NotReady = "the agent is starting: " + err.Error()
		if _, err := writeCluster(filepath.Join(a.cfg.State, observe.ClusterFile), a.published); err != nil { // no packet and no pod depends on it
			a.log.Warn("the file for ebpfctl can't be written", "error", err)
		}
	}
}

// followLeases is what delivers the nodes of the registry, and holds this node's lease.
func (a *agent) followLeases(l *loop) (func(context.Context, func(source.Update)) error, error) {
	if err := l.tunnel.recall(); err != nil { // the lease has the tunnel's address
		return nil, err
	}
	id, err := os.ReadFile(machineIDFile)
	if err != nil {
		a.log.Warn("this machine is told from others by the node's name alone", "error", err)
	}
	self := lease.Self{
		Node: a.cfg.Node, MachineID: strings.TrimSpace(string(id)), MAC: wire.MAC(l.tunnel.mac), Standing: l.standing, Heard: a.noteHeard,
	}
	return func(ctx context.Context, put func(source.Update)) error {
		return a.registry.Run(ctx, a.network, self, put)
	}, nil
}

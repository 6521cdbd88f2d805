package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
)

// errAnew ends a run that is to be followed by another one.
var errAnew = errors.New("the agent has to start anew")

// anew calls run, and again each time it has ended with errAnew.
func anew(log *slog.Logger, run func() error) error {
	for {
		if err := run(); !errors.Is(err, errAnew) {
			return err
		}
		log.Info("a pod has asked for a host port: starting anew with the programs that serve them")
	}
}

// frontends says whether the programs translate to backends: of Services, or of host ports. Those cost each packet something, so
// that a node which has neither does without. It stays the same from a start to the end.
func (n *node) frontends() bool { return n.cfg.Services || n.hostPortsAsked }

// nodeConfig is for programs that work beside netfilter, which may translate so much.
func (n *node) nodeConfig(level netfilter.Level) config.NodeConfig {
	return n.cfg.nodeConfig(level, n.frontends())
}

// retryForgone is when programs that serve host ports are tried once more after they could not be loaded: memory may have been short.
const retryForgone = 10 * time.Minute

// awaitHostPorts ends the run when a pod asks for this node's first host port. To turn on what serves them takes what a start
// does anyway: other programs, more of them, and maps of another size.
func (a *agent) awaitHostPorts(ctx context.Context) error {
	if a.frontends() {
		return nil
	}
	interval := inspectInterval
	if a.hostPortsForgone {
		interval = retryForgone
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			if endpoint.HostPortsAsked(a.cfg.State) {
				return errAnew
			}
		}
	}
}

// withoutCgroup loads the dataplane; where it serves host ports alone also without the programs on the cgroup, if they are what is
// wrong: a pod that asks for a host port must not take the others' agent away.
func (a *agent) withoutCgroup(
	ctx context.Context, o datapath.Options, load func(context.Context, datapath.Options) (*datapath.Datapath, error),
) (*datapath.Datapath, error) {
	const lack = "this node's own processes do not reach host ports, others do"
	dp, err := load(ctx, o)
	switch {
	case a.cfg.Services || !a.hostPortsAsked:
	case o.Cgroup == "":
		a.complaints.warn("services/cgroup", fmt.Errorf("%s: %w", lack, a.cfg.NoCgroup))
	case err != nil && ctx.Err() == nil:
		cgroup := o.Cgroup
		o.Cgroup = ""
		without, failed := load(ctx, o)
		if failed != nil {
			return nil, err
		}
		a.cfg.Cgroup = ""
		a.complaints.warn("services/cgroup", fmt.Errorf("%s: programs on their cgroup (--cgroup %s) can't be loaded: %w", lack, cgroup, err))
		return without, nil
	}
	return dp, err
}

// forgoHostPorts says whether programs that serve no host ports are to be loaded, because those that do can't be: a pod that asks for
// a host port must not take the node's agent away.
func (a *agent) forgoHostPorts(ctx context.Context, err error) bool {
	if a.cfg.Services || !a.hostPortsAsked || ctx.Err() != nil {
		return false
	}
	a.hostPortsAsked, a.hostPortsForgone = false, true
	a.complaints.warn("services/host ports", fmt.Errorf("host ports are not served: programs that serve them can't be loaded: %w", err))
	return true
}

// hostPorts are those of this node's pods as the map has them, and the numbers of their ports.
type hostPorts struct {
	entries map[hostports.Key]hostports.Value
	numbers ports
}

// lookAtHostPorts reads the map, which the plugin writes. While pods come or go, the pass that this calls for does.
func (l *loop) lookAtHostPorts(s *state) error {
	if l.endpoints.changed() {
		return nil
	}
	entries, err := l.dp.Maps.HostPorts.Content()
	if err != nil || maps.Equal(entries, s.hostPorts.entries) {
		return err
	}
	s.hostPorts = hostPorts{entries: entries}
	for k := range entries {
		s.hostPorts.numbers.add(k.Port.Host(), k.Port.Host())
	}
	l.services.locate(s, l.cfg.Node)
	l.services.hostPortsChanged()
	return nil
}

// hostPortsChanged has sockets looked at that are connected to the pods of those that are gone.
func (c *serviceController) hostPortsChanged() {
	if c != nil {
		poke(c.ceased)
	}
}

// inTheWay are the host ports as NodePorts meet them, and who has them. Of several, on single addresses, one is enough.
func (s *state) inTheWay() map[services.Key]string {
	pods := make(map[uint32]string, len(s.view.endpoints))
	for _, e := range s.view.endpoints {
		pods[uint32(e.HostIndex)] = e.Pod
	}
	all := make(map[services.Key]string, len(s.hostPorts.entries))
	for _, k := range slices.SortedFunc(maps.Keys(s.hostPorts.entries), hostports.Key.Compare) {
		key := services.NodePort(wire.FamilyOf(k.Host()), k.Port, k.Proto)
		if _, there := all[key]; !there {
			all[key] = fmt.Sprintf("host port %v of pod %s", k, cmp.Or(pods[s.hostPorts.entries[k].Ifindex], "(without a name)"))
		}
	}
	return all
}

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
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
		log.Info("a pod has asked for a host port, or what serves them is tried once more: starting anew with those programs")
	}
}

// frontends says whether the programs translate to backends: of Services, or of host ports. Those cost each packet something, so
// that a node which has neither does without. It stays the same from a start to the end.
func (n *node) frontends() bool { return n.cfg.servesServices() || n.hostPortsAsked }

// nodeConfig is for programs of that mode.
func (n *node) nodeConfig(m programMode) config.NodeConfig {
	return n.cfg.nodeConfig(m, n.frontends())
}

// retryForgone is when programs that translate to backends are tried once more after they could not be loaded: memory may have been short.
const retryForgone = 10 * time.Minute

// awaitHostPorts ends the run when a pod asks for this node's first host port. To turn on what serves them takes what a start
// does anyway: other programs, more of them, and maps of another size. So it does if they could not be loaded.
func (a *agent) awaitHostPorts(ctx context.Context) error {
	if a.frontends() {
		return nil
	}
	interval := inspectInterval
	if a.forgone {
		interval = retryForgone
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			if a.forgone || endpoint.HostPortsAsked(a.cfg.State) {
				return errAnew
			}
		}
	}
}

// translated are what the programs translate to backends for.
func (n *node) translated() string {
	if n.cfg.servesServices() {
		return "Services and host ports"
	}
	return "host ports"
}

// spared says that nobody insists on what the programs translate to backends for: a pod that asks for a host port must not take the
// others' agent away, nor must a default where kube-proxy's rules serve.
func (n *node) spared() bool {
	switch n.cfg.Services {
	case ServicesAuto:
		return n.rulesServe()
	case ServicesOn:
		return false
	}
	return n.hostPortsAsked
}

// rulesServe says whether rules of kube-proxy's stand. Where that is not known, they do not.
func (n *node) rulesServe() bool {
	if n.cfg.KubeProxy != KubeProxyAuto {
		return n.cfg.KubeProxy == KubeProxyOn
	}
	var rules netfilter.KubeProxy
	defer rules.Close()
	standing, _ := rules.Look(time.Now())
	return standing != netfilter.Standing{}
}

// withoutCgroup loads the dataplane, if nobody insists also without the programs on the cgroup, if they are what is wrong.
func (a *agent) withoutCgroup(
	ctx context.Context, o datapath.Options, load func(context.Context, datapath.Options) (*datapath.Datapath, error),
) (*datapath.Datapath, error) {
	lack := fmt.Sprintf("this node's own processes do not reach %s by the programs, others do", a.translated())
	dp, err := load(ctx, o)
	switch {
	case !a.frontends():
	case o.Cgroup == "":
		a.complaints.warn("services/cgroup", fmt.Errorf("%s: %w", lack, a.cfg.NoCgroup))
	case err != nil && ctx.Err() == nil && a.spared():
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

// forgo says whether programs that translate to no backends are to be loaded, because those that do can't be, and nobody insists.
func (a *agent) forgo(ctx context.Context, err error) bool {
	if !a.frontends() || ctx.Err() != nil || !a.spared() {
		return false
	}
	a.complaints.warn("services/programs", fmt.Errorf("%s are not served by the programs, which can't be loaded for that: %w", a.translated(), err))
	a.hostPortsAsked, a.cfg.Services, a.forgone = false, ServicesOff, true
	return true
}

// hostPorts are those of this node's pods as the map has them, and the numbers of their ports.
type hostPorts struct {
	entries map[hostports.Key]hostports.Value
	numbers ports
	room    int // how many entries the map has room for
}

// lookAtHostPorts reads the map, which the plugin writes. While pods come or go, the pass that this calls for does.
func (l *loop) lookAtHostPorts(s *state) error {
	s.guarded = l.services.read().guarded
	if l.endpoints.changed() {
		return nil
	}
	entries, err := l.dp.Maps.HostPorts.Content()
	if err != nil || maps.Equal(entries, s.hostPorts.entries) {
		return err
	}
	s.hostPorts = hostPorts{entries: entries, room: int(l.dp.Maps.HostPorts.MaxEntries())}
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

// inTheWay are the host ports as NodePorts meet them, and who has them: of all addresses, or of one that others ask (own). Of several,
// on single addresses, one is enough.
func (s *state) inTheWay(own []netip.Addr) map[services.Key]string {
	pods := s.podsByLink()
	all := make(map[services.Key]string, len(s.hostPorts.entries))
	for _, k := range slices.SortedFunc(maps.Keys(s.hostPorts.entries), hostports.Key.Compare) {
		if host := k.Host(); !host.IsUnspecified() && !slices.Contains(own, host) {
			continue
		}
		key := services.NodePort(wire.FamilyOf(k.Host()), k.Port, k.Proto)
		if _, there := all[key]; !there {
			all[key] = fmt.Sprintf("host port %v of pod %s", k, cmp.Or(pods[s.hostPorts.entries[k].Ifindex], "(without a name)"))
		}
	}
	return all
}

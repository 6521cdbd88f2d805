// Package agent is the node daemon: it loads the dataplane, keeps maps, routes
// and files in step with the cluster's Nodes, repairs what somebody removes, and
// reports its health. It owns every lifetime; what should be is decided in
// pkg/plan, and how things get into the kernel in pkg/datapath and pkg/device.
//
// One goroutine, the loop, takes the steps of small controllers, each of which
// owns one thing and remembers what it needs for that: clusterController,
// uplinkController, endpointController, modeController, fileController, sysctls.
//
//	err := agent.Run(ctx, agent.Config{Node: "n1", NodesFile: "nodes.yaml", ...})
//
// The end of ctx, or of the process, leaves the dataplane running and untouched.
package agent

import (
	"bytes"
	"cmp"
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

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/install"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
)

// ErrRunning is returned (wrapped) when an agent runs on the same directories.
var ErrRunning = errors.New("an agent is running")

// Run is the agent from start to end. It returns nil when ctx ends.
func Run(ctx context.Context, cfg Config) error {
	quiet := newQuiet(cfg.Log.Handler())
	cfg.Log = slog.New(quiet)
	return anew(cfg.Log, func() error { return runOnce(ctx, cfg, quiet) })
}

// runOnce is the agent from one start to its end, or until it has to start anew.
func runOnce(ctx context.Context, cfg Config, quiet *quiet) error {
	n := &node{cfg: cfg, log: cfg.Log, status: newStatus(cfg.Log), complaints: newComplaints(cfg.Log)}
	n.status.notify = cfg.NotifySocket
	a := &agent{node: n, mode: newMode(n), quiet: quiet}
	ctx = bpffs.WithWaits(ctx, n.status.waited)
	err := bounded(ctx, stopGrace, func() error {
		defer a.close()
		if err := a.start(ctx); err != nil {
			a.reportFailure(ctx, err)
			return err
		}
		return a.work(ctx)
	})
	switch {
	case errors.Is(err, errCutOff):
		cfg.Log.Info("stopping in the middle of something; the dataplane goes on")
		return nil
	case ctx.Err() != nil && (err == nil || errors.Is(err, ctx.Err()) || errors.Is(err, errAnew) || errors.Is(err, bpffs.ErrLocked)):
		cfg.Log.Info("stopping; the dataplane goes on")
		return nil
	}
	return err
}

// stopGrace is how long the end waits for work that can't be interrupted.
const stopGrace = 300 * time.Millisecond

var errCutOff = errors.New("cut off")

// bounded works until the end of ctx, and for no longer than d after it. The
// verifier's work can't be interrupted, nor a look at a large node, a sweep of a
// large table, or a read that hangs. To be cut off there, with errCutOff, is like
// being killed, which the next start puts right; the process ends soon after.
func bounded(ctx context.Context, d time.Duration, work func() error) error {
	ended := make(chan error, 1)
	go func() { ended <- work() }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-ended:
		return err
	case <-time.After(d):
		return errCutOff
	}
}

type agent struct {
	*node
	locks     locks
	sysctls   *sysctls
	mode      *modeController
	quiet     *quiet
	servers   []server
	published observe.Cluster // what the file for ebpfctl contains
}

func (a *agent) close() {
	a.scrapes.end()
	if a.dp != nil {
		_ = a.dp.Close()
	}
	if a.host != nil {
		a.host.Close()
	}
	a.sysctls.close()
	a.mode.watch.Close()
	a.mode.marks.Close()
	if a.registry != nil {
		a.registry.Close()
	}
	a.locks.release()
}

// start does what can fail for good: afterwards things are tried until they work.
func (a *agent) start(ctx context.Context) (err error) {
	a.log.Info("starting", "version", a.cfg.Version, "node", a.cfg.Node, "pid", os.Getpid())
	klog.SetSlogLogger(slog.New(clientGo{a.log.Handler()}))
	made, err := makeAll(a.cfg.State)
	if err != nil {
		return fmt.Errorf("make the state directory: %w", err)
	}
	if err := a.locks.take(a.cfg.Directories); err != nil {
		removeMade(a.cfg.State, made)
		return err
	}
	a.hostPortsAsked = endpoint.HostPortsAsked(a.cfg.State)
	record, err := openRecord(a.cfg.Directories, made)
	if err != nil {
		return err
	}
	if err := a.reachAPI(); err != nil {
		return err
	}
	if a.published, err = publishStarting(a.cfg.State); err != nil { // no packet and no pod depends on it
		a.log.Warn("the file for ebpfctl can't be written", "error", err)
	}
	if err := a.setLeftoverAside(); err != nil {
		return err
	}
	if err := a.reachRegistry(ctx); err != nil {
		return err
	}
	if a.host, err = device.Open(); err != nil {
		return err
	}
	a.sysctls = newSysctls(a.node, record)
	if err := a.load(ctx); err != nil {
		return err
	}
	if err := a.locks.takePins(a.cfg.BPFFS); err != nil { // it may not have been there before
		return err
	}
	a.servers = a.serversFor(serveMetrics(newRegistry(a.node)))
	return nil
}

// load starts the dataplane in the mode that this node needs.
func (a *agent) load(ctx context.Context) (err error) {
	// What is wrong here may be put right any moment, and is nothing that other programs could do without.
	if err := a.cfg.BPFFS.Prepare(); err != nil {
		return err
	}
	a.mode.begin(time.Now())
	a.mode.beginOn(a.host)
	shares, err := a.sysctls.portShares()
	if err != nil {
		return err
	}
	a.mode.beginWith(shares.snatGiven)
	o := datapath.Options{
		Dir: a.cfg.BPFFS, StateDir: a.cfg.State, Attach: a.cfg.Attach, Cgroup: a.cfg.Cgroup, NodeConfig: a.nodeConfig(a.mode.programMode),
		SnatEntries: a.cfg.SnatEntries, Log: a.log, Bare: a.mode.bare,
	}
	a.dp, err = a.withoutCgroup(ctx, o, datapath.Load)
	if err != nil && a.forgo(ctx, err) {
		o.NodeConfig = a.nodeConfig(a.mode.programMode)
		a.dp, err = datapath.Load(ctx, o)
	}
	return explainMode(err, a.mode.level)
}

// setLeftoverAside takes away a list from before the reboot: it says that this node can
// carry pods, which is not true until the dataplane is loaded.
func (a *agent) setLeftoverAside() error {
	_, err := os.Stat(a.cfg.BPFFS.Map(config.Name))
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	there, err := install.SetAside(a.cfg.Conf)
	if there {
		a.log.Info("network configuration list from before the reboot set aside", "dir", a.cfg.Conf)
	}
	return err
}

// work runs everything that goes on side by side.
func (a *agent) work(ctx context.Context) error {
	standing, err := readStanding(a.dp.Maps)
	if err != nil {
		return err
	}
	// The maps don't say in which order the podCIDRs are, by which new pods get their addresses. A list that is not there has no order.
	list, _ := os.ReadFile(filepath.Join(a.cfg.Conf, install.Conflist))
	orderAs(list, standing.Own)
	a.mode.report()
	l := newLoop(a.node, a.mode, a.sysctls, standing, a.published)
	defer l.tunnel.closeTables()
	defer l.bridge.table.Close()
	defer l.handover.close()
	if err := l.handover.begin(); err != nil {
		return err
	}
	nodes := newLatest()
	g, ctx := errgroup.WithContext(ctx)
	if a.api != nil {
		g.Go(func() error { return a.api.Run(ctx) })
	}
	file, err := a.startServices(ctx, g, l)
	if err != nil {
		return err
	}
	follow, err := a.nodesOf(l, file)
	if err != nil {
		return err
	}
	g.Go(func() error { return follow(ctx, nodes.put) })
	g.Go(func() error { return a.followNetwork(ctx, "network", device.Watch, l.alarm) })
	g.Go(func() error { return a.followNetwork(ctx, "IPsec policies", device.WatchPolicies, l.alarm) })
	g.Go(func() error { return l.run(ctx, nodes) })
	g.Go(func() error { return a.mode.run(ctx) })
	g.Go(func() error { return a.quiet.run(ctx) })
	g.Go(func() error { return a.releaseLeftovers(ctx) })
	g.Go(func() error { return a.sweepPortmap(ctx) })
	g.Go(func() error { return a.sweepFlows(ctx) })
	g.Go(func() error { return l.containers.run(ctx) })
	g.Go(func() error { return a.awaitHostPorts(ctx) })
	for _, s := range a.servers {
		g.Go(func() error { return a.serve(ctx, s) })
	}
	return g.Wait()
}

// nodesOf is what delivers Nodes; others is what else a file of them is read for.
func (a *agent) nodesOf(l *loop, others *source.FileServices) (func(context.Context, func(source.Update)) error, error) {
	switch {
	case a.registry != nil:
		return a.followLeases(l)
	case a.cfg.NodesFile != "":
		return source.File{Path: a.cfg.NodesFile, Log: a.log, Services: others, Heard: a.noteHeard}.Run, nil
	}
	return a.followAPI, nil
}

// followAPI passes on what the API says, and says there whether this node carries pods.
func (a *agent) followAPI(ctx context.Context, put func(source.Update)) error {
	c, err := a.newCondition()
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return c.run(ctx) })
	g.Go(func() error {
		return source.API{Config: a.cfg.API, Log: a.log, Self: a.cfg.Node, Observed: c.seen.Store, Heard: a.noteHeard}.Run(ctx, put)
	})
	return g.Wait()
}

// noteHeard notes that the source of Nodes or Services has just been heard of.
func (a *agent) noteHeard() { a.status.set(func(f *figures) { f.heard = time.Now() }) }

// followNetwork has the loop hear what changes in the network. A subscription that breaks is made anew, and then says
// that events may have been lost. While it can't be, the loop looks again and again.
func (a *agent) followNetwork(
	ctx context.Context, what string, watch func(context.Context, func(device.Event)) error, loop *alarm,
) error {
	return repeat(ctx, func() time.Duration {
		if err := watch(ctx, loop.hear); ctx.Err() == nil {
			a.log.Warn("changes can't be followed, trying again", "about", what, "error", err)
			loop.hear(device.Event{Kind: device.Lost})
		}
		return retry
	})
}

// sweepFlows removes flows that have ended, until ctx ends.
func (a *agent) sweepFlows(ctx context.Context) error {
	return repeat(ctx, func() time.Duration {
		result, again, err := a.dp.Sweep()
		if n := result.Snat.Deleted + result.Conntrack.Deleted; n > 0 {
			a.log.Debug("flows swept", "snat", result.Snat.Deleted, "conntrack", result.Conntrack.Deleted)
		}
		a.complaints.note("flows/sweep", err)
		return again
	})
}

const (
	// leftoversInterval is how often what belongs to no endpoint is searched for.
	leftoversInterval = time.Minute
	// leftoversWait bounds the wait for work on pods to end, which keeps new work waiting.
	leftoversWait = 3 * time.Second
)

// releaseLeftovers takes away what no endpoint explains, now and then until ctx ends:
// links of killed ADDs, entries and pins of links that are gone.
func (a *agent) releaseLeftovers(ctx context.Context) error {
	return repeat(ctx, func() time.Duration {
		err := a.releaseLeftoversNow(ctx)
		if ctx.Err() == nil {
			a.complaints.note("endpoints/leftovers of killed plugins", err)
		}
		if err != nil {
			return resync
		}
		return leftoversInterval
	})
}

func (a *agent) releaseLeftoversNow(ctx context.Context) error {
	wait, cancel := context.WithTimeout(ctx, leftoversWait)
	defer cancel()
	node, err := bpffs.Exclusive(wait, a.cfg.State, "sweep")
	if err != nil {
		return err
	}
	defer node.Release()
	return a.cfg.releaser().RemoveOrphans(nil)
}

// repeat calls do until ctx ends, each time after the pause that the call before has returned.
func repeat(ctx context.Context, do func() (again time.Duration)) error {
	for {
		again := do()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(again):
		}
	}
}

// orderAs puts podCIDRs into the order in which a network configuration list has them.
func orderAs(list []byte, own []netip.Prefix) {
	slices.SortStableFunc(own, func(p, q netip.Prefix) int {
		return cmp.Compare(bytes.Index(list, []byte(p.String())), bytes.Index(list, []byte(q.String())))
	})
}

// readStanding reads from the maps what an earlier agent has left in force.
func readStanding(m *datapath.Maps) (plan.Standing, error) {
	s := plan.Standing{Claims: map[netip.Prefix]netip.Addr{}, Aliases: map[netip.Addr]netip.Addr{}, MACs: map[netip.Addr]wire.MAC{}}
	c, err := m.Config.Get(config.Key{})
	if err != nil {
		return s, err
	}
	s.Own = c.PodCIDRs()
	s.NodeIPs = c.NodeAddresses.All()
	for e, err := range m.Destinations.All() {
		if err != nil {
			return s, err
		}
		whole := e.Value.Kind == destinations.PodCIDR && e.Value.Flags&destinations.Part == 0
		if via := e.Value.Node.Netip(); whole && via.IsValid() {
			s.Claims[e.Key.Netip()] = via
			if alias := e.Value.Alias.Netip(); alias.IsValid() {
				s.Aliases[via] = alias
			}
			if e.Value.MAC != (wire.MAC{}) {
				s.MACs[via] = e.Value.MAC
			}
		}
	}
	return s, nil
}

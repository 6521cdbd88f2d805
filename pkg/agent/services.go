package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/guard"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
)

// serviceController owns the maps of Services. It has a goroutine of its own: endpoints change more often than Nodes, and packets
// to them wait for no look at the network. The loop tells it where it is (surround), and learns from it what else depends on
// Services (read).
type serviceController struct {
	*node
	maps    serviceMaps
	events  *serviceEvents
	checks  *healthChecks
	updates chan service.Update
	around  chan whereabouts
	// news is readable while there is a report that the loop has not heard of, ceased while backends of UDP have ceased to serve.
	news, ceased chan struct{}

	// Owned by the loop's goroutine.
	told whereabouts

	// Owned by the goroutine of run.
	model *service.Model
	state *service.State
	// placed says that the whereabouts are known, failed that a write was not carried out.
	placed, failed bool
	guarded        guarded
	unsynced       []service.Change // which the maps do not hold yet
	compared       time.Time        // when the maps were last read
	reported       map[service.Problem]bool

	mu  sync.Mutex
	now serviceReport
}

// serviceReport is what others ask of Services. Its lists are never changed once they are set.
type serviceReport struct {
	// filled says that the maps hold all Services, as this agent or an earlier one has known them; fault is why not, or why
	// not those of now, and unwritten why not what they should of those that are known.
	filled           bool
	fault, unwritten error
	// cidrs are the ranges of their addresses that the API names.
	cidrs            []netip.Prefix
	services         int
	used, capacities service.Capacities
	problems         []service.Problem
	// nodePorts are in use by the programs: the kernel must give them to no socket that asks for any.
	nodePorts *ports
	// guarded are ports of this node's own processes that no pod gets as a host port, beside those of guard.Fixed and health checks.
	guarded guard.Ports
}

// newServices reads what an earlier agent has left. Where others serve Services there is none, and this node's own addresses are
// all that is written.
func newServices(n *node) (*serviceController, error) {
	c := &serviceController{
		node: n, maps: serviceMaps{Maps: n.dp.Maps}, model: service.NewModel(), reported: map[service.Problem]bool{}, compared: time.Now(),
		updates: make(chan service.Update), around: make(chan whereabouts, 1), news: make(chan struct{}, 1),
		ceased: make(chan struct{}, 1), guarded: guarded{servers: n.standingServers()},
	}
	content, err := c.maps.readAll()
	if err != nil {
		return nil, err
	}
	ranges, err := c.standingRanges()
	if err != nil {
		return nil, err
	}
	c.state = service.Load(c.options(whereabouts{}), content)
	if !n.cfg.servesServices() {
		c.model.Apply(service.Update{Complete: true})
	}
	c.now = serviceReport{
		filled: len(content.Services) > 0, cidrs: ranges, capacities: c.maps.capacities(), used: c.state.Used(), nodePorts: portsOf(c.state.NodePorts()),
	}
	if _, err := n.holdWorld(); err != nil {
		return nil, err
	}
	c.events, c.checks = newServiceEvents(n), newHealthChecks(n)
	c.status.set(func(f *figures) { f.services, f.inStep = c.now, time.Now() })
	return c, nil
}

// standingRanges are the ranges that an earlier agent has written, until the source says what they are.
func (c *serviceController) standingRanges() (all []netip.Prefix, err error) {
	for e, err := range c.dp.Maps.Destinations.All() {
		if err != nil {
			return nil, err
		}
		if e.Value.Kind == destinations.Service && e.Value.Flags&destinations.Part == 0 && !slices.Contains(c.cfg.Service, e.Key.Netip()) {
			all = append(all, e.Key.Netip())
		}
	}
	slices.SortFunc(all, netip.Prefix.Compare)
	return all, nil
}

// deliver is for the source. It waits while the goroutine of run is at work, so that what happens meanwhile comes as one update.
func (c *serviceController) deliver(ctx context.Context) func(service.Update) {
	return func(u service.Update) {
		select {
		case c.updates <- u:
		case <-ctx.Done():
		}
	}
}

// run works until ctx ends: after each change, and periodically.
func (c *serviceController) run(ctx context.Context) error {
	timer := time.NewTimer(resync)
	defer timer.Stop()
	defer c.checks.end()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case u := <-c.updates:
			c.accept(u)
		case s := <-c.around:
			c.place(s)
		case <-timer.C:
			c.again()
		}
		timer.Reset(time.Until(c.due()))
	}
}

// due is when there is something to do without a reason: what has failed is tried again, the maps are compared, and what was
// refused may have room.
func (c *serviceController) due() time.Time {
	at := c.compared.Add(resync)
	if c.failed {
		at = c.compared.Add(retry)
	}
	if again := c.checks.again; !again.IsZero() && again.Before(at) {
		at = again
	}
	if again := c.state.Again(); !again.IsZero() && again.Before(at) {
		return again
	}
	return at
}

// accept takes what the source says.
func (c *serviceController) accept(u service.Update) {
	if u.Err != nil || !u.Faulty {
		c.report(func(r *serviceReport) { r.fault = u.Err })
		c.complaints.note("services/source", c.weigh(u.Err))
	}
	if u.Err != nil {
		return
	}
	began := c.model.Complete()
	changed := c.model.Apply(u)
	if slices.Contains(changed, service.APIServer()) {
		c.api.Learn(c.model.APIServers())
	}
	if !began && c.model.Complete() {
		c.log.Info("complete list of Services", "services", len(c.model.Names()))
	}
	c.await(u.Changes)
	c.reconcile(changed)
	c.report(func(r *serviceReport) {
		if c.model.Complete() && (u.CIDRs != nil || !u.Faulty) { // else they may be what can't be read
			r.cidrs = u.CIDRs
		}
	})
}

// weigh makes an obstacle of an error while this node has never known all Services: new pods could reach none of them.
func (c *serviceController) weigh(err error) error {
	if c.read().filled || !c.needed() {
		return err
	}
	return hinder(err)
}

// place takes where this node is.
func (c *serviceController) place(s whereabouts) {
	c.placed = true
	c.placeGuard(s)
	changed := c.state.Configure(c.options(s), c.model)
	c.checks.place(s)
	c.reconcile(changed)
}

// again does what is due.
func (c *serviceController) again() {
	if time.Since(c.compared) >= resync || c.failed {
		c.repair()
	}
	c.reconcile(nil)
}

// reconcile plans for the named Services, and writes what that changes. Nothing is written before all is known.
func (c *serviceController) reconcile(changed []service.Name) {
	c.checks.follow(c.model, changed)
	if !c.placed || !c.model.Complete() {
		c.noteStep(!c.model.Complete()) // what is not known does not wait
		return
	}
	changed = append(changed, c.guardPorts()...)
	if c.failed && time.Since(c.compared) >= retry {
		c.repair()
	}
	w := c.state.Plan(c.model, changed, time.Now())
	c.maps.include(w)
	if !c.failed { // else the next repair writes this as well, and until then nothing that is given up is used again
		c.write(w)
	}
	c.noteStep(!c.failed)
	c.noteSynced()
	c.checks.listen()
	problems := c.problems()
	if !slices.Equal(problems, c.read().problems) {
		c.reportProblems(problems)
	}
	was := c.read()
	c.report(func(r *serviceReport) {
		r.filled, r.problems = r.filled || !c.failed, problems
		if w.HasNodePorts() {
			r.nodePorts = portsOf(c.state.NodePorts())
		}
	})
	if !was.filled && was.fault != nil { // which may be no obstacle any more
		c.complaints.note("services/source", c.weigh(was.fault))
	}
}

// problems are those of Services, by their names.
func (c *serviceController) problems() []service.Problem {
	all := c.state.Problems()
	if more := c.checks.problems(); len(more) > 0 {
		all = slices.Concat(all, more)
		slices.SortStableFunc(all, func(a, b service.Problem) int { return a.Service.Compare(b.Service) })
	}
	return all
}

// repair compares the maps with what they should hold, and writes what differs.
func (c *serviceController) repair() {
	c.compared = time.Now()
	if !c.placed || !c.model.Complete() {
		return
	}
	content, err := c.maps.read()
	if err != nil {
		c.note(err)
		return
	}
	w := c.state.Repair(content)
	if n := w.Len(); n > 0 && !c.failed {
		c.status.repaired(repairedService, n)
		c.log.Warn("entries of the maps of Services restored", "number", n)
	}
	c.write(w)
}

// write carries writes out; what fails is repaired later.
func (c *serviceController) write(w service.Writes) {
	err := c.maps.write(w)
	c.note(err)
	if err == nil {
		c.state.Written(time.Now())
	}
	if slices.ContainsFunc(w.Retired.Values, func(b backends.Value) bool { return b.Proto == wire.UDP }) {
		poke(c.ceased)
	}
}

func (c *serviceController) note(err error) {
	c.failed = err != nil
	if err != nil && c.cfg.servesServices() {
		err = c.weigh(fmt.Errorf("Services that have changed may not be served as they say: %w", err)) //nolint:staticcheck // a name
	} else if err != nil {
		err = fmt.Errorf("host ports may not answer on all of this node's addresses: %w", err)
	}
	c.report(func(r *serviceReport) { r.unwritten = err })
	c.complaints.note("services/maps", err)
}

// ranges are those of Services' addresses; served says that the maps hold all Services, so that nobody else is there. turned says that
// the programs translate: where they serve host ports alone, as soon as the maps have the addresses at which those answer, for which ADD waits.
type ranges struct {
	all            []netip.Prefix
	served, turned bool
}

func (r ranges) equal(o ranges) bool {
	return r.served == o.served && r.turned == o.turned && slices.Equal(r.all, o.all)
}

// rangesOfServices are those that --service-cidr and the API name.
func (l *loop) rangesOfServices() ranges {
	r := l.services.read()
	is := ranges{served: l.cfg.servesServices() && r.filled, turned: l.cfg.servesServices() || r.filled}
	if !l.cfg.servesServices() {
		r.cidrs = nil
	}
	is.all = slices.Concat(l.cfg.Service, r.cidrs)
	slices.SortFunc(is.all, netip.Prefix.Compare)
	is.all = slices.Compact(is.all)
	return is
}

// plannedRanges are those that the newest plan was made with.
func (l *loop) plannedRanges() ranges {
	if l.planned == nil {
		return ranges{}
	}
	return l.planned.ranges
}

// changes is readable when there is something new to read; never without a controller.
func (c *serviceController) changes() <-chan struct{} {
	if c == nil {
		return nil
	}
	return c.news
}

// report changes what others are told, and has the loop hear of what is more than a count.
func (c *serviceController) report(change func(*serviceReport)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	was := c.now
	change(&c.now)
	c.now.services, c.now.used = c.model.Len(), c.state.Used()
	is := c.now
	c.status.set(func(f *figures) { f.services = is })
	if was.filled == is.filled && errors.Is(is.fault, was.fault) && slices.Equal(was.cidrs, is.cidrs) && slices.Equal(was.problems, is.problems) {
		return
	}
	poke(c.news)
}

// read returns what others are told: nothing where there is no controller.
func (c *serviceController) read() serviceReport {
	if c == nil {
		return serviceReport{}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// obstacle is why new pods could reach no Service; empty: they can.
func (c *serviceController) obstacle() string {
	switch r := c.read(); {
	case c == nil || !c.needed() || r.filled:
		return ""
	case r.unwritten != nil:
		return enumerate([]string{r.unwritten.Error()})
	case r.fault != nil:
		return enumerate([]string{"no list of Services: " + r.fault.Error()})
	}
	return "no complete list of Services yet"
}

// startServices has goroutines serve Services, or host ports alone, or removes what an agent has left that did. It returns what
// else the file of Nodes is to be read for; nil: nothing.
func (a *agent) startServices(ctx context.Context, g *errgroup.Group, l *loop) (file *source.FileServices, err error) {
	if !a.frontends() {
		return nil, emptyServices(a.dp.Maps)
	}
	if l.services, err = newServices(a.node); err != nil {
		return nil, err
	}
	g.Go(func() error { return l.services.run(ctx) })
	g.Go(func() error { return l.services.endSockets(ctx) })
	if !a.cfg.servesServices() {
		return nil, nil
	}
	g.Go(func() error { return l.services.events.run(ctx) })
	if a.cfg.NodesFile != "" {
		file = source.NewFileServices()
		g.Go(func() error { return file.Run(ctx, l.services.deliver(ctx)) })
		return file, nil
	}
	follow := source.Services{Config: a.cfg.API, Log: a.log, Heard: a.noteHeard}
	g.Go(func() error { return follow.Run(ctx, l.services.deliver(ctx)) })
	return file, nil
}

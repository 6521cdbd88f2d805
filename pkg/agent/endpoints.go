package agent

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// atOnce has a lock taken now or not at all. Who holds it is at work on what we
// wanted to look at, and the next pass is near.
func atOnce() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// tendEndpoints repairs this node's pods and releases those that are gone. It
// returns when to look again. What can't be done for one of them is no fault of
// the node, which goes on carrying the others.
func (r *reconciler) tendEndpoints() (time.Duration, error) {
	next := resync
	contested := map[endpoint.ID]error{}
	for _, e := range r.view.endpoints {
		if e.Releasing {
			continue
		}
		if l := r.view.links[e.HostIndex]; l.Name != e.HostName {
			continue // the orphans' search deals with it
		}
		w := r.work(e)
		if err := r.contest(w); err != nil {
			contested[e.ID] = err
		}
		if len(w.Damage()) == 0 {
			r.settled(aboutEndpoint(e.ID))
		} else if !r.done(e.ID, r.holding(e.ID, func() error { return r.repair(e.ID) })) {
			next = retry
		}
	}
	r.tellConflicts(contested)
	r.tellRepairs()
	again, err := r.releaseOrphans()
	return min(next, again), err
}

func aboutEndpoint(id endpoint.ID) string { return "endpoint " + id.String() }

// done notes how the work on an endpoint went, and reports whether it needs no
// other try soon.
func (r *reconciler) done(id endpoint.ID, err error) bool {
	switch {
	case errors.Is(err, bpffs.ErrLocked):
		r.log.Debug("somebody else is at work on it", "endpoint", id.String(), "error", err)
	case err != nil:
		r.complain(aboutEndpoint(id), err)
	default:
		r.settled(aboutEndpoint(id))
	}
	return err == nil
}

// holding runs f while nobody else works on an endpoint, if nobody does now.
func (r *reconciler) holding(id endpoint.ID, f func() error) error {
	node, err := bpffs.Shared(atOnce(), r.cfg.State, "repair")
	if err != nil {
		return err
	}
	defer node.Release()
	own, err := endpoint.Acquire(atOnce(), r.cfg.State, id)
	if err != nil {
		return err
	}
	defer own.Release()
	return f()
}

// node is what endpoints are made with.
func (r *reconciler) node() *endpoint.Node {
	m := r.dp.Maps
	return &endpoint.Node{
		Releaser: r.cfg.releaser(), Host: r.host, Sysctl: r.sysctls.Sysctl, Programs: r.dp,
		Tables: endpoint.Tables{Endpoints: m.Endpoints, Devices: m.Devices, Destinations: m.Destinations},
		Config: r.result.Config, Source: r.result.Source,
	}
}

// work is an endpoint as the view has it.
func (r *reconciler) work(e endpoint.Endpoint) *endpoint.Work {
	w := &endpoint.Work{
		Node: r.node(), Endpoint: e, Planned: r.result.Destinations, Held: map[netip.Addr]error{}, Link: r.view.links[e.HostIndex],
		LinkRoutes: r.view.podRoutes[e.HostIndex], Neighbours: r.view.neighbours[e.HostIndex],
	}
	for _, a := range e.Addresses {
		w.Held[a] = r.holder(w, a)
	}
	return w
}

// repair puts right what is missing of an endpoint that nobody else works on, by its state as it is now. One that is
// gone or going is left alone.
func (r *reconciler) repair(id endpoint.ID) error {
	e, err := endpoint.Read(r.cfg.State, id)
	if errors.Is(err, fs.ErrNotExist) || err == nil && e.Releasing {
		return nil
	}
	if err != nil {
		return err
	}
	w := r.work(e)
	made, err := w.Repair(atOnce())
	if w.Link.Index == e.HostIndex {
		r.view.links[e.HostIndex] = w.Link
	}
	for _, what := range made {
		if r.repaired == nil {
			r.repaired = map[string][]string{}
		}
		r.repaired[what] = append(r.repaired[what], e.ID.String())
	}
	return err
}

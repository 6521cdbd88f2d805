package agent

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net/netip"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// endpointController shares this node's endpoints with the plugin, by locks: it
// repairs them, and releases those whose pod is gone.
type endpointController struct {
	*node
	orphans  orphans
	known    *podView                       // of the newest look
	listed   stamp                          // of the directory of state files, before that look
	repaired map[string][]endpoint.Endpoint // those of this pass, by what they lacked
	missing  map[endpoint.ID]bool           // the program, from their links, at the newest inspection
}

// atOnce is for taking a lock now or not at all: the loop waits for nobody, and the
// next pass tries again.
func atOnce() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// changed reports whether pods have come or gone since they were looked at.
func (c *endpointController) changed() bool { return stampOf(endpoint.Dir(c.cfg.State)) != c.listed }

// released reports whether the plugin is taking an endpoint away, or has. Any goroutine may call it.
func (c *endpointController) released(id endpoint.ID) bool {
	e, err := endpoint.Read(c.cfg.State, id)
	return errors.Is(err, fs.ErrNotExist) || err == nil && e.Releasing
}

// begin is called before pods are looked at.
func (c *endpointController) begin() { c.listed = stampOf(endpoint.Dir(c.cfg.State)) }

// reconcile repairs what is damaged and releases what is nobody's. A failure with
// one endpoint is not the node's, which goes on carrying the others.
func (c *endpointController) reconcile(s *state) error {
	if !s.pods {
		return nil
	}
	c.repaired = map[string][]endpoint.Endpoint{}
	contested := map[string]error{}
	for _, e := range s.view.endpoints {
		if !s.view.alive(e) {
			continue
		}
		w := c.work(s, e)
		if err := c.contest(w); err != nil {
			contested[e.ID.String()] = err
		}
		if len(w.Damage()) == 0 && !c.hasChangedMAC(s, w) {
			c.complaints.note(aboutEndpoint(e.ID), nil)
		} else {
			c.conclude(s, e.ID, c.locked(e.ID, func() error { return c.repair(s, e.ID) }))
		}
	}
	// In the log once, in the metrics for as long as it lasts. ebpfctl finds them in the maps.
	c.complaints.noteEach("endpoints/address of ", contested)
	c.status.set(func(f *figures) { f.conflicts = len(contested) })
	c.reportRepairs()
	return c.releaseOrphans(s)
}

// pluginChain is how long after our ADD later plugins of the list most often have ended.
const pluginChain = 3 * time.Second

// hasChangedMAC reports whether a pod has another Ethernet address than is known of it. As that takes a request for each pod, and nobody
// but later plugins of the list should change it, old pods are asked for only when the whole node is looked at; new ones
// again, as long as such plugins may be at work.
func (c *endpointController) hasChangedMAC(s *state, w *endpoint.Work) bool {
	age := time.Since(w.Created)
	isNew := age >= 0 && age < pluginChain
	if isNew {
		c.listed = stamp{} // as if pods had come or gone
	}
	if !s.whole && !isNew {
		return false
	}
	_, changed := w.ChangedMAC()
	return changed
}

func aboutEndpoint(id endpoint.ID) string { return "endpoints/pod " + id.String() }

// conclude notes how the work on an endpoint went, and has it tried again if need be.
func (c *endpointController) conclude(s *state, id endpoint.ID, err error) {
	if errors.Is(err, bpffs.ErrLocked) {
		c.log.Debug("endpoint is locked, trying again", "endpoint", id.String(), "error", err)
		s.lookAgain(retry)
		return
	}
	about := aboutEndpoint(id)
	c.complaints.note(about, err)
	if lasted, failing := c.complaints.lasted(about); failing {
		s.lookAgain(backOff(lasted))
	}
}

// locked calls f under the locks of an endpoint, if nobody else has them now.
func (c *endpointController) locked(id endpoint.ID, f func() error) error {
	node, err := bpffs.Shared(atOnce(), c.cfg.State, "repair")
	if err != nil {
		return err
	}
	defer node.Release()
	own, err := endpoint.Acquire(atOnce(), c.cfg.State, id)
	if err != nil {
		return err
	}
	defer own.Release()
	return f()
}

// work is an endpoint as the view has it.
func (c *endpointController) work(s *state, e endpoint.Endpoint) *endpoint.Work {
	m := c.dp.Maps
	w := &endpoint.Work{
		Node: &endpoint.Node{
			Releaser: c.cfg.releaser(), Host: c.host, Sysctl: device.Sysctl{Dir: c.cfg.ProcSys}, Programs: c.dp,
			Tables: endpoint.Tables{Endpoints: m.Endpoints, Devices: m.Devices, Destinations: m.Destinations, HostPorts: m.HostPorts},
			Config: s.plan.Config, Sources: s.plan.Sources,
		},
		Endpoint: e, Planned: s.plan.Destinations, Held: map[netip.Addr]error{}, Link: s.view.links[e.HostIndex],
		LinkRoutes: s.view.podRoutes[e.HostIndex], Neighbours: s.view.neighbours[e.HostIndex],
		Settings: s.view.settings[e.HostIndex],
	}
	for _, a := range e.Addresses {
		w.Held[a] = s.view.owner(w, a)
	}
	return w
}

// repair puts right what is missing of an endpoint whose locks are ours, by its state as it is now. One that is gone or
// going is left alone.
func (c *endpointController) repair(s *state, id endpoint.ID) error {
	e, err := endpoint.Read(c.cfg.State, id)
	if errors.Is(err, fs.ErrNotExist) || err == nil && e.Releasing {
		return nil
	}
	if err != nil {
		return err
	}
	w := c.work(s, e)
	if mac, changed := w.ChangedMAC(); changed {
		c.log.Info("the host follows a pod's new Ethernet address", "endpoint", e.ID.String(), "pod", e.Pod, "address", mac.String(), "before", e.PodMAC.String())
		return w.Follow(atOnce(), mac) // whatever else is missing, the next look finds: the state file has changed
	}
	made, err := w.Repair(atOnce())
	if w.Link.Index == e.HostIndex {
		s.view.links[e.HostIndex] = w.Link
	}
	for _, what := range made {
		c.repaired[what] = append(c.repaired[what], e)
	}
	return err
}

// reportRepairs logs what the pass has put right.
func (c *endpointController) reportRepairs() {
	for what, all := range c.repaired {
		c.status.repaired(what, len(all))
		level := slog.LevelWarn
		if len(all) > mostLines {
			level = slog.LevelDebug
			c.log.Warn("endpoints repaired", "count", len(all), "missing", what)
		}
		for _, e := range all {
			c.log.Log(context.Background(), level, "endpoint repaired", "endpoint", e.ID.String(), "pod", e.Pod, "missing", what)
		}
	}
}

// inspect has a pass begin at once when the program is missing from a pod's link, where the kernel does not tell.
func (c *endpointController) inspect(s *state) error {
	if c.dp.RemovalIsTold() {
		return nil
	}
	attached, err := c.dp.AttachedPods()
	if attached == nil {
		return err
	}
	missing := map[endpoint.ID]bool{}
	for _, e := range s.view.endpoints {
		if attached[e.HostIndex] || !s.view.alive(e) {
			continue
		}
		missing[e.ID] = true
		if _, failing := c.complaints.lasted(aboutEndpoint(e.ID)); failing && c.missing[e.ID] {
			continue // it is tried again anyway
		}
		if !c.released(e.ID) {
			s.lookAgain(0)
		}
	}
	c.missing = missing
	return err
}

package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
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
		held := r.holders(e)
		if err := r.contest(e, held); err != nil {
			contested[e.ID] = err
		}
		if len(r.damage(e, held)) == 0 {
			r.settled(aboutEndpoint(e.ID))
		} else if !r.done(e.ID, r.locked(e.ID, r.repair)) {
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

// locked runs fix on an endpoint that nobody else works on, with its state as it
// is then. An endpoint that is gone or going by then is left alone.
func (r *reconciler) locked(id endpoint.ID, fix func(endpoint.Endpoint) error) error {
	return r.holding(id, func() error {
		e, err := endpoint.Read(r.cfg.State, id)
		if errors.Is(err, fs.ErrNotExist) || err == nil && e.Releasing {
			return nil
		}
		if err != nil {
			return err
		}
		return fix(e)
	})
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

// fault is one thing that is missing of an endpoint.
type fault struct {
	what string
	fix  func() error
}

// damage lists what is missing of an endpoint whose link is there.
func (r *reconciler) damage(e endpoint.Endpoint, held map[netip.Addr]holding) []fault {
	var out []fault
	add := func(bad bool, what string, fix func() error) {
		if bad {
			out = append(out, fault{what, fix})
		}
	}
	add(!r.attachedTo(e.HostIndex), "program", func() error { return r.dp.Attach(e.HostIndex, attach.FromPod) })
	dev, err := r.dp.Maps.Devices.Get(devices.Key{Ifindex: uint32(e.HostIndex)})
	add(errors.Is(err, typed.ErrKeyNotExist) || err == nil && dev != deviceValue(e, dev), "device entry", func() error { return r.restoreDevice(e) })
	// The kernel forgets the neighbours of a link whose address changes.
	moved := !bytes.Equal(r.view.links[e.HostIndex].MAC, e.HostMAC[:])
	add(moved, "Ethernet address", func() error { return r.host.SetMAC(e.HostIndex, e.HostMAC[:]) })
	add(!r.view.links[e.HostIndex].Up(), "link state", func() error { return r.host.SetUp(e.HostIndex) })
	for _, a := range e.Addresses {
		mac := net.HardwareAddr(e.PodMAC[:])
		add(moved || !bytes.Equal(r.view.neighbours[neighbour{e.HostIndex, a}], mac), "neighbour",
			func() error { return r.host.ReplaceNeighbour(e.HostIndex, a, mac) })
		if held[a] != (holding{}) {
			continue
		}
		want := r.podRoute(e, a)
		add(!r.hasRoute(want), "route", func() error { return r.host.ReplaceRoute(want) })
		value := endpointValue(e)
		have, err := r.dp.Maps.Endpoints.Get(endpoints.Key{Address: wire.AddrFrom(a)})
		add(errors.Is(err, typed.ErrKeyNotExist) || err == nil && have != value, "endpoint entry",
			func() error { return r.claim(a, value) })
		r.damageOutside(a, add)
	}
	add(r.disturbed(e.HostName), "sysctl", func() error { return r.sysctls.holdPod(e.HostName) })
	return out
}

// damageOutside is about an address that this node's podCIDR does not lead to.
func (r *reconciler) damageOutside(a netip.Addr, add func(bool, string, func() error)) {
	own := r.result.Standing.Own4()
	if !a.Is4() || own.IsValid() && own.Contains(a) {
		return
	}
	key := destinations.KeyFrom(netip.PrefixFrom(a, a.BitLen()))
	value := destinations.Value{Kind: destinations.Local}
	if planned, ok := r.result.Destinations[key]; ok {
		value = planned
	}
	// The longest match, which is another entry when there is no such one.
	have, err := r.dp.Maps.Destinations.Get(key)
	add(err != nil || !destinations.Same(have, value), "destination entry", func() error {
		return r.dp.Maps.Destinations.Put(key, value)
	})
}

func (r *reconciler) attachedTo(index int) bool {
	ok, err := r.dp.Attached(index, attach.FromPod)
	return ok || err != nil // an error is no reason to change anything
}

func (r *reconciler) disturbed(link string) bool {
	for name, want := range podSysctls(link) {
		if have, err := r.sysctls.Get(name); err == nil && have != want {
			return true
		}
	}
	return false
}

func endpointValue(e endpoint.Endpoint) endpoints.Value {
	return endpoints.Value{Ifindex: uint32(e.HostIndex), PodMAC: e.PodMAC, HostMAC: e.HostMAC}
}

// podRoute is the host's own way to a pod.
func (r *reconciler) podRoute(e endpoint.Endpoint, a netip.Addr) device.Route {
	route := device.Route{Dst: netip.PrefixFrom(a, a.BitLen()), Index: e.HostIndex}
	if a.Is4() {
		route.Source = r.result.Source
	}
	return route
}

// hasRoute looks for a route of ours in the view, with the source that it should
// have.
func (r *reconciler) hasRoute(want device.Route) bool {
	for _, have := range r.view.podRoutes[want.Dst] {
		if have.Protocol == device.Protocol && have.Index == want.Index && have.Source == want.Source {
			return true
		}
	}
	return false
}

// deviceValue is what a device's entry should be, with the counters that it has.
func deviceValue(e endpoint.Endpoint, have devices.Value) devices.Value {
	have.PodMAC, have.HostMAC = e.PodMAC, e.HostMAC
	have.SetAddresses(e.Addresses)
	return have
}

// restoreDevice writes a device's entry. One that is wrong keeps its counters, but
// for what the programs add in that very moment; one that is right is not touched.
func (r *reconciler) restoreDevice(e endpoint.Endpoint) error {
	key := devices.Key{Ifindex: uint32(e.HostIndex)}
	err := r.dp.Maps.Devices.Insert(key, deviceValue(e, devices.Value{}))
	if !errors.Is(err, typed.ErrKeyExist) {
		return err
	}
	have, err := r.dp.Maps.Devices.Get(key)
	if err != nil || have == deviceValue(e, have) {
		return err
	}
	return r.dp.Maps.Devices.Put(key, deviceValue(e, have))
}

// repair puts right what is missing of an endpoint that nobody else works on.
func (r *reconciler) repair(e endpoint.Endpoint) error {
	l, err := r.host.LinkByName(e.HostName)
	if errors.Is(err, device.ErrNotFound) || err == nil && l.Index != e.HostIndex {
		return nil
	}
	if err != nil {
		return err
	}
	r.view.links[l.Index] = l
	var errs []error
	for _, f := range r.damage(e, r.holders(e)) {
		if err := f.fix(); err != nil {
			errs = append(errs, fmt.Errorf("repair the %s of endpoint %s: %w", f.what, e.ID, err))
			continue
		}
		if r.repaired == nil {
			r.repaired = map[string][]string{}
		}
		r.repaired[f.what] = append(r.repaired[f.what], e.ID.String())
	}
	return errors.Join(errs...)
}

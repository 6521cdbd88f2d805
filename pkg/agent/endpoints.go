package agent

import (
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

// lockPatience is how long one endpoint's or the node's lock is waited for; who
// holds it is at work on what we wanted to look at, and the next pass is near.
const lockPatience = 500 * time.Millisecond

// tendEndpoints repairs this node's pods and releases those that are gone. It
// returns when to look again.
func (r *reconciler) tendEndpoints(ctx context.Context) (time.Duration, error) {
	next := resync
	var errs []error
	for _, e := range r.view.endpoints {
		if e.Releasing {
			continue
		}
		if l := r.view.links[e.HostIndex]; l.Name != e.HostName {
			continue // the orphans' search deals with it
		}
		broken := r.damage(e)
		if len(broken) == 0 {
			continue
		}
		if err := r.locked(ctx, e.ID, r.repair); err != nil {
			errs = append(errs, err)
			next = retry
		}
	}
	again, err := r.releaseOrphans(ctx)
	return min(next, again), errors.Join(append(errs, err)...)
}

// locked runs fix on an endpoint that nobody else works on, with its state as it
// is then. An endpoint that is gone or going by then is left alone.
func (r *reconciler) locked(ctx context.Context, id endpoint.ID, fix func(endpoint.Endpoint) error) error {
	ctx, cancel := context.WithTimeout(ctx, lockPatience)
	defer cancel()
	node, err := bpffs.Shared(ctx, r.cfg.State)
	if err != nil {
		return err
	}
	defer node.Release()
	own, err := endpoint.Acquire(ctx, r.cfg.State, id)
	if err != nil {
		return err
	}
	defer own.Release()
	e, err := endpoint.Read(r.cfg.State, id)
	if errors.Is(err, fs.ErrNotExist) || err == nil && e.Releasing {
		return nil
	}
	if err != nil {
		return err
	}
	return fix(e)
}

// fault is one thing that is missing of an endpoint.
type fault struct {
	what string
	fix  func() error
}

// damage lists what is missing of an endpoint whose link is there.
func (r *reconciler) damage(e endpoint.Endpoint) []fault {
	var out []fault
	add := func(bad bool, what string, fix func() error) {
		if bad {
			out = append(out, fault{what, fix})
		}
	}
	add(!r.attachedTo(e.HostIndex), "program", func() error { return r.dp.Attach(e.HostIndex, attach.FromPod) })
	_, err := r.dp.Maps.Devices.Get(devices.Key{Ifindex: uint32(e.HostIndex)})
	add(errors.Is(err, typed.ErrKeyNotExist), "device entry", func() error { return r.restoreDevice(e) })
	add(!r.view.links[e.HostIndex].Up(), "link state", func() error { return r.host.SetUp(e.HostIndex) })
	for _, a := range e.Addresses {
		want := r.podRoute(e, a)
		add(!r.hasRoute(want), "route", func() error { return r.restoreRoute(e, a, want) })
		key, value := endpoints.Key{Address: wire.AddrFrom(a)}, endpointValue(e)
		have, err := r.dp.Maps.Endpoints.Get(key)
		add(errors.Is(err, typed.ErrKeyNotExist) || err == nil && have != value && r.stale(have), "endpoint entry",
			func() error { return r.dp.Maps.Endpoints.Put(key, value) })
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
	// The longest match, which is another entry when there is no such one.
	have, err := r.dp.Maps.Destinations.Get(key)
	add(err != nil || !destinations.Same(have, value), "destination entry", func() error {
		return r.dp.Maps.Destinations.Put(key, value)
	})
}

// stale says that an entry leads to a link that does not exist: an address that
// was given on is its new owner's.
func (r *reconciler) stale(v endpoints.Value) bool {
	_, err := r.host.LinkByIndex(int(v.Ifindex))
	return errors.Is(err, device.ErrNotFound)
}

func (r *reconciler) attachedTo(index int) bool {
	ok, err := r.dp.Attached(index, attach.FromPod)
	return ok || err != nil // an error is no reason to change anything
}

func (r *reconciler) disturbed(link string) bool {
	for name, want := range map[string]string{rpFilterOf(link): "2", forwardingOf(link): "1"} {
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
	for _, have := range r.view.routes {
		if have.Protocol == device.Protocol && have.Dst == want.Dst && have.Index == want.Index && have.Source == want.Source {
			return true
		}
	}
	return false
}

func (r *reconciler) restoreRoute(e endpoint.Endpoint, a netip.Addr, route device.Route) error {
	if err := r.host.ReplaceNeighbour(e.HostIndex, a, net.HardwareAddr(e.PodMAC[:])); err != nil {
		return err
	}
	return r.host.ReplaceRoute(route)
}

// restoreDevice inserts a device's entry; one that is there keeps its counters.
func (r *reconciler) restoreDevice(e endpoint.Endpoint) error {
	v := devices.Value{PodMAC: e.PodMAC, HostMAC: e.HostMAC}
	for _, a := range e.Addresses {
		if a.Is4() {
			v.IPv4 = wire.AddrFrom(a)
		} else {
			v.IPv6 = wire.AddrFrom(a)
		}
	}
	err := r.dp.Maps.Devices.Insert(devices.Key{Ifindex: uint32(e.HostIndex)}, v)
	if errors.Is(err, typed.ErrKeyExist) {
		return nil
	}
	return err
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
	for _, f := range r.damage(e) {
		if err := f.fix(); err != nil {
			errs = append(errs, fmt.Errorf("repair the %s of endpoint %s: %w", f.what, e.ID, err))
			continue
		}
		r.log.Warn("endpoint repaired", "endpoint", e.ID.String(), "missing", f.what)
	}
	return errors.Join(errs...)
}

package endpoint

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
)

// piece is one part of an endpoint.
type piece struct {
	name string
	// onHost says that it belongs to the host's end of a link that exists: without the link nobody asks for it, with it
	// the agent makes it again when it is missing.
	onHost bool
	// vital says that without it the endpoint carries nothing.
	vital bool
	// present tells Work.Wrong what is not as it should be. An error is that it could not be found out.
	present func(*Work) error
	// make makes it, also where it is there in part.
	make func(*Work) error
	// remove takes away whatever is left of it; nil: it goes with another piece.
	remove func(*Work) error
}

// pieces are an endpoint in the order in which ADD makes it and DEL, backwards, takes it away. Nothing can reach the
// pod, and the pod can reach nothing, before its program is on the link and knows what the pod may send from: the link
// comes up after that. The endpoints entry, which makes others' packets go there, is last, and everything that has such
// an entry has a state file.
func pieces() []piece {
	return []piece{
		{name: "address", present: (*Work).haveAddresses, make: (*Work).takeAddresses, remove: (*Work).freeAddresses},
		{name: "link", present: (*Work).haveLink, make: (*Work).createLink},
		{name: "pod", present: (*Work).havePod, make: (*Work).configurePod},
		{name: "sysctl", onHost: true, present: (*Work).haveSysctls, make: (*Work).setSysctls},
		{name: "program", onHost: true, present: (*Work).haveProgram, make: (*Work).attachProgram, remove: (*Work).detach},
		{name: "device entry", onHost: true, vital: true, present: (*Work).haveDevice, make: (*Work).writeDevice, remove: (*Work).forgetDevices},
		{name: "Ethernet address", onHost: true, present: (*Work).haveMAC, make: (*Work).setMAC},
		// A pod's link that goes down goes for good: program and routes go with it, and nothing is counted as dropped
		// because the program does not know the link any more.
		{name: "link state", onHost: true, present: (*Work).haveUp, make: (*Work).setUp, remove: (*Work).deleteLink},
		{name: "neighbour", onHost: true, present: (*Work).haveNeighbours, make: (*Work).writeNeighbours},
		{name: "route", onHost: true, present: (*Work).haveRoutes, make: (*Work).writeRoutes, remove: (*Work).deleteRoutes},
		{name: "state file", present: (*Work).haveState, make: (*Work).writeState}, // removed after all the rest
		{name: "destination entry", onHost: true, present: (*Work).haveDestinations, make: (*Work).writeDestinations},
		{name: "endpoint entry", onHost: true, vital: true, present: (*Work).haveEntries, make: (*Work).writeEntries, remove: (*Work).forgetEntries},
	}
}

// Work is one endpoint at which somebody is at work, who holds its lock unless he only looks.
type Work struct {
	*Node
	Endpoint
	// Link is the host's end as it was found, with the routes over it and its neighbours; zero: it is not there.
	Link       device.Link
	LinkRoutes []device.Route
	Neighbours []device.Neighbour

	// Namespace is the pod's and Inside its network, for ADD and CHECK.
	Namespace *device.NetNS
	Inside    *device.Handle
	// Routes are the pod's own but for the way to the gateway; their interface is the pod's.
	Routes []device.Route
	// Others are addresses that other plugins have given the pod's interface.
	Others []netip.Addr

	// Pool is what ADD takes addresses from; nil: Addresses were given by another ipam plugin.
	Pool *ipam.Config
	// Given is called when ADD has its addresses; it sets Routes and Result.
	Given func() error
	// WasUp is set by ADD when a packet of the pod may have left.
	WasUp bool

	// Held are the addresses that another living endpoint has, or may have: nothing is asked or made for them.
	Held map[netip.Addr]error
	// Planned are the agent's destinations entries; what a pod has of its own is not always among them.
	Planned map[destinations.Key]destinations.Value

	ctx   context.Context // bounds the waits for locks, of one call
	fresh bool            // the endpoint is being made
	found []string        // what is wrong
	removal
}

// Make makes every piece in order. What a killed one has left is released first, what a failed one leaves is for Release.
func (w *Work) Make(ctx context.Context) error {
	w.ctx, w.fresh = ctx, true
	if err := w.clear(); err != nil {
		return err
	}
	for _, p := range pieces() {
		if err := w.step(p.name); err != nil {
			return err
		}
		if err := p.make(w); err != nil {
			return err
		}
	}
	return nil
}

// Wrong notes something that is not as it should be.
func (w *Work) Wrong(format string, args ...any) {
	w.found = append(w.found, fmt.Sprintf(format, args...))
}

// faults asks for some pieces.
func (w *Work) faults(asked func(piece) bool) ([]string, error) {
	for _, p := range pieces() {
		if asked(p) {
			if err := p.present(w); err != nil {
				return nil, err
			}
		}
	}
	return w.found, nil
}

// Faults says all that is not as ADD made it, and what Wrong was told before.
func (w *Work) Faults() ([]string, error) {
	if err := w.look(); err != nil {
		return nil, err
	}
	return w.faults(func(p piece) bool { return !p.onHost || w.Link.Index == w.HostIndex })
}

// Gap says why the endpoint carries nothing: its link is gone, or a vital piece is missing; empty: it is whole.
func (w *Work) Gap() (string, error) {
	err := w.findLink()
	if gone := w.linkGone(); err != nil || gone != "" {
		return gone, err
	}
	found, err := w.faults(func(p piece) bool { return p.vital })
	return strings.Join(found, "; "), err
}

// Damage names the pieces of the host's side that Repair would make, given what was found of the link.
func (w *Work) Damage() (names []string) {
	for _, p := range pieces() {
		if w.missing(p) {
			names = append(names, p.name)
		}
	}
	return names
}

// missing says that the agent has to make a piece again. What can't be found out is no reason to change anything.
func (w *Work) missing(p piece) bool {
	w.found = nil
	return p.onHost && p.present(w) == nil && len(w.found) > 0
}

// Repair makes what is missing of the host's side, if the link is there, and names it. A piece that can't be made does
// not keep the others from it.
func (w *Work) Repair(ctx context.Context) (made []string, err error) {
	w.ctx = ctx
	if err := w.findLink(); err != nil || w.linkGone() != "" {
		return nil, err
	}
	var errs []error
	for _, p := range pieces() {
		if !w.missing(p) {
			continue
		}
		if err := p.make(w); err != nil {
			errs = append(errs, fmt.Errorf("repair the %s of endpoint %s: %w", p.name, w.ID, err))
			continue
		}
		made = append(made, p.name)
	}
	return made, errors.Join(errs...)
}

// look finds and lists what there is of the endpoint on the host.
func (w *Work) look() error {
	if err := w.findLink(); err != nil || w.linkGone() != "" {
		return err
	}
	var errs [3]error
	var local []netip.Prefix
	w.LinkRoutes, errs[0] = w.Host.OwnRoutes()
	w.Neighbours, errs[1] = w.Host.Neighbours(w.HostIndex)
	local, errs[2] = w.Host.LocalPrefixes()
	if !slices.ContainsFunc(local, func(p netip.Prefix) bool { return p.Contains(w.Source) }) {
		w.Source = netip.Addr{} // on no interface, so that no route can have it
	}
	return errors.Join(errs[:]...)
}

func (w *Work) findLink() (err error) {
	w.Link, err = w.Host.LinkByName(w.HostName)
	if errors.Is(err, device.ErrNotFound) {
		return nil
	}
	return err
}

// each does something for every address that nobody else has.
func (w *Work) each(do func(netip.Addr) error) error {
	return forAll(w.Addresses, func(a netip.Addr) error {
		if w.Held[a] != nil {
			return nil
		}
		return do(a)
	})
}

// forAll does something for all, whatever becomes of each.
func forAll[T any](list []T, do func(T) error) error {
	errs := make([]error, len(list))
	for i, v := range list {
		errs[i] = do(v)
	}
	return errors.Join(errs...)
}

func (w *Work) haveState() error {
	if w.Releasing {
		w.Wrong("the endpoint is being released")
	}
	return nil
}

func (w *Work) writeState() error {
	w.Created = time.Now().UTC()
	return Write(w.StateDir, w.Endpoint)
}

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
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
)

// piece is one part of an endpoint.
type piece struct {
	name string
	// onHost: it belongs to the host's end of the link. It is only checked if the link exists, and then the agent makes
	// it again when it is missing.
	onHost bool
	// vital: without it the endpoint carries no packets.
	vital bool
	// present notes with Work.Wrong what is not as it should be. It returns an error if that could not be found out.
	present func(*Work) error
	// make makes it, even if part of it exists.
	make func(*Work) error
	// remove removes whatever exists of it; nil: it is removed with another piece.
	remove func(*Work) error
}

// pieces are the parts of an endpoint in the order in which ADD makes them; DEL removes them in reverse. The link comes
// up after its program is attached and knows the pod's addresses: before, no packet can pass in either direction. The
// endpoints entry, which delivers other pods' packets, is last, and every endpoint that has one has a state file.
func pieces() []piece {
	return []piece{
		{name: "address", present: (*Work).haveAddresses, make: (*Work).takeAddresses, remove: (*Work).freeAddresses},
		{name: "link", present: (*Work).haveLink, make: (*Work).createLink},
		{name: "pod", present: (*Work).havePod, make: (*Work).configurePod, remove: (*Work).deleteSourceRules}, // the rest goes with the link
		{name: "sysctl", onHost: true, present: (*Work).haveSysctls, make: (*Work).setSysctls},
		{name: "program", onHost: true, present: (*Work).haveProgram, make: (*Work).attachProgram, remove: (*Work).detach},
		{name: "program to the pod", onHost: true, present: (*Work).haveProgramToPod, make: (*Work).attachProgramToPod},
		{name: "device entry", onHost: true, vital: true, present: (*Work).haveDevice, make: (*Work).writeDevice, remove: (*Work).forgetDevices},
		{name: "Ethernet address", onHost: true, present: (*Work).haveMAC, make: (*Work).setMAC},
		// DEL does not set the link down but deletes it: program and routes go with it, and no drop is counted because
		// the program does not know the link any more.
		{name: "link state", onHost: true, present: (*Work).haveUp, make: (*Work).setUp, remove: (*Work).deleteLink},
		{name: "neighbour", onHost: true, present: (*Work).haveNeighbours, make: (*Work).writeNeighbours},
		{name: "route", onHost: true, present: (*Work).haveRoutes, make: (*Work).writeRoutes, remove: (*Work).deleteRoutes},
		{name: "state file", present: (*Work).haveState, make: (*Work).writeState},                            // removed last
		{name: "host port entry", onHost: true, present: (*Work).haveHostPorts, make: (*Work).writeHostPorts}, // removed with the endpoint entry
		{name: "destination entry", onHost: true, present: (*Work).haveDestinations, make: (*Work).writeDestinations},
		{name: "endpoint entry", onHost: true, vital: true, present: (*Work).haveEntries, make: (*Work).writeEntries, remove: (*Work).forgetEntries},
	}
}

// Work is an operation on one endpoint. Its caller holds the endpoint's lock, unless it only reads.
type Work struct {
	*Node
	Endpoint
	// Link is the host's end as it was found, zero if it does not exist, with the host's own routes and the link's
	// neighbours.
	Link       device.Link
	LinkRoutes []device.Route
	Neighbours []device.Neighbour
	// Settings are the link's, if they were listed; those without an Index are read.
	Settings device.Settings

	// Namespace is the pod's, and Inside its network; for ADD and CHECK.
	Namespace *device.NetNS
	Inside    *device.Handle
	// Routes are the pod's, except those to the gateway.
	Routes []device.Route
	// Others are addresses that other plugins have given the pod's interface, InsideMAC its Ethernet address, which they may
	// have changed; for CHECK.
	Others    []netip.Addr
	InsideMAC wire.MAC

	// Pool is what ADD allocates addresses from; nil: another ipam plugin has allocated Addresses.
	Pool *ipam.Config
	// OnAddresses is called when ADD has its addresses, to set HostPorts, Routes and Result.
	OnAddresses func() error
	// WasUp is set by ADD when a packet of the pod may have left.
	WasUp bool

	// Held are the addresses that another living endpoint has, or may have: pieces for them are neither checked nor made.
	Held map[netip.Addr]error
	// Planned are the destinations entries that the agent has planned, which may include pods' own.
	Planned map[destinations.Key]destinations.Value

	ctx   context.Context // of the current call: bounds the waits for locks
	fresh bool            // the endpoint is being made by ADD
	found []string        // what Wrong has noted
	removal
}

// Make makes every piece in order. It first releases what a killed ADD has left; after an error the caller calls Release.
func (w *Work) Make(ctx context.Context) error {
	w.ctx, w.fresh = ctx, true
	if err := w.releaseKilled(); err != nil {
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

// faults checks the pieces for which asked is true.
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

// Faults returns everything that is not as ADD made it, and what Wrong has noted before.
func (w *Work) Faults() ([]string, error) {
	if err := w.look(); err != nil {
		return nil, err
	}
	return w.faults(func(p piece) bool { return !p.onHost || w.Link.Index == w.HostIndex })
}

// Gap returns why the endpoint carries no packets: its link is gone, or a vital piece is missing; empty: it is complete.
func (w *Work) Gap() (string, error) {
	err := w.findLink()
	if gone := w.linkGone(); err != nil || gone != "" {
		return gone, err
	}
	found, err := w.faults(func(p piece) bool { return p.vital })
	return strings.Join(found, "; "), err
}

// Damage names the pieces that Repair would make, given Link, LinkRoutes and Neighbours.
func (w *Work) Damage() (names []string) {
	for _, p := range pieces() {
		if w.missing(p) {
			names = append(names, p.name)
		}
	}
	return names
}

// missing reports whether the agent has to make a piece again. It has not if that cannot be found out.
func (w *Work) missing(p piece) bool {
	w.found = nil
	return p.onHost && p.present(w) == nil && len(w.found) > 0
}

// Repair makes the missing pieces of the host's side, if the link exists, and returns their names. It goes on with the
// others after a piece that can't be made.
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
			errs = append(errs, fmt.Errorf("repair the %s of %s: %w", p.name, w.Short(), err))
			continue
		}
		made = append(made, p.name)
	}
	return made, errors.Join(errs...)
}

// Repairable are the names of the pieces that Repair makes.
func Repairable() (names []string) {
	for _, p := range pieces() {
		if p.onHost {
			names = append(names, p.name)
		}
	}
	return names
}

// look reads what exists of the endpoint on the host.
func (w *Work) look() error {
	if err := w.findLink(); err != nil || w.linkGone() != "" {
		return err
	}
	var errs [3]error
	w.LinkRoutes, errs[0] = w.Host.OwnRoutes()
	w.Neighbours, errs[1] = w.Host.Neighbours(w.HostIndex)
	errs[2] = w.dropForeignSources()
	return errors.Join(errs[:]...)
}

// dropForeignSources leaves the source to the kernel where the node's address is on no interface: no route can have it then.
func (w *Work) dropForeignSources() error {
	local, _, err := w.Host.LocalTable(device.IPv4, device.IPv6)
	for f, source := range w.Sources {
		if !slices.ContainsFunc(local, func(p netip.Prefix) bool { return p.Contains(source.Netip()) }) {
			w.Sources[f] = wire.Addr{}
		}
	}
	return err
}

func (w *Work) findLink() (err error) {
	w.Link, err = w.Host.LinkByName(w.HostName)
	if errors.Is(err, device.ErrNotFound) {
		return nil
	}
	return err
}

// each calls do for every address that no other endpoint holds.
func (w *Work) each(do func(netip.Addr) error) error {
	return forAll(w.Addresses, func(a netip.Addr) error {
		if w.Held[a] != nil {
			return nil
		}
		return do(a)
	})
}

// forAll calls do for all, and joins the errors.
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

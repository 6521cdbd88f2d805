package endpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
)

// HostLocal is the ipam type whose addresses are kept by package ipam.
const HostLocal = "host-local"

// Releaser takes endpoints away, in the network namespace of the calling goroutine's thread.
type Releaser struct {
	StateDir string
	Pins     bpffs.Dir
	// Quarantine is how long freed addresses rest.
	Quarantine time.Duration
	// KeepState leaves the state file, marked as one whose endpoint is released: what gave the addresses has still to be
	// told, and the file says how.
	KeepState bool
	// Log is told about what a release comes across; nil: nobody is.
	Log *slog.Logger
	// Before, when it is not nil, is called with the name of each part of a release (see Parts) before the part is
	// done; an error of it ends the release there. It is how tests make a release fail or die half-way.
	Before func(part string) error
}

func (r Releaser) log() *slog.Logger {
	if r.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return r.Log
}

// Release takes away everything of an endpoint: map entries first, so that no packet goes to it any more, then link,
// route, program, address and, last, its state file. What is gone already is passed over; what can't be taken away is
// reported when all the rest is, and the state file then stays for another try, as does the address of a link that is
// still there. The network is the one to look for
// addresses in when there is no state file. The caller holds the node's lock (bpffs.Shared is enough); Release takes
// the endpoint's.
func (r Releaser) Release(ctx context.Context, id ID, network string) error {
	if err := id.Validate(); err != nil {
		return err
	}
	l, err := Acquire(ctx, r.StateDir, id)
	if err != nil {
		return err
	}
	defer l.Release()
	return r.ReleaseLocked(ctx, id, network)
}

// ReleaseLocked is Release for a caller that holds the endpoint's lock.
func (r Releaser) ReleaseLocked(ctx context.Context, id ID, network string) error {
	w, err := r.open(ctx, id, network)
	if err != nil {
		return fmt.Errorf("release endpoint %s: %w", id, err)
	}
	defer w.close()
	var failed []error
	for _, part := range w.parts() {
		if r.Before != nil {
			if err := r.Before(part.name); err != nil {
				return err
			}
		}
		if part.name == "state" && (r.KeepState || len(failed) > 0) {
			break
		}
		if err := part.do(); err != nil {
			failed = append(failed, err)
		}
	}
	if err := errors.Join(failed...); err != nil {
		return fmt.Errorf("release endpoint %s: %w", id, err)
	}
	return nil
}

// work is one release: what is known of the endpoint, and the tools.
type work struct {
	Releaser
	ctx       context.Context
	id        ID
	networks  []string
	state     *Endpoint // nil: none, or none that can be read
	link      int       // index of the host-side link, 0: gone
	linkStays bool      // it could not be deleted
	indexes   []int     // that the endpoint's link has or had
	addresses []netip.Addr
	tables    *tables
	host      *device.Handle
}

type part struct {
	name string
	do   func() error
}

// Parts are the names of a release's parts, in order.
func Parts() []string {
	var names []string
	for _, p := range (&work{}).parts() {
		names = append(names, p.name)
	}
	return names
}

func (w *work) parts() []part {
	return []part{
		{"mark", w.mark},
		{"maps", w.forgetAddresses},
		{"link", w.deleteLink},
		{"routes", w.deleteRoutes},
		{"devices", w.forgetDevices},
		{"program", w.detach},
		{"address", w.freeAddresses},
		{"state", func() error { return Remove(w.StateDir, w.id) }},
	}
}

func (r Releaser) open(ctx context.Context, id ID, network string) (w *work, err error) {
	w = &work{Releaser: r, ctx: ctx, id: id}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if w.host, err = device.Open(); err != nil {
		return w, err
	}
	if w.tables, err = openTables(r.Pins); err != nil {
		return w, err
	}
	if err = w.readState(network); err != nil {
		return w, err
	}
	if err = w.findLink(); err != nil {
		return w, err
	}
	return w, w.findAddresses()
}

func (w *work) close() {
	if w.tables != nil {
		w.tables.close()
	}
	if w.host != nil {
		w.host.Close()
	}
}

// readState takes over what ADD wrote down. Without that everything is found by name, but whether a file is there must
// be known: it may name what cannot be found.
func (w *work) readState(network string) error {
	if network != "" {
		w.networks = append(w.networks, network)
	}
	e, err := Read(w.StateDir, w.id)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, ErrUnreadable):
		w.log().Warn("state of the endpoint is unreadable, released without it", "endpoint", w.id.String(), "error", err)
		return nil
	case err != nil:
		return err
	}
	w.state = &e
	if e.Network != "" && e.Network != network {
		w.networks = append(w.networks, e.Network)
	}
	for _, a := range e.Addresses {
		w.addAddress(a)
	}
	return nil
}

// findLink looks for the host-side link by its name, which nothing but this endpoint can have, and else by the index
// that the state file remembers. A link that has this index is this endpoint's, renamed, only with its Ethernet address:
// a state file that outlived its boot would else point at somebody else's.
func (w *work) findLink() error {
	l, err := w.host.LinkByName(w.id.HostLinkName())
	switch {
	case err == nil:
		w.link = l.Index
		w.indexes = append(w.indexes, l.Index)
	case !errors.Is(err, device.ErrNotFound):
		return err
	}
	if w.state == nil || w.state.HostIndex == 0 || w.state.HostIndex == w.link {
		return nil
	}
	l, err = w.host.LinkByIndex(w.state.HostIndex)
	switch {
	case errors.Is(err, device.ErrNotFound):
		w.indexes = append(w.indexes, w.state.HostIndex)
		return nil
	case err == nil && w.link == 0 && l.Kind == "veth" && bytes.Equal(l.MAC, w.state.HostMAC[:]):
		w.link = l.Index
		w.indexes = append(w.indexes, l.Index)
	}
	return err
}

// findAddresses adds what stands in the address store: a killed ADD has written nothing else yet.
func (w *work) findAddresses() error {
	for _, n := range w.networks {
		s, err := ipam.Open(w.StateDir, n, ipam.Options{})
		if err != nil {
			return err
		}
		list, err := s.Entries()
		if err != nil {
			return err
		}
		for _, e := range list {
			if e.State == ipam.Used && e.Owner == ipam.Owner(w.id) {
				w.addAddress(e.Address)
			}
		}
	}
	return nil
}

func (w *work) addAddress(a netip.Addr) {
	if !slices.Contains(w.addresses, a) {
		w.addresses = append(w.addresses, a)
	}
}

// mark notes in the state file that the release has begun, so that nobody repairs what it takes away.
func (w *work) mark() error {
	if w.state == nil || w.state.Releasing {
		return nil
	}
	w.state.Releasing = true
	return markReleasing(w.StateDir, w.id)
}

func (w *work) forgetAddresses() error {
	var errs []error
	for _, a := range w.addresses {
		errs = append(errs, w.tables.forgetAddress(a, w.indexes))
	}
	return errors.Join(errs...)
}

func (w *work) deleteLink() error {
	if w.link == 0 {
		return nil
	}
	err := w.host.DeleteLink(w.link)
	w.linkStays = err != nil
	return err
}

// deleteRoutes finds nothing as long as the kernel takes a link's routes away with it, which it does unless somebody
// moved one of them.
func (w *work) deleteRoutes() error {
	var errs []error
	for _, a := range w.addresses {
		for _, index := range w.indexes {
			errs = append(errs, w.host.DeleteRoute(device.Route{Dst: netip.PrefixFrom(a, a.BitLen()), Index: index}))
		}
	}
	return errors.Join(errs...)
}

func (w *work) forgetDevices() error {
	var errs []error
	for _, index := range w.indexes {
		errs = append(errs, w.tables.forgetDevice(index))
	}
	return errors.Join(errs...)
}

// detach comes after the link: what is attached goes with the device, and only the pin of a dead link is left, which
// costs no grace period.
func (w *work) detach() error {
	if len(w.indexes) == 0 { // the link is gone and no file says which it was
		return w.sweepDead(w.host, w.tables)
	}
	var errs []error
	for _, index := range w.indexes {
		errs = append(errs, attach.Attacher{Dir: w.Pins}.Detach(index, attach.FromPod))
	}
	return errors.Join(errs...)
}

// freeAddresses leaves the addresses of a link that is still there: it has them.
func (w *work) freeAddresses() error {
	if w.linkStays {
		return nil
	}
	var errs []error
	for _, n := range w.networks {
		s, err := ipam.Open(w.StateDir, n, ipam.Options{Quarantine: w.Quarantine})
		if err == nil {
			_, err = s.Release(w.ctx, ipam.Owner(w.id))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

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

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

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
	// Step, when it is not nil, is called with the name of each piece before it is made, and with "release " and its name
	// before it is removed; an error of it ends the work there. It is how tests make it fail or die half-way.
	Step func(name string) error
}

func (r Releaser) log() *slog.Logger {
	if r.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return r.Log
}

func (r Releaser) step(name string) error {
	if r.Step == nil {
		return nil
	}
	return r.Step(name)
}

// Release takes away everything of an endpoint: the pieces backwards and, last, its state file. What is gone already is
// passed over; what can't be taken away is reported when all the rest is, and the state file then stays for another
// try, as does the address of a link that is still there. The network is the one to look for addresses in when there is
// no state file. The caller holds the node's lock (bpffs.Shared is enough); Release takes the endpoint's.
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
	n, err := r.Open()
	if err != nil {
		return fmt.Errorf("release endpoint %s: %w", id, err)
	}
	defer n.Close()
	w := &Work{Node: n, Endpoint: Endpoint{ID: id}, ctx: ctx}
	if err = w.find(network); err == nil {
		err = w.takeAway()
	}
	if err != nil {
		return fmt.Errorf("release endpoint %s: %w", id, err)
	}
	return nil
}

// clear takes away what a killed ADD of this attachment has left; the caller has made sure that it is no more.
func (w *Work) clear() error {
	_, err := w.Host.LinkByName(w.HostName)
	if errors.Is(err, device.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	return w.releaseRest("link of an earlier ADD that never ended")
}

func (w *Work) releaseRest(why string) error {
	w.log().Warn("releasing what is left of the attachment first", "reason", why)
	return w.ReleaseLocked(w.ctx, w.ID, w.Network)
}

// removal is what DEL finds out before it begins.
type removal struct {
	networks  []string
	written   bool  // there is a state file that can be read
	link      int   // index of the host-side link, 0: gone
	linkStays bool  // it could not be deleted
	indexes   []int // that the endpoint's link has or had
}

// takeAway goes through the pieces backwards. The state file is marked before, so that nobody repairs what goes, and
// removed after all the rest, if that could be taken away.
func (w *Work) takeAway() error {
	parts := []piece{{name: "mark", remove: (*Work).mark}}
	for _, p := range slices.Backward(pieces()) {
		if p.remove != nil {
			parts = append(parts, p)
		}
	}
	var failed error
	for _, p := range parts {
		if err := w.step("release " + p.name); err != nil {
			return err
		}
		failed = errors.Join(failed, p.remove(w))
	}
	if err := w.step("release state file"); err != nil || failed != nil || w.KeepState {
		return errors.Join(failed, err)
	}
	return Remove(w.StateDir, w.ID)
}

// find collects what is known of the endpoint: what ADD wrote down, the link, and what stands in the address store,
// because a killed ADD has written nothing else yet.
func (w *Work) find(network string) error {
	if err := w.openTables(false); err != nil {
		return err
	}
	if err := w.readState(); err != nil {
		return err
	}
	if err := w.findRemains(); err != nil {
		return err
	}
	for _, n := range slices.Compact([]string{network, w.Network}) {
		if n == "" {
			continue
		}
		owned, err := w.owned(n)
		if err != nil {
			return err
		}
		w.networks = append(w.networks, n)
		w.Addresses = append(w.Addresses, owned...)
	}
	slices.SortFunc(w.Addresses, netip.Addr.Compare)
	w.Addresses = slices.Compact(w.Addresses)
	return nil
}

// readState takes over what ADD wrote down. Without that everything is found by name, but whether a file is there must
// be known: it may name what cannot be found.
func (w *Work) readState() error {
	e, err := Read(w.StateDir, w.ID)
	switch {
	case err == nil:
		w.Endpoint, w.written = e, true
	case errors.Is(err, ErrUnreadable):
		w.log().Warn("state of the endpoint is unreadable, released without it", "endpoint", w.ID.String(), "error", err)
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	return nil
}

// findRemains looks for the host-side link by its name, which nothing but this endpoint can have, and else by the index
// that the state file remembers. A link that has this index is this endpoint's, renamed, only with its Ethernet address:
// a state file that outlived its boot would else point at somebody else's.
func (w *Work) findRemains() error {
	l, err := w.Host.LinkByName(w.HostLinkName())
	switch {
	case err == nil:
		w.link = l.Index
		w.indexes = append(w.indexes, l.Index)
	case !errors.Is(err, device.ErrNotFound):
		return err
	}
	if w.HostIndex == 0 || w.HostIndex == w.link {
		return nil
	}
	l, err = w.Host.LinkByIndex(w.HostIndex)
	switch {
	case errors.Is(err, device.ErrNotFound):
		w.indexes = append(w.indexes, w.HostIndex)
		return nil
	case err == nil && w.link == 0 && l.Kind == "veth" && bytes.Equal(l.MAC, w.HostMAC[:]):
		w.link = l.Index
		w.indexes = append(w.indexes, l.Index)
	}
	return err
}

func (w *Work) mark() error {
	if !w.written || w.Releasing {
		return nil
	}
	return markReleasing(w.StateDir, w.ID)
}

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

// Releaser releases endpoints, in the network namespace of the calling goroutine's thread.
type Releaser struct {
	StateDir string
	Pins     bpffs.Dir
	// Quarantine is how long freed addresses are not allocated again.
	Quarantine time.Duration
	// Unused says that the endpoint's addresses cannot have been in use, and need no quarantine.
	Unused bool
	// KeepState keeps the state file, marked as releasing: the ipam plugin that allocated the addresses has yet to be
	// called, with the configuration in the file.
	KeepState bool
	// Log gets what a release finds; nil: nothing is logged.
	Log *slog.Logger
	// Step is for tests, which make the work fail or die halfway: it is called with the name of each piece before that is
	// made, and with "release " and the name before it is removed. Its error ends the work.
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

// Release removes everything of an endpoint: the pieces in reverse and then its state file. What is gone already is no
// error. If a piece can't be removed, Release removes all others and returns the error; the state file then stays for
// another attempt, and so does the address of a link that could not be deleted. network is the one whose store is
// searched if there is no state file. The caller holds the node's lock (bpffs.Shared is enough); Release takes the
// endpoint's.
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
	if err = w.gather(network); err == nil {
		err = w.releasePieces()
	}
	if err != nil {
		return fmt.Errorf("release endpoint %s: %w", id, err)
	}
	return nil
}

// releaseKilled releases what a killed ADD of this attachment has left; the caller has made sure that no ADD runs.
func (w *Work) releaseKilled() error {
	_, err := w.Host.LinkByName(w.HostName)
	if errors.Is(err, device.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	return w.releaseLeftovers("link of an earlier ADD that never ended")
}

func (w *Work) releaseLeftovers(why string) error {
	w.log().Warn("releasing what is left of the attachment first", "reason", why)
	err := w.ReleaseLocked(w.ctx, w.ID, w.Network)
	w.WasUp = err != nil // then its addresses may have been in use
	return err
}

// removal is what a release finds out before it begins.
type removal struct {
	networks  []string
	written   bool  // there is a state file that can be read
	link      int   // index of the host-side link, 0: gone
	linkStays bool  // it could not be deleted
	indexes   []int // of the endpoint's link, now and in the state file
}

// releasePieces removes the pieces in reverse. The state file is marked first, so that the agent repairs nothing, and
// removed last, if everything else was.
func (w *Work) releasePieces() error {
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

// gather finds what is known of the endpoint: from the state file, from the link, and from the address store, which is
// all that a killed ADD may have written.
func (w *Work) gather(network string) error {
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

// readState reads the state file. Without one everything is found by name, but a file that cannot be read at the moment
// is an error: it may have what cannot be found otherwise.
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

// findRemains finds the host-side link by its name, which only this endpoint's can have, or else by the index in the
// state file. A link with this index is the endpoint's, renamed, only if the Ethernet address is the same: a state file
// from before a reboot would otherwise name another link.
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

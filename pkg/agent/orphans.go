package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
)

// apart is the least time between the two observations after which something that
// nobody needs any more is taken away: a DEL may be on its way.
const apart = 5 * time.Second

// orphans remembers what was found to be nobody's, and when first.
type orphans struct {
	first map[endpoint.ID]time.Time
	// linkless are endpoints without a link whose namespace is there, by when they were first seen so. Every DEL makes one
	// for a moment.
	linkless map[endpoint.ID]time.Time
	// kept are those of which nothing is left but the file that says how to give back
	// the addresses of another ipam plugin, which DEL or GC does.
	kept map[endpoint.ID]bool
}

func newOrphans() orphans {
	return orphans{first: map[endpoint.ID]time.Time{}, linkless: map[endpoint.ID]time.Time{}, kept: map[endpoint.ID]bool{}}
}

// releaseOrphans takes away endpoints whose link and namespace are gone, and
// addresses that no endpoint holds, on the second of two observations. It
// returns when to look again.
func (r *reconciler) releaseOrphans() (time.Duration, error) {
	found := map[endpoint.ID]string{} // with the network of each
	known, linkless := map[endpoint.ID]bool{}, map[endpoint.ID]endpoint.Endpoint{}
	for _, e := range r.view.endpoints {
		known[e.ID] = true
		switch l := r.view.links[e.HostIndex]; {
		case l.Name == e.HostName, e.Releasing && r.orphans.kept[e.ID]:
		case namespaceThere(e):
			linkless[e.ID] = e
		default:
			found[e.ID] = e.Network
		}
	}
	maps.DeleteFunc(r.orphans.kept, func(id endpoint.ID, _ bool) bool { return !known[id] })
	if err := r.findReservations(known, found); err != nil {
		return resync, err
	}
	now := time.Now()
	for id := range r.orphans.linkless {
		if _, still := linkless[id]; !still {
			r.settled(aboutEndpoint(id))
		}
	}
	due, next := seenTwice(r.orphans.linkless, linkless, now)
	for _, id := range due {
		e := linkless[id]
		r.complain(aboutEndpoint(id), fmt.Errorf("its link %s is gone; it stays for as long as its namespace %s is there", e.HostName, e.NetNS))
	}
	due, again := seenTwice(r.orphans.first, found, now)
	for _, id := range due {
		if !r.done(id, r.release(id, found[id])) {
			again = retry
		}
	}
	return min(next, again), nil
}

// seenTwice returns what is so now and was so at a look some time ago. first remembers since when; next is when to look
// again.
func seenTwice[V any](first map[endpoint.ID]time.Time, is map[endpoint.ID]V, now time.Time) (due []endpoint.ID, next time.Duration) {
	maps.DeleteFunc(first, func(id endpoint.ID, _ time.Time) bool { _, still := is[id]; return !still })
	next = resync
	for id := range is {
		since, seen := first[id]
		if !seen {
			since, first[id] = now, now
		}
		if left := apart - now.Sub(since); left > 0 {
			next = min(next, left)
		} else {
			due = append(due, id)
		}
	}
	return due, next
}

// namespaceThere tells whether the namespace in which an endpoint lived exists.
func namespaceThere(e endpoint.Endpoint) bool {
	var st unix.Stat_t
	if err := unix.Stat(e.NetNS, &st); err != nil {
		return !errors.Is(err, fs.ErrNotExist)
	}
	return st.Ino == e.NetNSInode
}

// findReservations adds addresses that are held for attachments without a state
// file and without a link: what an ADD that was killed early leaves.
func (r *reconciler) findReservations(known map[endpoint.ID]bool, found map[endpoint.ID]string) error {
	list, err := ipam.List(r.cfg.State)
	if err != nil {
		return err
	}
	names := map[string]bool{}
	for _, l := range r.view.links {
		names[l.Name] = true
	}
	for _, a := range list {
		id := endpoint.ID(a.Owner)
		if a.State == ipam.Used && !known[id] && id.Validate() == nil && !names[id.HostLinkName()] {
			found[id] = a.Network
		}
	}
	return nil
}

// release takes an endpoint away for good, if it still is nobody's.
func (r *reconciler) release(id endpoint.ID, network string) error {
	return r.holding(id, func() error {
		_, err := r.host.LinkByName(id.HostLinkName())
		if !errors.Is(err, device.ErrNotFound) {
			return err // it came to life
		}
		e, err := endpoint.Read(r.cfg.State, id)
		if err == nil && namespaceThere(e) {
			return nil
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, endpoint.ErrUnreadable) {
			return err
		}
		r.log.Warn("endpoint released: its link and its namespace are gone and no DEL came", "endpoint", id.String())
		delete(r.orphans.first, id)
		releaser := r.cfg.releaser()
		releaser.KeepState = len(e.IPAMConf) > 0
		err = releaser.ReleaseLocked(atOnce(), id, network)
		if err == nil && releaser.KeepState {
			r.orphans.kept[id] = true
		}
		return err
	})
}

func (c Config) releaser() endpoint.Releaser {
	return endpoint.Releaser{StateDir: c.State, Pins: c.BPFFS, Quarantine: c.Quarantine, Log: c.Log}
}

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

// releaseDelay is the least time between the two observations after which something
// that nobody needs any more is taken away: a DEL may be on its way.
const releaseDelay = 5 * time.Second

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
// addresses that no endpoint has, on the second of two observations.
func (c *endpointController) releaseOrphans(s *state) error {
	found := map[endpoint.ID]string{} // with the network of each
	known, linkless := map[endpoint.ID]bool{}, map[endpoint.ID]endpoint.Endpoint{}
	for _, e := range s.view.endpoints {
		known[e.ID] = true
		switch l := s.view.links[e.HostIndex]; {
		case l.Name == e.HostName, e.Releasing && c.orphans.kept[e.ID]:
		case namespaceThere(e):
			linkless[e.ID] = e
		default:
			found[e.ID] = e.Network
		}
	}
	maps.DeleteFunc(c.orphans.kept, func(id endpoint.ID, _ bool) bool { return !known[id] })
	if err := c.findReservations(s.view, known, found); err != nil {
		return err
	}
	left := map[string]bool{}
	for id := range known {
		left[id.String()] = true
	}
	for id := range found {
		left[id.String()] = true
	}
	c.complaints.forget("endpoints/pod ", func(name string) bool { return !left[name] })
	for id := range c.orphans.linkless {
		if _, still := linkless[id]; !still {
			c.complaints.note(aboutEndpoint(id), nil)
		}
	}
	now := time.Now()
	for _, id := range seenTwice(s, c.orphans.linkless, linkless, now) {
		e := linkless[id]
		c.complaints.note(aboutEndpoint(id), fmt.Errorf("the link %s of %s is gone; it is kept for as long as its namespace %s exists", e.HostName, e.Short(), e.NetNS))
	}
	for _, id := range seenTwice(s, c.orphans.first, found, now) {
		c.conclude(s, id, c.release(id, found[id]))
	}
	return nil
}

// seenTwice returns what is so now and was so at a look some time ago, and has the next look come in time for the
// others. first remembers since when.
func seenTwice[V any](s *state, first map[endpoint.ID]time.Time, is map[endpoint.ID]V, now time.Time) (due []endpoint.ID) {
	maps.DeleteFunc(first, func(id endpoint.ID, _ time.Time) bool { _, still := is[id]; return !still })
	for id := range is {
		since, seen := first[id]
		if !seen {
			since, first[id] = now, now
		}
		if left := releaseDelay - now.Sub(since); left > 0 {
			s.lookAgain(left)
		} else {
			due = append(due, id)
		}
	}
	return due
}

// namespaceThere reports whether the namespace in which an endpoint lived exists.
func namespaceThere(e endpoint.Endpoint) bool {
	var st unix.Stat_t
	if err := unix.Stat(e.NetNS, &st); err != nil {
		return !errors.Is(err, fs.ErrNotExist)
	}
	return st.Ino == e.NetNSInode
}

// findReservations adds addresses that are reserved for attachments without a state
// file and without a link: what an ADD that was killed early leaves.
func (c *endpointController) findReservations(v *view, known map[endpoint.ID]bool, found map[endpoint.ID]string) error {
	list, err := ipam.List(c.cfg.State)
	if err != nil {
		return err
	}
	names := map[string]bool{}
	for _, l := range v.links {
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
func (c *endpointController) release(id endpoint.ID, network string) error {
	return c.locked(id, func() error {
		_, err := c.host.LinkByName(id.HostLinkName())
		if !errors.Is(err, device.ErrNotFound) {
			return err // it came to life
		}
		e, err := endpoint.Read(c.cfg.State, id)
		if err == nil && namespaceThere(e) {
			return nil
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, endpoint.ErrUnreadable) {
			return err
		}
		c.log.Warn("endpoint released: its link and its namespace are gone and no DEL came", "endpoint", id.String(), "pod", e.Pod)
		delete(c.orphans.first, id)
		releaser := c.cfg.releaser()
		releaser.KeepState = len(e.IPAMConf) > 0
		err = releaser.ReleaseLocked(atOnce(), id, network)
		if err == nil && releaser.KeepState {
			c.orphans.kept[id] = true
		}
		return err
	})
}

func (c Config) releaser() endpoint.Releaser {
	return endpoint.Releaser{StateDir: c.State, Pins: c.BPFFS, Quarantine: c.Quarantine, Log: c.Log}
}

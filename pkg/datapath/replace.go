package datapath

import (
	"errors"
	"fmt"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

// replace replaces the running programs by the new ones. Between the first and the
// last attachment old and new programs run; when maps move, they write to different
// ones. What can get lost:
//
//   - Of existing flows: nothing. They are in both maps before the first
//     attachment changes, and the state of both is merged afterwards.
//   - Of flows that a pod opens meanwhile: replies are found, since a bridge runs
//     both programs on the uplinks (not on a kernel without tcx). A later packet
//     may meet the other program before the maps are merged: TCP repeats it, a UDP
//     flow may continue from another port.
//   - Of flows that the world opens towards a pod meanwhile: a reply may be
//     dropped, which TCP repeats.
//   - Of counters: what a program counts in the microseconds between reading and
//     writing the counter.
func (l *loader) replace() (err error) {
	olds, err := findAttachments(l.opts)
	if err != nil {
		return err
	}
	defer closeAttachments(olds)
	var done []attachment
	defer func() {
		if err != nil {
			err = errors.Join(err, l.restore(done))
		}
	}()
	if err := l.tables.Commit(); err != nil {
		return err
	}
	if err := l.at(stepCommitted); err != nil {
		return err
	}
	news, err := l.newPlaces(olds)
	if err != nil {
		return err
	}
	bridge, err := l.bridge(olds)
	defer bridge.close()
	if err != nil {
		return err
	}
	arrivals, others := splitArrivals(olds)
	for _, group := range [][]attachment{append(news, others...), arrivals} {
		for _, old := range group {
			// Before attaching, so that a failure halfway is undone too.
			done = append(done, old)
			if err := l.attach(old); err != nil {
				return err
			}
			if err := l.at(stepAttached); err != nil {
				return err
			}
		}
		if err := l.tables.Merge(); err != nil {
			return err
		}
		if err := l.at(stepMerged); err != nil {
			return err
		}
	}
	return l.tables.Done()
}

// newPlaces lists where programs that serve Services have to be and are not yet: pods that have none for the replies, which
// get it first, and the sockets of the node's own processes.
func (l *loader) newPlaces(olds []attachment) (news []attachment, err error) {
	if l.opts.NodeConfig.Services == 0 {
		return nil, nil
	}
	pods, err := ifindexes(l.opts.Dir.Map(devices.Name))
	has := map[attach.Place]bool{}
	for _, old := range olds {
		has[old.Place] = true
	}
	for _, i := range pods {
		if at := (attach.Place{Ifindex: i, Hook: attach.ToPod}); !has[at] && interfaceExists(i) {
			news = append(news, attachment{Place: at})
		}
	}
	for _, hook := range attach.SocketHooks() {
		if at := (attach.Place{Hook: hook}); !has[at] && l.opts.onSockets() {
			news = append(news, attachment{Place: at})
		}
	}
	return news, err
}

// attach replaces one program, or takes it off where these programs have no use for it. An interface that is gone
// meanwhile is no error.
func (l *loader) attach(old attachment) error {
	prog := l.programs[old.Hook.Program()]
	if prog == nil || old.Hook == attach.ToPod && l.opts.NodeConfig.Services == 0 {
		return errors.Join(l.opts.attacher().Detach(old.Ifindex, old.Hook), l.qdiscs.remove(old.Ifindex))
	}
	err := l.qdiscs.attach(l.opts.attacher(), old.Ifindex, old.Hook, prog)
	if err != nil && gone(old.Place) {
		return l.opts.attacher().Detach(old.Ifindex, old.Hook)
	}
	return err
}

// restore undoes a replacement that failed halfway. The flows that the new programs
// have opened are merged into the old maps.
func (l *loader) restore(done []attachment) error {
	var errs []error
	for _, old := range slices.Backward(done) {
		if old.mode == "" {
			errs = append(errs, l.opts.attacher().Detach(old.Ifindex, old.Hook), l.qdiscs.remove(old.Ifindex))
			continue
		}
		if old.prog == nil {
			errs = append(errs, fmt.Errorf("restore the old program on interface %d as %s: "+
				"it is not pinned, and opening it needs CAP_SYS_ADMIN", old.Ifindex, old.Hook))
			continue
		}
		back := l.opts.attacher()
		back.Mode, back.Cgroup = old.mode, l.opts.Cgroup
		if _, err := back.Attach(old.Ifindex, old.Hook, old.prog); err != nil && !gone(old.Place) {
			errs = append(errs, fmt.Errorf("restore the old program: %w", err))
		}
	}
	// After an error new programs may still run: their maps stay for the next start.
	failed := errors.Join(errs...)
	return errors.Join(failed, l.tables.Rollback(failed != nil))
}

// splitArrivals separates the attachments that see packets arriving at uplinks. They
// are replaced last: until then the bridge finds the flows of old and new programs.
func splitArrivals(all []attachment) (arrivals, others []attachment) {
	for _, a := range all {
		if a.Hook == attach.FromUplink || a.Hook == attach.FromL3 {
			arrivals = append(arrivals, a)
		} else {
			others = append(others, a)
		}
	}
	return arrivals, others
}

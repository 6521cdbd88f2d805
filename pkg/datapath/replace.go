package datapath

import (
	"errors"
	"fmt"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

// replace puts the new programs in the place of those that run. Between the
// first and the last attachment both kinds run; when maps move, they write to
// different ones. What that can lose:
//
//   - Flows that exist: nothing. They are in both maps before the first
//     attachment changes, and each direction's state is joined afterwards.
//   - Flows that a pod opens meanwhile: answers reach them, since a bridge has
//     the uplinks run both kinds for that time (not on a kernel without tcx). A
//     later packet may meet the other kind of program before the maps are joined:
//     TCP repeats it, a UDP flow may continue from another port.
//   - Flows that the world opens towards a pod meanwhile: the answer may be
//     dropped once, and TCP repeats it.
//   - Counters: what a program counts on a CPU in the microseconds between
//     the reading and the writing of that counter.
func (l *loader) replace() (err error) {
	olds, err := findAttachments(l.opts)
	if err != nil {
		return err
	}
	defer closeAttachments(olds)
	var done []attachment
	defer func() {
		if err != nil {
			err = errors.Join(err, l.putBack(done))
		}
	}()
	if err := l.tables.Commit(); err != nil {
		return err
	}
	if err := l.at(stepCommitted); err != nil {
		return err
	}
	bridge, err := l.bridge(olds)
	defer bridge.close()
	if err != nil {
		return err
	}
	arrivals, others := splitArrivals(olds)
	for _, group := range [][]attachment{others, arrivals} {
		for _, old := range group {
			// First, so that a failure halfway through it is undone too.
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

// attach replaces one program; one that left the node meanwhile is no failure.
func (l *loader) attach(old attachment) error {
	prog := l.programs[old.hook.Program()]
	if prog == nil {
		return l.opts.attacher().Detach(old.ifindex, old.hook)
	}
	err := l.qdiscs.attach(l.opts.attacher(), old.ifindex, old.hook, prog)
	if err != nil && !interfaceExists(old.ifindex) {
		return l.opts.attacher().Detach(old.ifindex, old.hook)
	}
	return err
}

// putBack undoes a replacement that failed halfway. The flows that the new
// programs opened go into the maps of before.
func (l *loader) putBack(done []attachment) error {
	var errs []error
	for _, old := range slices.Backward(done) {
		if old.prog == nil {
			errs = append(errs, fmt.Errorf("put the program of before back on interface %d as %s: "+
				"opening it, unpinned as it is, takes CAP_SYS_ADMIN", old.ifindex, old.hook))
			continue
		}
		back := attach.Attacher{Dir: l.opts.Dir, Mode: old.mode}
		if _, err := back.Attach(old.ifindex, old.hook, old.prog); err != nil && interfaceExists(old.ifindex) {
			errs = append(errs, fmt.Errorf("put the program of before back: %w", err))
		}
	}
	// Where putting back has failed new programs may still run: their maps stay for the next start.
	return errors.Join(append(errs, l.tables.GiveBack(len(errs) > 0))...)
}

// splitArrivals takes apart what sees the packets that arrive at uplinks. It is
// replaced last: until then the bridge answers for both kinds of programs.
func splitArrivals(all []attachment) (arrivals, others []attachment) {
	for _, a := range all {
		if a.hook == attach.FromUplink {
			arrivals = append(arrivals, a)
		} else {
			others = append(others, a)
		}
	}
	return arrivals, others
}

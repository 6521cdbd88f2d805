package agent

import (
	"errors"
	"fmt"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
)

// prepareUplinks adds to a view those uplinks, and addresses, that are away for a moment, and numbers all of them.
func (r *reconciler) prepareUplinks(v *view) error {
	if r.numbers == nil {
		entries, err := r.dp.Maps.Uplinks.Content()
		if err != nil {
			return err
		}
		r.numbers = numbers{}
		for k, e := range entries {
			r.numbers[k.Ifindex] = e.Bit
		}
		r.absences.recall(entries)
	}
	r.absences.bridge(v, len(r.cfg.Uplinks) > 0)
	if r.numbers.give(v.uplinks) > 0 {
		r.complain("uplinks' numbers", fmt.Errorf(
			"there are more than %d uplinks: what comes in over the last ones is not told apart by its source", uplinks.Bits))
	} else {
		r.settled("uplinks' numbers")
	}
	return nil
}

func (r *reconciler) uplinks() (typed.Sync[uplinks.Key, uplinks.Value], error) {
	have, err := r.dp.Maps.Uplinks.Content()
	return typed.Sync[uplinks.Key, uplinks.Value]{Map: r.dp.Maps.Uplinks, Have: have}, err
}

// writeUplinks writes the addresses to masquerade to.
func (r *reconciler) writeUplinks() error {
	r.absences.masqueraded(r.result.Uplinks)
	s, err := r.uplinks()
	if err != nil {
		return err
	}
	return s.Add(r.result.Uplinks)
}

// attachUplinks puts the programs onto interfaces that have become uplinks. Each
// has an entry in the map for as long as programs may be on it, however this
// process ends: by that they are found again. Until they are there, the entry has
// no address to masquerade to.
func (r *reconciler) attachUplinks() error {
	var errs []error
	for _, l := range r.view.uplinks {
		err := r.dp.Maps.Uplinks.Insert(uplinks.Key{Ifindex: l.Index}, uplinks.Value{Bit: l.Bit})
		if err != nil && !errors.Is(err, typed.ErrKeyExist) {
			errs = append(errs, err)
			continue
		}
		if err := r.dp.AttachUplink(int(l.Index)); err != nil {
			errs = append(errs, err)
			continue
		}
		if r.attached[l.Index] != l.Name {
			r.log.Info("uplink", "interface", l.Name, "ifindex", l.Index, "mtu", l.MTU)
		}
		r.attached[l.Index] = l.Name
	}
	if len(r.view.uplinks) == r.view.away {
		r.complain("uplinks", errors.New("no route leads out of this node over an Ethernet interface, or none of --uplink exists"))
	} else {
		r.settled("uplinks")
	}
	return errors.Join(errs...)
}

// detachUplinks takes the programs off interfaces that no longer lead out, those
// of an earlier run included.
func (r *reconciler) detachUplinks() error {
	uplink := map[int]bool{}
	for _, l := range r.view.uplinks {
		uplink[int(l.Index)] = true
	}
	all, err := r.dp.Attachments()
	if err != nil {
		return err
	}
	errs, left := []error{}, map[int]bool{}
	for _, a := range all {
		if uplink[a.Ifindex] || !isUplinkHook(a.Hook) {
			continue
		}
		r.log.Info("no longer an uplink", "interface", r.attached[uint32(a.Ifindex)], "ifindex", a.Ifindex)
		if err := r.dp.DetachUplink(a.Ifindex); err != nil {
			errs = append(errs, err)
			left[a.Ifindex] = true
		}
	}
	errs = append(errs, r.deleteUplinks(left))
	for index := range r.attached {
		if !uplink[int(index)] {
			delete(r.attached, index)
		}
	}
	return errors.Join(errs...)
}

// deleteUplinks removes the entries of interfaces that are no uplinks, but for
// those on which programs are left.
func (r *reconciler) deleteUplinks(left map[int]bool) error {
	s, err := r.uplinks()
	if err != nil {
		return err
	}
	return s.Remove(func(k uplinks.Key, _ uplinks.Value) bool {
		_, wanted := r.result.Uplinks[k]
		return wanted || left[int(k.Ifindex)]
	})
}

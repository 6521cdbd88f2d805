package agent

import (
	"errors"
	"fmt"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// uplinkController owns the uplinks: which they are, also while one is away for a
// moment, their numbers, the programs on them and the map.
type uplinkController struct {
	*node
	attached map[uint32]string // the names of those with our programs, by index
	absences *absences
	numbers  numbers // nil until the first look
}

// complete adds to a view those uplinks, and addresses, that are away for a moment, and numbers all of them.
func (c *uplinkController) complete(v *view) error {
	if c.numbers == nil {
		entries, err := c.dp.Maps.Uplinks.Content()
		if err != nil {
			return err
		}
		c.numbers = numbers{}
		for k, e := range entries {
			c.numbers[k.Ifindex] = e.Bit
		}
		c.absences.recall(entries)
	}
	c.absences.addAbsent(v, len(c.cfg.Uplinks) > 0)
	var err error
	if c.numbers.give(v.uplinks) > 0 {
		err = fmt.Errorf("there are more than %d uplinks: the last ones share a number, so each of those accepts the sources of all", uplinks.Bits)
	}
	c.complaints.note("uplinks/numbers", err)
	return nil
}

// attach puts the programs onto interfaces that have become uplinks. Each has an
// entry in the map for as long as programs may be on it, however this process
// ends: by that they are found again. Until they are there, the entry has no
// address to masquerade to.
func (c *uplinkController) attach(s *state) error {
	failed := map[uint32]error{}
	for _, l := range s.view.uplinks {
		err := c.dp.Maps.Uplinks.Insert(uplinks.Key{Ifindex: l.Index}, uplinks.Value{Bit: l.Bit})
		if err != nil && !errors.Is(err, typed.ErrKeyExist) {
			failed[l.Index] = err
			continue
		}
		if err := c.dp.AttachUplink(int(l.Index)); err != nil {
			failed[l.Index] = err
			continue
		}
		if c.attached[l.Index] != l.Name {
			c.log.Info("uplink", "interface", l.Name, "ifindex", l.Index, "mtu", l.MTU)
		}
		c.attached[l.Index] = l.Name
	}
	var none error
	if len(s.view.uplinks) == s.view.away {
		none = errors.New("no route leads out of this node over an Ethernet interface, or none of --uplink exists")
	}
	c.complaints.note("uplinks/none", none)
	return uplinkErrors(s, failed)
}

// uplinkErrors joins failures with uplinks. Those with uplinks that pods need, or with all there are, are obstacles.
func uplinkErrors(s *state, failed map[uint32]error) error {
	if len(failed) == 0 {
		return nil
	}
	var errs []error
	needed := s.neededUplinks()
	for _, l := range s.view.uplinks {
		err, has := failed[l.Index]
		if !has {
			continue
		}
		err = fmt.Errorf("uplink %s: %w", l.Name, err)
		if needed[l.Index] || len(failed) == len(s.view.uplinks) {
			err = hinder(err)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// neededUplinks are those that lead to pods of other nodes, or to the whole world.
func (s *state) neededUplinks() map[uint32]bool {
	needed := map[uint32]bool{}
	for _, d := range s.plan.Destinations {
		if d.Kind == destinations.PodCIDR {
			needed[d.Ifindex] = true
		}
	}
	for _, r := range s.view.routes {
		if r.Dst.Bits() == 0 {
			for _, index := range append([]int{r.Index}, r.Hops...) {
				needed[uint32(index)] = true
			}
		}
	}
	return needed
}

func (c *uplinkController) entries() (typed.Sync[uplinks.Key, uplinks.Value], error) {
	have, err := c.dp.Maps.Uplinks.Content()
	return typed.Sync[uplinks.Key, uplinks.Value]{Map: c.dp.Maps.Uplinks, Have: have}, err
}

// writeAddresses writes the addresses to masquerade to.
func (c *uplinkController) writeAddresses(s *state) error {
	c.absences.noteAddresses(s.plan.Uplinks)
	entries, err := c.entries()
	if err != nil {
		return err
	}
	return entries.Add(s.plan.Uplinks)
}

// detach takes the programs off interfaces that no longer lead out, those of an
// earlier run included.
func (c *uplinkController) detach(s *state) error {
	s.lookAgain(c.absences.nextEnd(s.view, resync))
	uplink := map[int]bool{}
	for _, l := range s.view.uplinks {
		uplink[int(l.Index)] = true
	}
	if !s.whole && !c.anyFormer(uplink) {
		return nil
	}
	all, err := c.dp.Attachments(attach.UplinkHooks()...)
	if err != nil {
		return err
	}
	former := map[int]bool{}
	for _, a := range all {
		if !uplink[a.Ifindex] {
			former[a.Ifindex] = true
		}
	}
	errs, left := []error{}, map[int]bool{}
	for index := range former {
		c.log.Info("no longer an uplink", "interface", c.attached[uint32(index)], "ifindex", index)
		if err := c.dp.DetachUplink(index); err != nil {
			errs = append(errs, err)
			left[index] = true
		}
	}
	errs = append(errs, c.deleteEntries(s, left))
	for index := range c.attached {
		if !uplink[int(index)] {
			delete(c.attached, index)
		}
	}
	return errors.Join(errs...)
}

// anyFormer reports whether an interface has our programs as far as is known, and is no uplink.
func (c *uplinkController) anyFormer(uplink map[int]bool) bool {
	for index := range c.attached {
		if !uplink[int(index)] {
			return true
		}
	}
	return false
}

// deleteEntries removes the entries of interfaces that are no uplinks, but for
// those on which programs are left.
func (c *uplinkController) deleteEntries(s *state, left map[int]bool) error {
	entries, err := c.entries()
	if err != nil {
		return err
	}
	return entries.Remove(func(k uplinks.Key, _ uplinks.Value) bool {
		_, wanted := s.plan.Uplinks[k]
		return wanted || left[int(k.Ifindex)]
	})
}

// inspect attaches again what has been taken off an uplink.
func (c *uplinkController) inspect(s *state) error {
	var errs []error
	for _, l := range s.view.uplinks {
		if c.attached[l.Index] == "" {
			continue // the map has no room for it
		}
		for _, hook := range attach.UplinkHooks() {
			errs = append(errs, c.attachAgain(l, hook))
		}
	}
	return errors.Join(errs...)
}

func (c *uplinkController) attachAgain(l plan.Link, hook attach.Hook) error {
	index := int(l.Index)
	if ok, err := c.dp.Attached(index, hook); ok || err != nil {
		return nil //nolint:nilerr // what can't be found out is for the next pass
	}
	if _, err := c.host.LinkByIndex(index); err != nil {
		return nil //nolint:nilerr // the link is going, of which the kernel notifies us
	}
	if err := c.dp.Attach(index, hook); err != nil {
		return err
	}
	c.status.repaired(repairedUplink, 1)
	c.log.Warn("program attached again", "interface", l.Name, "hook", string(hook))
	return nil
}

// numbers are those that stand for uplinks in the masks of destinations, by index. One keeps its own for as long as it
// is an uplink.
type numbers map[uint32]uint32

// give numbers the uplinks. It reports how many there are beyond those that can be distinguished: they share the last number.
func (n numbers) give(links []plan.Link) (beyond int) {
	now := make(map[uint32]bool, len(links))
	for _, l := range links {
		now[l.Index] = true
	}
	for index := range n {
		if !now[index] {
			delete(n, index)
		}
	}
	const last = uplinks.Bits - 1
	var taken [uplinks.Bits]bool
	unnumbered := make([]int, 0, len(links))
	for i, l := range links {
		bit, has := n[l.Index]
		if !has || bit > last || taken[bit] && bit != last { // as an earlier version left them
			unnumbered = append(unnumbered, i)
			continue
		}
		taken[bit], links[i].Bit = true, bit
	}
	for _, i := range unnumbered {
		bit := uint32(0)
		for bit < last && taken[bit] {
			bit++
		}
		n[links[i].Index], taken[bit], links[i].Bit = bit, true, bit
	}
	return max(0, len(links)-uplinks.Bits)
}

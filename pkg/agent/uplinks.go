package agent

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/sources"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// uplinkController owns the uplinks: which they are, also while one is away for a
// moment, their numbers, the programs on them and the map.
type uplinkController struct {
	*node
	attached map[uint32]string // the names of those with our programs, by index; empty: an earlier agent's
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
			c.numbers[k.Ifindex], c.attached[k.Ifindex] = e.Bit, ""
		}
		exceptions, err := c.exceptions()
		if err != nil {
			return err
		}
		c.absences.recall(entries, exceptions.Have)
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
	fit, left := c.choose(s)
	fresh := 0
	for _, l := range fit {
		err := c.insert(s, l)
		if err == nil && !c.loaded(l) {
			continue
		}
		if err == nil {
			err = c.dp.AttachUplink(int(l.Index), uplinkHooks(l))
		}
		if err == nil {
			if c.attached[l.Index] != l.Name {
				if fresh++; fresh <= mostLines {
					c.log.Info("uplink", "interface", l.Name, "ifindex", l.Index, "mtu", l.MTU)
				}
			}
			c.attached[l.Index] = l.Name
		} else if _, gone := c.host.LinkByIndex(int(l.Index)); gone == nil { // else it is going, of which the kernel notifies us
			failed[l.Index] = err
		}
	}
	if fresh > mostLines {
		c.log.Info("more uplinks", "number", fresh-mostLines)
	}
	var none error
	if len(s.view.uplinks) == s.view.away {
		none = errors.New("no route leads out of this node over an interface that can be an uplink, or none of --uplink exists")
	}
	c.complaints.note("uplinks/none", none)
	return errors.Join(uplinkErrors(s, fit, failed), c.tooMany(s, left))
}

// choose divides the uplinks into those that the map has room for and those that are left: the ones that pods need come
// first, then the ones that have programs.
func (c *uplinkController) choose(s *state) (fit, left []plan.Link) {
	all, room := s.view.uplinks, int(c.dp.Maps.Uplinks.MaxEntries())
	if len(all) <= room {
		return all, nil
	}
	needed := s.neededUplinks()
	rank := func(l plan.Link) (r int) {
		if !needed[l.Index] {
			r = 2
		}
		if _, has := c.attached[l.Index]; !has {
			r++
		}
		return r
	}
	all = slices.Clone(all)
	slices.SortStableFunc(all, func(a, b plan.Link) int { return cmp.Compare(rank(a), rank(b)) })
	return all[:room], all[room:]
}

// insert gives an uplink its entry. If the map is full, it is of uplinks that are not to be in it: they make room now,
// and what fails of that is said when they are detached.
func (c *uplinkController) insert(s *state, l plan.Link) error {
	for retried := false; ; retried = true {
		err := c.dp.Maps.Uplinks.Insert(uplinks.Key{Ifindex: l.Index}, l.Entry())
		if errors.Is(err, typed.ErrKeyExist) {
			return nil
		}
		if retried || !errors.Is(err, typed.ErrFull) {
			return err
		}
		_ = c.detachOthers(s)
	}
}

// tooMany says which uplinks have no programs because the map has no room for them: an obstacle if pods need one of them.
func (c *uplinkController) tooMany(s *state, left []plan.Link) error {
	if len(left) == 0 {
		return nil
	}
	needed, names, others := s.neededUplinks(), []string{}, ""
	for _, l := range left {
		names = append(names, l.Name)
	}
	if more := len(names) - mostLines; more > 0 {
		names, others = names[:mostLines], fmt.Sprintf(" and %d more", more)
	}
	err := fmt.Errorf("map %s %w (%d entries), and others are needed more: no programs on %s%s; --uplink names those that count",
		uplinks.Name, typed.ErrFull, c.dp.Maps.Uplinks.MaxEntries(), strings.Join(names, ", "), others)
	if slices.ContainsFunc(left, func(l plan.Link) bool { return needed[l.Index] }) {
		return hinder(err)
	}
	return err
}

// uplinkErrors joins failures with uplinks. Those with uplinks that pods need, or with all there are, are obstacles.
func uplinkErrors(s *state, all []plan.Link, failed map[uint32]error) error {
	if len(failed) == 0 {
		return nil
	}
	var errs []error
	needed := s.neededUplinks()
	for _, l := range all {
		err, has := failed[l.Index]
		if !has {
			continue
		}
		err = fmt.Errorf("uplink %s: %w", l.Name, err)
		if needed[l.Index] || len(failed) == len(all) {
			err = hinder(err)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// neededUplinks are those that lead to pods of other nodes, or to the whole world.
func (s *state) neededUplinks() map[uint32]bool { return s.uplinksFor(s.plan.Destinations) }

// uplinksFor are those that pods' packets to these destinations and to the world take.
func (s *state) uplinksFor(to map[destinations.Key]destinations.Value) map[uint32]bool {
	needed := map[uint32]bool{}
	for _, d := range to {
		if d.Kind == destinations.PodCIDR {
			needed[d.Ifindex] = true
		}
	}
	for _, r := range slices.Concat(s.view.routes, s.view.others) {
		if r.Dst.Bits() == 0 && s.view.of(r.Dst.Addr()) {
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

// writeAddresses writes the addresses to masquerade to into the entries that there are.
func (c *uplinkController) writeAddresses(s *state) error {
	c.absences.noteAddresses(s.plan.Uplinks, s.plan.Exceptions)
	entries, err := c.entries()
	if err != nil {
		return err
	}
	exceptions, err := c.exceptions()
	if err != nil {
		return err
	}
	want, apart := maps.Clone(s.plan.Uplinks), s.plan.Exceptions
	maps.DeleteFunc(want, func(k uplinks.Key, _ uplinks.Value) bool { _, there := entries.Have[k]; return !there })
	for _, l := range s.view.uplinks {
		if c.loaded(l) {
			continue
		}
		// Until its programs can translate answers, pods' packets over it are dropped.
		delete(want, uplinks.Key{Ifindex: l.Index})
		apart = maps.Clone(apart)
		maps.DeleteFunc(apart, func(k sources.Key, _ sources.Value) bool { return k.Ifindex == l.Index })
	}
	c.tellChanges(s.view, choices(entries.Have, exceptions.Have), choices(want, apart))
	return errors.Join(
		exceptions.Add(apart), entries.Add(want),
		exceptions.Remove(func(k sources.Key, _ sources.Value) bool { _, is := apart[k]; return is }),
	)
}

// detach takes the programs off interfaces that no longer lead out, or for which the
// map has no room, those of an earlier run included.
func (c *uplinkController) detach(s *state) error {
	s.lookAgain(c.absences.nextEnd(s.view, resync))
	if !s.whole && !c.anyOther(c.chosen(s)) {
		return nil
	}
	return c.detachOthers(s)
}

// chosen are the interfaces that are to have our programs.
func (c *uplinkController) chosen(s *state) map[int]bool {
	chosen := map[int]bool{}
	fit, _ := c.choose(s)
	for _, l := range fit {
		chosen[int(l.Index)] = true
	}
	return chosen
}

func (c *uplinkController) detachOthers(s *state) error {
	all, err := c.dp.Attachments(slices.Concat(attach.UplinkHooks(), attach.BareHooks())...)
	if err != nil {
		return err
	}
	chosen, others := c.chosen(s), map[int]bool{}
	for _, a := range all {
		if !chosen[a.Ifindex] {
			others[a.Ifindex] = true
		}
	}
	errs, left := []error{}, map[int]bool{}
	for index := range c.attached {
		if !chosen[int(index)] {
			others[int(index)] = true // a link that is gone has left its pins
		}
	}
	for index := range others {
		c.log.Info("no longer an uplink", "interface", c.attached[uint32(index)], "ifindex", index)
		if err := c.dp.DetachUplink(index); err != nil {
			errs = append(errs, err)
			left[index] = true
		}
	}
	errs = append(errs, c.deleteEntries(s, left))
	for index := range c.attached {
		if !chosen[int(index)] {
			delete(c.attached, index)
		}
	}
	return errors.Join(errs...)
}

// anyOther reports whether an interface has our programs as far as is known, and is not to have them.
func (c *uplinkController) anyOther(chosen map[int]bool) bool {
	for index := range c.attached {
		if !chosen[int(index)] {
			return true
		}
	}
	return false
}

// deleteEntries removes the entries of interfaces that are not to have our programs,
// but for those on which programs are left.
func (c *uplinkController) deleteEntries(s *state, left map[int]bool) error {
	entries, err := c.entries()
	if err != nil {
		return err
	}
	chosen := c.chosen(s)
	return entries.Remove(func(k uplinks.Key, _ uplinks.Value) bool {
		return chosen[int(k.Ifindex)] || left[int(k.Ifindex)]
	})
}

// inspect attaches again what has been taken off an uplink.
func (c *uplinkController) inspect(s *state) error {
	var errs []error
	for _, l := range s.view.uplinks {
		if c.attached[l.Index] == "" {
			continue // it has never had them, or the map has no room for it
		}
		for _, hook := range uplinkHooks(l) {
			errs = append(errs, c.attachAgain(int(l.Index), l.Name, hook, repairedUplink))
		}
	}
	return errors.Join(errs...)
}

// CheckUplink returns why no interface of that name can be an uplink.
func CheckUplink(name string) error {
	host, err := device.Open()
	if err != nil {
		return err
	}
	defer host.Close()
	l, err := host.LinkByName(name)
	switch {
	case errors.Is(err, device.ErrNotFound):
		return fmt.Errorf("there is no interface %q", name)
	case err != nil:
		return err
	case !canLeadOut(l):
		return fmt.Errorf("%s is not an interface that can be an uplink: neither Ethernet nor one of IP packets alone, or a tunnel without a far end", name)
	}
	return nil
}

// loaded reports whether there are programs for the uplink. Those for one without an Ethernet header come a moment later (modeController).
func (c *uplinkController) loaded(l plan.Link) bool {
	return c.dp.Program(uplinkHooks(l)[0].Program()) != nil
}

// uplinkHooks are those whose programs read what is on the uplink.
func uplinkHooks(l plan.Link) []attach.Hook {
	if l.Bare {
		return attach.BareHooks()
	}
	return attach.UplinkHooks()
}

// attachAgain attaches a program that has been taken off an interface.
func (n *node) attachAgain(index int, name string, hook attach.Hook, what string) error {
	if ok, err := n.dp.Attached(index, hook); ok || err != nil {
		return nil //nolint:nilerr // what can't be found out is for the next pass
	}
	if _, err := n.host.LinkByIndex(index); err != nil {
		return nil //nolint:nilerr // the link is going, of which the kernel notifies us
	}
	if err := n.dp.Attach(index, hook); err != nil {
		return err
	}
	n.status.repaired(what, 1)
	n.log.Warn("program attached again", "interface", name, "hook", string(hook))
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

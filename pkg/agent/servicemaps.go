package agent

import (
	"errors"
	"fmt"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// serviceMaps reads and writes the maps of Services. Nobody else writes them.
type serviceMaps struct {
	*datapath.Maps
	// sets, backends and slots are how many of each array have been in use: beyond there is nothing to compare.
	sets, backends, slots int
}

func (m *serviceMaps) capacities() service.Capacities {
	return service.Capacities{
		Services: m.Services.MaxEntries(), Ranges: m.SourceRanges.MaxEntries(), Sets: m.Sets.MaxEntries(), Backends: m.Backends.MaxEntries(), Slots: m.Slots.MaxEntries(),
	}
}

// readAll reads everything, as another agent may have left it. Of the slots, by far the most, that is as far as blocks reach:
// what lies beyond is written before a set names it.
func (m *serviceMaps) readAll() (service.Content, error) {
	sets, err := m.Sets.Values(int(m.Sets.MaxEntries()))
	if err != nil {
		return service.Content{}, err
	}
	m.sets, m.backends, m.slots = used(sets), int(m.Backends.MaxEntries()), 0
	for _, s := range sets {
		if of := s.Block.Cluster() + s.Block.Local(); of > 0 {
			m.slots = max(m.slots, int(s.Block.First()+of))
		}
	}
	m.slots = min(m.slots, int(m.Slots.MaxEntries()))
	c, err := m.read()
	m.backends = used(c.Backends)
	return c, err
}

// read reads all that has been in use.
func (m *serviceMaps) read() (c service.Content, err error) {
	if c.Services, err = m.Services.Content(); err != nil {
		return c, err
	}
	if c.Ranges, err = m.SourceRanges.Content(); err != nil {
		return c, err
	}
	if c.Names, err = m.SetNames.Content(); err != nil {
		return c, err
	}
	if c.Sets, err = m.Sets.Values(m.sets); err != nil {
		return c, err
	}
	if c.Backends, err = m.Backends.Values(m.backends); err != nil {
		return c, err
	}
	c.Slots, err = m.Slots.Values(m.slots)
	return c, err
}

// used is how many values there are up to the last one that is not zero.
func used[V comparable](values []V) int {
	var zero V
	n := len(values)
	for n > 0 && values[n-1] == zero {
		n--
	}
	return n
}

// include counts what is to be written as in use, whether or not it comes about.
func (m *serviceMaps) include(w service.Writes) {
	for _, k := range w.Sets.Keys {
		m.sets = max(m.sets, int(k.Set)+1)
	}
	for _, k := range w.Backends.Keys {
		m.backends = max(m.backends, int(k.Backend)+1)
	}
	for _, k := range w.Slots.Keys {
		m.slots = max(m.slots, int(k.Slot)+1)
	}
}

// write carries writes out, in the order in which packets need them. What follows a list that could not be written in full is
// left: packets could find it and meet what is missing.
func (m *serviceMaps) write(w service.Writes) error {
	for _, list := range []func() error{
		putter(m.Backends, w.Backends), putter(m.Slots, w.Slots), putter(m.Sets, w.Sets), putter(m.SetNames, w.Names), putter(m.SourceRanges, w.Ranges),
		putter(m.Services, w.Services), deleter(m.Services, w.GoneServices), deleter(m.SourceRanges, w.GoneRanges), deleter(m.SetNames, w.GoneNames), putter(m.Sets, w.EmptiedSets), putter(m.Backends, w.Retired),
	} {
		if err := list(); err != nil {
			return fmt.Errorf("write the maps of Services: %w", err)
		}
	}
	return nil
}

func putter[K comparable, V any](m *typed.Map[K, V], b service.Batch[K, V]) func() error {
	return func() error { return m.PutAll(b.Keys, b.Values) }
}

func deleter[K comparable, V any](m *typed.Map[K, V], gone service.Gone[K]) func() error {
	return func() error { return m.DeleteAll(gone) }
}

// holdWorld makes the entry by which flows of the world and of the node itself are counted, and neighbours that are asked for because
// of what comes from elsewhere; it says whether it had to.
func (n *node) holdWorld() (made bool, err error) {
	err = n.dp.Maps.Devices.Insert(devices.Key{Ifindex: devices.World}, devices.Value{})
	if errors.Is(err, typed.ErrKeyExist) {
		return false, nil
	}
	return err == nil, err
}

// inspectWorld puts that entry back: without it nobody outside is served, and the plugin of a build that does not know it takes it
// for a pod's that is gone.
func (l *loop) inspectWorld(*state) error {
	if l.services == nil {
		return nil
	}
	made, err := l.holdWorld()
	if made {
		l.status.repaired(repairedService, 1)
		l.log.Warn("the entry of the world in the map of devices restored")
	}
	return err
}

// forgetWorld removes the entry by which flows of the world are counted: without it, programs know no such holder.
func forgetWorld(maps *datapath.Maps) error {
	err := maps.Devices.Delete(devices.Key{Ifindex: devices.World})
	if errors.Is(err, typed.ErrKeyNotExist) {
		return nil
	}
	return err
}

// emptyServices removes what an agent has left that served Services, where this one does not: programs that translate again one
// day must not begin with it.
func emptyServices(maps *datapath.Maps) error {
	if err := forgetWorld(maps); err != nil {
		return err
	}
	m := serviceMaps{Maps: maps}
	if left, err := m.Services.Content(); err != nil || len(left) == 0 {
		return err
	}
	content, err := m.readAll()
	if err != nil {
		return err
	}
	nothing := service.NewModel()
	nothing.Apply(service.Update{Complete: true})
	state := service.Load(service.Options{Capacities: m.capacities()}, content)
	w := state.Plan(nothing, nil, time.Now())
	frontends := w.GoneServices
	w.GoneServices = nil
	if err := m.write(w); err != nil {
		return err
	}
	// Last, though no program looks for them: should this start not get through, another sees that something is left.
	return m.write(service.Writes{GoneServices: frontends})
}

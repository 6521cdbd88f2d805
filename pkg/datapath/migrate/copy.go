package migrate

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/raw"
)

// source is a map whose content moves into another one.
type source struct {
	m *ebpf.Map
	// leftover: an interrupted upgrade created the map, so it lacks what the agent
	// and the plugin have written since.
	leftover bool
	// base has the source's counters as of the last pass, which the new map includes.
	base map[string]raw.Value
	// merged: programs have added to the new map's counters since then, too.
	merged bool
	// digests tell which entries of a flow table have changed since the last pass.
	digests *digests
}

// fill copies the content of the sources into the new map. No running program uses
// that yet, so a second pass may replace and remove entries to catch up with what
// has changed since the first.
func (t *table) fill() error {
	if t.empty() {
		return nil
	}
	if t.live {
		return t.merge()
	}
	for _, s := range t.sources {
		var err error
		switch {
		case s.leftover:
			err = t.mergeFrom(s)
		case t.Flows != nil:
			err = t.mirrorFlows(s)
		default:
			err = t.mirror(s)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// mirror makes the map a copy of the source.
func (t *table) mirror(s *source) error {
	first := s.base == nil
	s.base = make(map[string]raw.Value)
	err := raw.Each(s.m, func(key []byte, v raw.Value) error {
		if first && raw.IsArray(t.m) && v.Zero() && len(t.counters) == 0 { // as it is in a new map
			return nil
		}
		if len(t.counters) > 0 {
			s.base[string(key)] = v.Resized(len(v[0]))
		}
		return t.write(key, v)
	})
	if err != nil {
		return err
	}
	return prune(t.m, s.m)
}

// write makes v the value of key in a map that only we write.
func (t *table) write(key []byte, v raw.Value) error {
	have, err := raw.Lookup(t.m, key)
	if err != nil {
		return err
	}
	want := v.Resized(int(t.m.ValueSize()))
	if have.Equal(want) {
		return nil
	}
	if raw.IsArray(t.m) && have == nil && v.Zero() {
		return nil
	}
	return t.writeError(raw.Update(t.m, key, want, ebpf.UpdateAny))
}

// prune deletes from m the entries that are not in truth.
func prune(m, truth *ebpf.Map) error {
	if raw.IsArray(m) {
		return nil
	}
	return pruneIf(m, func(key []byte) (bool, error) {
		v, err := raw.Lookup(truth, key)
		return v == nil && err == nil, err
	})
}

// merge merges what the old programs have written since the last pass into a map
// that the new programs write to.
func (t *table) merge() error {
	for _, s := range t.sources {
		if err := t.mergeFrom(s); err != nil {
			return err
		}
	}
	return nil
}

func (t *table) mergeFrom(s *source) error {
	if t.empty() || s.leftover && t.configured() {
		return nil
	}
	m := merging{table: t, base: s.base, counted: make(map[string]raw.Value)}
	if t.Flows != nil && !s.leftover {
		if s.digests == nil {
			s.digests = newDigests()
		}
		m.digests = s.digests
	}
	if err := m.into(t.m, s.m); err != nil {
		return err
	}
	s.base, s.merged = m.counted, true
	if t.configured() {
		return prune(t.m, s.m)
	}
	return nil
}

// rollback merges what the new programs have written into the old map.
func (t *table) rollback() error {
	if t.pinned || !t.moves() || t.Flows == nil && len(t.counters) == 0 {
		return nil
	}
	s := t.sources[0]
	m := merging{table: t, base: s.base}
	if s.merged {
		m.base = nil
	}
	return m.into(s.m, t.m)
}

// merging is one pass over a map, whose entries are combined with those of another.
type merging struct {
	*table
	base map[string]raw.Value
	// counted, unless nil, gets the counters as read.
	counted map[string]raw.Value
	// digests, unless nil, tell which entries have not changed.
	digests *digests
}

// into combines every entry of src with dst's. A missing entry is inserted, never
// overwriting one that a program inserts at that moment.
func (m merging) into(dst, src *ebpf.Map) error {
	err := raw.Each(src, func(key []byte, v raw.Value) error {
		if m.configured() && raw.IsArray(src) && v.Zero() { // most of a large one is unused
			return nil
		}
		if m.counted != nil && len(m.counters) > 0 {
			m.counted[string(key)] = v.Resized(len(v[0]))
		}
		if m.digests != nil && !m.digests.note(key, v) {
			return nil
		}
		have, err := raw.Lookup(dst, key)
		if err != nil {
			return err
		}
		if have == nil {
			return m.insertMissing(dst, key, v)
		}
		want := m.combine(have, v, m.base[string(key)])
		if have.Equal(want) {
			return nil
		}
		return ignore(raw.Update(dst, key, want, updateFlag(dst)), ebpf.ErrKeyNotExist)
	})
	if err != nil {
		return fmt.Errorf("merge into map %s: %w", m.Name, err)
	}
	return nil
}

func (m merging) insertMissing(dst *ebpf.Map, key []byte, v raw.Value) error {
	if raw.IsArray(dst) || m.gone(v) {
		return nil
	}
	return ignore(raw.Update(dst, key, v.Resized(int(dst.ValueSize())), ebpf.UpdateNoExist), ebpf.ErrKeyExist)
}

// updateFlag does not bring back an entry that was deleted a moment ago.
func updateFlag(m *ebpf.Map) ebpf.MapUpdateFlags {
	if raw.IsArray(m) {
		return ebpf.UpdateAny
	}
	return ebpf.UpdateExist
}

func ignore(err, harmless error) error {
	if errors.Is(err, harmless) {
		return nil
	}
	return err
}

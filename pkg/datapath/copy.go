package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// source is a map whose content moves into another one.
type source struct {
	m *ebpf.Map
	// left says that an interrupted upgrade made the map: what the agent and the
	// plugin write is not in it.
	left bool
	// base holds the source's counters as they were when the other map last held
	// all that they say.
	base map[string]value
	// merged says that the other map has counted too since then.
	merged bool
}

func newSource(m *ebpf.Map) *source { return &source{m: m} }

// fill brings what the sources say into the map that takes over. Running
// programs don't know that map yet, so a second pass may replace and remove:
// it catches up with what happened since the first.
func (t *table) fill() error {
	if t.live {
		return t.merge()
	}
	for _, s := range t.sources {
		kind := contentOf(t.name, t.spec)
		if s.left {
			if err := t.mergeFrom(s); err != nil {
				return err
			}
			continue
		}
		if err := t.mirror(s, kind); err != nil {
			return err
		}
	}
	return nil
}

// mirror makes the map a copy of the source.
func (t *table) mirror(s *source, kind content) error {
	s.base = make(map[string]value)
	err := each(s.m, func(key []byte, v value) error {
		if kind == flows && gone(t.name, v[0]) {
			return nil
		}
		if kind.counts() {
			s.base[string(key)] = v.clone()
		}
		return t.write(key, v)
	})
	if err != nil {
		return err
	}
	return prune(t.m, s.m)
}

// write makes v the value of key in a map that only we write.
func (t *table) write(key []byte, v value) error {
	have, err := lookup(t.m, key)
	if err != nil {
		return err
	}
	want := v.resized(int(t.m.ValueSize()))
	if have.equal(want) {
		return nil
	}
	if isArray(t.m) && have == nil && v.zero() {
		return nil
	}
	err = put(t.m, key, want, ebpf.UpdateAny)
	if errors.Is(err, unix.E2BIG) || errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("map %s: its capacity of %d entries does not hold what is in it now: %w; "+
			"choose a larger one or wait until there are fewer", t.name, t.m.MaxEntries(), ErrLayout)
	}
	if err != nil {
		return fmt.Errorf("copy into map %s: %w", t.name, err)
	}
	return nil
}

// prune deletes from m what is not in the map that it mirrors.
func prune(m, truth *ebpf.Map) error {
	if isArray(m) {
		return nil
	}
	var extra [][]byte
	err := each(m, func(key []byte, _ value) error {
		v, err := lookup(truth, key)
		if v == nil && err == nil {
			extra = append(extra, append([]byte(nil), key...))
		}
		return err
	})
	if err != nil {
		return err
	}
	for _, key := range extra {
		if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("delete from map %s: %w", m, err)
		}
	}
	return nil
}

// merge brings what the old programs wrote since the last pass into a map that
// the new programs write to.
func (t *table) merge() error {
	for _, s := range t.sources {
		if err := t.mergeFrom(s); err != nil {
			return err
		}
	}
	return nil
}

func (t *table) mergeFrom(s *source) error {
	kind := contentOf(t.name, t.spec)
	if s.left && (kind == mirrored || kind == owned) {
		return nil
	}
	next := make(map[string]value)
	if err := mergeInto(t.m, s.m, t.name, kind, s.base, next); err != nil {
		return err
	}
	s.base, s.merged = next, true
	if kind == mirrored || kind == owned {
		return prune(t.m, s.m)
	}
	return nil
}

// giveBack brings what the new programs wrote into the pinned map, which the old
// programs go on using after all.
func (t *table) giveBack() error {
	kind := contentOf(t.name, t.spec)
	if t.pinned || !t.moves() || kind == mirrored {
		return nil
	}
	s := t.sources[0]
	base := s.base
	if s.merged {
		base = nil
	}
	return mergeInto(s.m, t.m, t.name, kind, base, nil)
}

// mergeInto combines every entry of src with dst's. An entry that is missing is
// inserted, so that one which a program makes at that moment stays. seen, unless
// nil, gets the counters of src.
func mergeInto(dst, src *ebpf.Map, name string, kind content, base, seen map[string]value) error {
	err := each(src, func(key []byte, v value) error {
		if seen != nil && kind.counts() {
			seen[string(key)] = v.clone()
		}
		have, err := lookup(dst, key)
		if err != nil {
			return err
		}
		if have == nil {
			return insertMissing(dst, name, kind, key, v)
		}
		want := combine(name, kind, have, v, base[string(key)])
		if have.equal(want) {
			return nil
		}
		return ignore(put(dst, key, want, updateFlag(dst)), ebpf.ErrKeyNotExist)
	})
	if err != nil {
		return fmt.Errorf("merge into map %s: %w", name, err)
	}
	return nil
}

func insertMissing(dst *ebpf.Map, name string, kind content, key []byte, v value) error {
	if isArray(dst) || (kind == flows && gone(name, v[0])) {
		return nil
	}
	return ignore(put(dst, key, v.resized(int(dst.ValueSize())), ebpf.UpdateNoExist), ebpf.ErrKeyExist)
}

// updateFlag keeps an entry that was deleted a moment ago deleted.
func updateFlag(m *ebpf.Map) ebpf.MapUpdateFlags {
	if isArray(m) {
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

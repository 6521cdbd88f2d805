package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
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
	// digests tell of a flow table what has changed since the last pass.
	digests *digests
}

func newSource(m *ebpf.Map) *source { return &source{m: m} }

// fill brings what the sources say into the map that takes over. Running
// programs don't know that map yet, so a second pass may replace and remove:
// it catches up with what happened since the first.
func (t *table) fill() error {
	if contentOf(t.name) == hints {
		return nil
	}
	if t.live {
		return t.merge()
	}
	for _, s := range t.sources {
		var err error
		switch kind := contentOf(t.name); {
		case s.left:
			err = t.mergeFrom(s)
		case kind == flows:
			err = t.mirrorFlows(s)
		default:
			err = t.mirror(s, kind)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// mirror makes the map a copy of the source.
func (t *table) mirror(s *source, kind content) error {
	s.base = make(map[string]value)
	err := each(s.m, func(key []byte, v value) error {
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
	return t.writeError(put(t.m, key, want, ebpf.UpdateAny))
}

// prune deletes from m what is not in the map that it mirrors.
func prune(m, truth *ebpf.Map) error {
	if isArray(m) {
		return nil
	}
	return pruneIf(m, func(key []byte) (bool, error) {
		v, err := lookup(truth, key)
		return v == nil && err == nil, err
	})
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
	kind := contentOf(t.name)
	if kind == hints {
		return nil
	}
	if s.left && (kind == mirrored || kind == owned) {
		return nil
	}
	m := merging{name: t.name, kind: kind, base: s.base, counted: make(map[string]value)}
	if kind == flows && !s.left {
		if s.digests == nil {
			s.digests = newDigests()
		}
		m.digests = s.digests
	}
	if err := m.into(t.m, s.m); err != nil {
		return err
	}
	s.base, s.merged = m.counted, true
	if kind == mirrored || kind == owned {
		return prune(t.m, s.m)
	}
	return nil
}

// giveBack brings what the new programs wrote into the pinned map, which the old
// programs go on using after all.
func (t *table) giveBack() error {
	kind := contentOf(t.name)
	if t.pinned || !t.moves() || kind == mirrored || kind == hints {
		return nil
	}
	s := t.sources[0]
	m := merging{name: t.name, kind: kind, base: s.base}
	if s.merged {
		m.base = nil
	}
	return m.into(s.m, t.m)
}

// merging is one pass over a map whose entries are combined with another's.
type merging struct {
	name string
	kind content
	base map[string]value
	// counted, unless nil, gets the counters as they were read.
	counted map[string]value
	// digests, unless nil, know which entries need not be looked at again.
	digests *digests
}

// into combines every entry of src with dst's. An entry that is missing is
// inserted, so that one which a program makes at that moment stays.
func (m merging) into(dst, src *ebpf.Map) error {
	err := each(src, func(key []byte, v value) error {
		if m.counted != nil && m.kind.counts() {
			m.counted[string(key)] = v.clone()
		}
		if m.digests != nil && !m.digests.note(key, v) {
			return nil
		}
		have, err := lookup(dst, key)
		if err != nil {
			return err
		}
		if have == nil {
			return insertMissing(dst, m.name, m.kind, key, v)
		}
		want := combine(m.name, m.kind, have, v, m.base[string(key)])
		if have.equal(want) {
			return nil
		}
		return ignore(put(dst, key, want, updateFlag(dst)), ebpf.ErrKeyNotExist)
	})
	if err != nil {
		return fmt.Errorf("merge into map %s: %w", m.name, err)
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

package migrate

import (
	"errors"
	"fmt"
	"hash/maphash"
	"reflect"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/raw"
)

// digests are hashes of a large table's keys and values, so that a later pass makes
// system calls only for what has changed. If two hashes are equal by chance, one in
// 2^64, one change is lost.
type digests struct {
	seed maphash.Seed
	of   map[uint64]uint64
}

func newDigests() *digests {
	return &digests{seed: maphash.MakeSeed(), of: make(map[uint64]uint64)}
}

func (d *digests) key(key []byte) uint64 { return maphash.Bytes(d.seed, key) }

// note remembers an entry and reports whether it is new or has changed.
func (d *digests) note(key []byte, v raw.Value) bool {
	k, now := d.key(key), maphash.Bytes(d.seed, v[0])
	before, known := d.of[k]
	d.of[k] = now
	return !known || before != now
}

// mirrorFlows makes the map, which no program writes to yet, a copy of a flow table.
func (t *table) mirrorFlows(s *source) error {
	before := s.digests
	s.digests = newDigests()
	if before != nil {
		s.digests.seed = before.seed
	}
	w := newWriter(t)
	err := raw.Each(s.m, func(key []byte, v raw.Value) error {
		if t.gone(v) {
			return nil
		}
		s.digests.note(key, v)
		if before != nil && !before.note(key, v) {
			return nil
		}
		return w.add(key, v[0])
	})
	if err != nil {
		return err
	}
	if err := w.flush(); err != nil || before == nil {
		return err
	}
	return pruneIf(t.m, func(key []byte) (bool, error) {
		_, there := s.digests.of[s.digests.key(key)]
		return !there, nil
	})
}

// writer writes entries in batches.
type writer struct {
	t            *table
	keys, values reflect.Value
	n            int
}

const writeBatch = 1024

func newWriter(t *table) *writer {
	return &writer{t: t, keys: raw.Records(writeBatch, t.m.KeySize()), values: raw.Records(writeBatch, t.m.ValueSize())}
}

// add writes an entry with the next batch. Bytes by which the value has grown are
// zero.
func (w *writer) add(key, v []byte) error {
	copy(w.keys.Index(w.n).Bytes(), key)
	to := w.values.Index(w.n).Bytes()
	clear(to[copy(to, v):])
	if w.n++; w.n == writeBatch {
		return w.flush()
	}
	return nil
}

func (w *writer) flush() error {
	if w.n == 0 {
		return nil
	}
	_, err := w.t.m.BatchUpdate(w.keys.Slice(0, w.n).Interface(), w.values.Slice(0, w.n).Interface(), nil)
	w.n = 0
	return w.t.writeError(err)
}

// writeError explains a failed write to the map.
func (t *table) writeError(err error) error {
	if errors.Is(err, unix.E2BIG) || errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("map %s: its current entries exceed the new capacity of %d: %w; "+
			"choose a larger one or wait until there are fewer entries", t.Name, t.m.MaxEntries(), ErrLayout)
	}
	if err != nil {
		return fmt.Errorf("copy into map %s: %w", t.Name, err)
	}
	return nil
}

// pruneIf deletes the entries whose key is extra.
func pruneIf(m *ebpf.Map, extra func(key []byte) (bool, error)) error {
	var keys [][]byte
	err := raw.Each(m, func(key []byte, _ raw.Value) error {
		is, err := extra(key)
		if is {
			keys = append(keys, append([]byte(nil), key...))
		}
		return err
	})
	if err != nil {
		return err
	}
	for _, key := range keys {
		if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("delete from map %s: %w", m, err)
		}
	}
	return nil
}

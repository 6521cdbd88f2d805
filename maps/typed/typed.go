// Package typed gives BPF maps Go types for their keys and values, and the one
// algorithm that brings a map to a wanted content with the fewest writes.
//
//	m, err := typed.Open[endpoints.Key, endpoints.Value](path)
//	err = m.Put(key, value)
package typed

import (
	"errors"
	"fmt"
	"iter"

	"github.com/cilium/ebpf"
)

// ErrKeyNotExist is returned (wrapped) by Get and Delete for a missing key.
var ErrKeyNotExist = ebpf.ErrKeyNotExist

// ErrKeyExist is returned (wrapped) by Insert for a key that is there already.
var ErrKeyExist = ebpf.ErrKeyExist

// Map is a BPF map with keys of type K and values of type V, both of which
// have the layout of the C structs without implicit padding.
type Map[K comparable, V any] struct {
	*ebpf.Map
	name string
}

// Open opens the map pinned at path. The error matches fs.ErrNotExist when
// nothing is pinned there.
func Open[K comparable, V any](path string) (*Map[K, V], error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return nil, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	return New[K, V](m, path), nil
}

// New wraps a map that is open already; name is for error messages.
func New[K comparable, V any](m *ebpf.Map, name string) *Map[K, V] {
	return &Map[K, V]{Map: m, name: name}
}

// Get returns the value of key.
func (m *Map[K, V]) Get(key K) (V, error) {
	var v V
	if err := m.Lookup(&key, &v); err != nil {
		return v, fmt.Errorf("look up %v in map %s: %w", key, m.name, err)
	}
	return v, nil
}

// Put writes the value of key, whether or not there is one.
func (m *Map[K, V]) Put(key K, value V) error {
	if err := m.Update(&key, &value, ebpf.UpdateAny); err != nil {
		return fmt.Errorf("write %v to map %s: %w", key, m.name, err)
	}
	return nil
}

// Insert writes the value of a key that is not there yet.
func (m *Map[K, V]) Insert(key K, value V) error {
	if err := m.Update(&key, &value, ebpf.UpdateNoExist); err != nil {
		return fmt.Errorf("insert %v into map %s: %w", key, m.name, err)
	}
	return nil
}

// Delete removes key. A missing key is no error.
func (m *Map[K, V]) Delete(key K) error {
	if err := m.Map.Delete(&key); err != nil && !errors.Is(err, ErrKeyNotExist) {
		return fmt.Errorf("delete %v from map %s: %w", key, m.name, err)
	}
	return nil
}

// All iterates over a copy of the entries as they are met. On a hash map that
// is written to meanwhile, entries may be missed or seen twice; an iteration that
// the kernel aborts ends with the zero key, the zero value and the error.
func (m *Map[K, V]) All() iter.Seq2[Entry[K, V], error] {
	return func(yield func(Entry[K, V], error) bool) {
		var e Entry[K, V]
		it := m.Iterate()
		for it.Next(&e.Key, &e.Value) {
			if !yield(e, nil) {
				return
			}
		}
		if err := it.Err(); err != nil {
			yield(Entry[K, V]{}, fmt.Errorf("iterate over map %s: %w", m.name, err))
		}
	}
}

// Entry is one key with its value.
type Entry[K comparable, V any] struct {
	Key   K
	Value V
}

// Changes counts what Sync did.
type Changes struct {
	Written, Deleted int
}

// Sync brings m to exactly want: missing and differing entries are written
// first, then what is not wanted is deleted. same says whether a present value
// needs no write, so that fields the programs own do not count. Only for maps
// that nobody else writes at the same time.
func Sync[K comparable, V any](m *Map[K, V], want map[K]V, same func(have, want V) bool) (Changes, error) {
	var done Changes
	have := make(map[K]V, len(want))
	for e, err := range m.All() {
		if err != nil {
			return done, err
		}
		have[e.Key] = e.Value
	}
	for k, v := range want {
		if old, ok := have[k]; ok && same(old, v) {
			continue
		}
		if err := m.Put(k, v); err != nil {
			return done, err
		}
		done.Written++
	}
	for k := range have {
		if _, ok := want[k]; ok {
			continue
		}
		if err := m.Delete(k); err != nil {
			return done, err
		}
		done.Deleted++
	}
	return done, nil
}

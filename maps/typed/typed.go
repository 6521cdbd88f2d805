// Package typed gives BPF maps Go types for their keys and values. Sync brings a map
// to a wanted content with the fewest writes; Definition is how each map's package
// describes its map.
//
//	m, err := typed.Open[endpoints.Key, endpoints.Value](path)
//	err = m.Put(key, value)
package typed

import (
	"errors"
	"fmt"
	"iter"
	"path/filepath"
	"syscall"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/raw"
)

// ErrKeyNotExist is returned (wrapped) by Get for a missing key.
var ErrKeyNotExist = ebpf.ErrKeyNotExist

// ErrKeyExist is returned (wrapped) by Insert for a key that is there already.
var ErrKeyExist = ebpf.ErrKeyExist

// ErrFull is returned (wrapped) for an entry for which a map has no room.
var ErrFull = errors.New("is full")

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

// New wraps an open map; name is for error messages.
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
		return m.explain("write", key, "to", err)
	}
	return nil
}

// Insert writes the value of a key that is not there yet.
func (m *Map[K, V]) Insert(key K, value V) error {
	if err := m.Update(&key, &value, ebpf.UpdateNoExist); err != nil {
		return m.explain("insert", key, "into", err)
	}
	return nil
}

// Delete removes key. A missing key is no error.
func (m *Map[K, V]) Delete(key K) error {
	if err := m.Map.Delete(&key); err != nil && !errors.Is(err, ErrKeyNotExist) {
		return m.explain("delete", key, "from", err)
	}
	return nil
}

// explain says what a failed write was to do. Of a full map the kernel says "argument list too long" (a hash) or "no
// space left on device" (a trie), which sends people to look elsewhere.
func (m *Map[K, V]) explain(verb string, key K, preposition string, err error) error {
	if errors.Is(err, syscall.E2BIG) || errors.Is(err, syscall.ENOSPC) {
		return fmt.Errorf("%s %v: map %s %w (%d entries)", verb, key, filepath.Base(m.name), ErrFull, m.MaxEntries())
	}
	return fmt.Errorf("%s %v %s map %s: %w", verb, key, preposition, m.name, err)
}

// All iterates over a copy of the entries, each key once. A hash is read bucket by
// bucket, which writers cannot disturb; other maps are walked from key to key, and
// once more if a writer has disturbed that. Arrays have all of their entries at any time. An error ends the iteration and comes
// with the zero entry.
func (m *Map[K, V]) All() iter.Seq2[Entry[K, V], error] {
	return func(yield func(Entry[K, V], error) bool) {
		entries, err := m.read()
		if err != nil {
			yield(Entry[K, V]{}, fmt.Errorf("read map %s: %w", m.name, err))
			return
		}
		seen := make(map[K]bool, len(entries))
		for _, e := range entries {
			if seen[e.Key] {
				continue
			}
			seen[e.Key] = true
			if !yield(e, nil) {
				return
			}
		}
	}
}

// Content returns all entries. What is read of a trie that changes meanwhile may lack a few: the kernel's walk can pass
// over the neighbours of a prefix that comes or goes.
func (m *Map[K, V]) Content() (map[K]V, error) {
	entries, err := m.read()
	if err != nil {
		return nil, fmt.Errorf("read map %s: %w", m.name, err)
	}
	content := make(map[K]V, len(entries))
	for _, e := range entries {
		content[e.Key] = e.Value
	}
	return content, nil
}

// attempts limits how often a walk is repeated that writers disturb.
const attempts = 5

// read returns all entries, some of them perhaps twice: where a writer has removed the
// key that a walk has come to, it begins anew.
func (m *Map[K, V]) read() ([]Entry[K, V], error) {
	once := m.walk
	switch {
	case raw.IsHash(m.Map):
		return m.readBatches()
	case m.Type() == ebpf.LPMTrie, m.Type() == ebpf.Array:
		once = m.readBatches
	}
	for try := 1; ; try++ {
		found, err := once()
		disturbed := errors.Is(err, ebpf.ErrIterationAborted) || errors.Is(err, syscall.EINTR)
		if !disturbed || try == attempts {
			return found, err
		}
	}
}

func (m *Map[K, V]) walk() (out []Entry[K, V], err error) {
	var e Entry[K, V]
	it := m.Iterate()
	for it.Next(&e.Key, &e.Value) {
		out = append(out, e)
	}
	return out, it.Err()
}

func (m *Map[K, V]) readBatches() (out []Entry[K, V], err error) {
	var keys []K
	var values []V
	err = raw.Batches(m.Map, func(size int) (any, any) {
		keys, values = make([]K, size), make([]V, size)
		return keys, values
	}, func(n int) error {
		for i := range n {
			out = append(out, Entry[K, V]{keys[i], values[i]})
		}
		if len(out) > attempts*int(m.MaxEntries()) { // it begins anew all the time
			return ebpf.ErrIterationAborted
		}
		return nil
	})
	return out, err
}

// Entry is one key with its value.
type Entry[K comparable, V any] struct {
	Key   K
	Value V
}

package typed

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// PutAll writes the values of keys in batches, in their order. An entry that cannot be written does not keep others
// from being written; the error is an Errors of those.
func (m *Map[K, V]) PutAll(keys []K, values []V) error { return m.putAll(keys, values, func(int) {}) }

// DeleteAll removes keys in batches, in their order. A missing key is no error; an Errors has those that cannot be removed.
func (m *Map[K, V]) DeleteAll(keys []K) error { return m.deleteAll(keys, func(int) {}) }

func (m *Map[K, V]) putAll(keys []K, values []V, done func(i int)) error {
	return m.inBatches(keys, "write", "to", func(from int) (int, error) {
		return m.BatchUpdate(keys[from:], values[from:], nil)
	}, done)
}

func (m *Map[K, V]) deleteAll(keys []K, done func(i int)) error {
	return m.inBatches(keys, "delete", "from", func(from int) (int, error) {
		n, err := m.BatchDelete(keys[from:], nil)
		if errors.Is(err, ErrKeyNotExist) && n < len(keys)-from {
			return n + 1, nil
		}
		return n, err
	}, done)
}

// inBatches calls batch until it has processed all keys, each time with the index
// to go on from. The key at which batch stops with an error has failed; done is
// called for each of the others.
func (m *Map[K, V]) inBatches(keys []K, verb, preposition string, batch func(from int) (int, error), done func(i int)) error {
	failed := make(Errors[K])
	for at := 0; at < len(keys); {
		n, err := batch(at)
		// An error behind the last key is the kernel's that has not begun, and so has not said how far it has come.
		if errors.Is(err, ebpf.ErrNotSupported) || err != nil && n == len(keys)-at {
			return fmt.Errorf("write map %s in batches: %w", m.name, err)
		}
		for i := range n {
			done(at + i)
		}
		at += n
		if err != nil && at < len(keys) {
			failed[keys[at]] = m.explain(verb, keys[at], preposition, err)
			at++
		}
	}
	if len(failed) == 0 {
		return nil
	}
	return failed
}

// valuesAtOnce is how many values of an array are read by one system call.
const valuesAtOnce = 16384

// Values returns the first values of an array, at most n, in order of the index.
func (m *Map[K, V]) Values(n int) ([]V, error) {
	n = min(n, int(m.MaxEntries()))
	values, keys := make([]V, n), make([]K, min(n, valuesAtOnce))
	var cursor ebpf.MapBatchCursor
	for at := 0; at < n; {
		size := min(n-at, valuesAtOnce)
		got, err := m.BatchLookup(&cursor, keys[:size], values[at:at+size], nil)
		at += got
		if err != nil && (at < n || !errors.Is(err, ErrKeyNotExist)) {
			return nil, fmt.Errorf("read map %s: %w", m.name, err)
		}
	}
	return values, nil
}

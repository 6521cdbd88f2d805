package observe

import (
	"errors"
	"fmt"
	"reflect"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
)

// batchSize is how many entries of a hash are read per system call, to begin with.
const batchSize = 1024

// attempts bounds how often a walk that writers upset is begun again.
const attempts = 5

// collect returns the entries of a map, each key once. Hashes are read bucket by
// bucket, which writers cannot upset as they do a walk from key to key.
func collect[K comparable, V any](m *typed.Map[K, V]) ([]typed.Entry[K, V], error) {
	if hash(m.Map) {
		return collectHash(m)
	}
	for try := 1; ; try++ {
		found, err := walk(m)
		if !errors.Is(err, ebpf.ErrIterationAborted) || try == attempts {
			return found, err
		}
	}
}

func hash(m *ebpf.Map) bool { return m.Type() == ebpf.Hash || m.Type() == ebpf.LRUHash }

func walk[K comparable, V any](m *typed.Map[K, V]) ([]typed.Entry[K, V], error) {
	var out []typed.Entry[K, V]
	seen := map[K]bool{}
	for e, err := range m.All() {
		if err != nil {
			return nil, err
		}
		if !seen[e.Key] {
			seen[e.Key] = true
			out = append(out, e)
		}
	}
	return out, nil
}

func collectHash[K comparable, V any](m *typed.Map[K, V]) ([]typed.Entry[K, V], error) {
	var out []typed.Entry[K, V]
	keys, values := make([]K, batchSize), make([]V, batchSize)
	err := eachBatch(m.Map, func(cursor *ebpf.MapBatchCursor) (int, error) {
		return m.BatchLookup(cursor, keys, values, nil)
	}, func(n int) {
		for i := range n {
			out = append(out, typed.Entry[K, V]{Key: keys[i], Value: values[i]})
		}
	}, func() {
		keys, values = make([]K, 2*len(keys)), make([]V, 2*len(values))
	})
	return out, err
}

// eachBatch walks a hash: take is told how many entries read has put where it
// puts them, and grow must make that place larger.
func eachBatch(m *ebpf.Map, read func(*ebpf.MapBatchCursor) (int, error), take func(n int), grow func()) error {
	var cursor ebpf.MapBatchCursor
	for {
		n, err := read(&cursor)
		switch {
		case errors.Is(err, unix.ENOSPC):
			// A bucket holds more than the batch; the cursor has not moved.
			grow()
		case err == nil:
			take(n)
		case errors.Is(err, ebpf.ErrKeyNotExist):
			take(n)
			return nil
		default:
			return fmt.Errorf("read map %s: %w", m.String(), err)
		}
	}
}

// Entries counts the entries of a map. It reads all of a hash: for snat and
// conntrack the map usage knows the number without.
func Entries(m *ebpf.Map) (uint64, error) {
	switch {
	case hash(m):
		return countHash(m)
	case m.Type() == ebpf.LPMTrie:
		return countTrie(m)
	}
	return uint64(m.MaxEntries()), nil
}

func countHash(m *ebpf.Map) (uint64, error) {
	size := batchSize
	buffers := func() (keys, values any) { return rawSlice(m.KeySize(), size), rawSlice(m.ValueSize(), size) }
	keys, values := buffers()
	var count uint64
	err := eachBatch(m, func(cursor *ebpf.MapBatchCursor) (int, error) {
		return m.BatchLookup(cursor, keys, values, nil)
	}, func(n int) {
		count += uint64(n)
	}, func() {
		size *= 2
		keys, values = buffers()
	})
	return count, err
}

// rawSlice makes a slice of n arrays of width bytes.
func rawSlice(width uint32, n int) any {
	element := reflect.ArrayOf(int(width), reflect.TypeFor[byte]())
	return reflect.MakeSlice(reflect.SliceOf(element), n, n).Interface()
}

func countTrie(m *ebpf.Map) (uint64, error) {
	var count uint64
	var key any
	next := make([]byte, m.KeySize())
	for count <= uint64(m.MaxEntries()) {
		err := m.NextKey(key, &next)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return count, nil
		}
		if err != nil {
			return 0, fmt.Errorf("count the entries of map %s: %w", m.String(), err)
		}
		count++
		key = append([]byte(nil), next...)
	}
	return uint64(m.MaxEntries()), nil
}

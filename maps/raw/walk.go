package raw

import (
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
	"syscall"

	"github.com/cilium/ebpf"
)

// batchSize is more entries than a bucket of a hash ever holds, short of an attack.
const batchSize = 1024

// Each calls fn with every entry of the map; key and value are valid until it
// returns. A hash is read bucket by bucket, so that no entry that exists all the
// time is missed, however much the programs write.
func Each(m *ebpf.Map, fn func(key []byte, v Value) error) error {
	var err error
	switch {
	case IsHash(m), m.Type() == ebpf.Array:
		err = eachInBatches(m, fn)
	case IsArray(m):
		err = eachIndex(m, fn)
	default:
		err = eachKey(m, fn)
	}
	if err != nil {
		return fmt.Errorf("walk map %s: %w", m, err)
	}
	return nil
}

func eachInBatches(m *ebpf.Map, fn func(key []byte, v Value) error) error {
	var keys, values reflect.Value
	return Batches(m, func(size int) (any, any) {
		keys, values = Records(size, m.KeySize()), Records(size, m.ValueSize())
		return keys.Interface(), values.Interface()
	}, func(n int) error {
		for i := range n {
			if err := fn(keys.Index(i).Bytes(), Value{values.Index(i).Bytes()}); err != nil {
				return err
			}
		}
		return nil
	})
}

func eachIndex(m *ebpf.Map, fn func(key []byte, v Value) error) error {
	key := make([]byte, 4)
	for i := range m.MaxEntries() {
		binary.NativeEndian.PutUint32(key, i)
		v, err := Lookup(m, key)
		if err != nil {
			return err
		}
		if err := fn(key, v); err != nil {
			return err
		}
	}
	return nil
}

// eachKey reads all keys first: the key from which a walk goes on may be deleted.
func eachKey(m *ebpf.Map, fn func(key []byte, v Value) error) error {
	all, err := keys(m)
	if err != nil {
		return err
	}
	for _, k := range all {
		v, err := Lookup(m, k)
		if err != nil {
			return err
		}
		if v == nil {
			continue
		}
		if err := fn(k, v); err != nil {
			return err
		}
	}
	return nil
}

func keys(m *ebpf.Map) (all [][]byte, err error) {
	// An untyped nil asks for the first key. A deletion may restart the walk.
	for key := any(nil); len(all) <= int(m.MaxEntries()); {
		next, err := m.NextKeyBytes(key)
		if err != nil || next == nil {
			return all, err
		}
		all = append(all, next)
		key = next
	}
	return all, nil
}

// Count returns how many entries the map has. It reads all of a hash or a trie; of a trie that is written to meanwhile,
// some may be counted twice.
func Count(m *ebpf.Map) (count uint64, err error) {
	if IsArray(m) {
		return uint64(m.MaxEntries()), nil
	}
	err = Batches(m, func(size int) (any, any) {
		return Records(size, m.KeySize()).Interface(), Records(size, m.ValueSize()).Interface()
	}, func(n int) error {
		count += uint64(n)
		return nil
	})
	if errors.Is(err, syscall.EINTR) { // entries of a trie were removed under the kernel's hands
		var all [][]byte
		all, err = keys(m)
		count = uint64(len(all))
	}
	if err != nil {
		return 0, fmt.Errorf("count the entries of map %s: %w", m, err)
	}
	return min(count, uint64(m.MaxEntries())), nil
}

// Batches reads a hash or a trie. room makes slices for size keys and as many values, take
// is called with how many entries have been read into them.
func Batches(m *ebpf.Map, room func(size int) (keys, values any), take func(n int) error) error {
	var cursor ebpf.MapBatchCursor
	size := min(batchSize, int(m.MaxEntries()))
	keys, values := room(size)
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		if errors.Is(err, syscall.ENOSPC) && size < int(m.MaxEntries()) {
			// A bucket holds more than the batch; the cursor has not moved.
			size *= 2
			keys, values = room(size)
			continue
		}
		done := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !done {
			return err
		}
		if err := take(n); err != nil || done {
			return err
		}
	}
}

// Records makes a slice of n arrays of size bytes, for batches of records whose
// size is only known at run time.
func Records(n int, size uint32) reflect.Value {
	one := reflect.ArrayOf(int(size), reflect.TypeFor[byte]())
	return reflect.MakeSlice(reflect.SliceOf(one), n, n)
}

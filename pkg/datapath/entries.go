package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// value is the value of an entry as bytes: one slice, or one for each CPU.
type value [][]byte

func (v value) zero() bool {
	for _, one := range v {
		for _, b := range one {
			if b != 0 {
				return false
			}
		}
	}
	return true
}

func (v value) equal(other value) bool {
	return slices.EqualFunc(v, other, bytes.Equal)
}

func (v value) clone() value {
	out := make(value, len(v))
	for i := range v {
		out[i] = append([]byte(nil), v[i]...)
	}
	return out
}

// resized is the value in a map whose values are of that size: what a layout
// grew by is zero.
func (v value) resized(size int) value {
	out := make(value, len(v))
	for i := range v {
		out[i] = make([]byte, size)
		copy(out[i], v[i])
	}
	return out
}

func perCPU(m *ebpf.Map) bool {
	switch m.Type() {
	case ebpf.PerCPUArray, ebpf.PerCPUHash, ebpf.LRUCPUHash:
		return true
	}
	return false
}

func isArray(m *ebpf.Map) bool {
	return m.Type() == ebpf.Array || m.Type() == ebpf.PerCPUArray
}

// lookup returns the value of key, nil when there is none.
func lookup(m *ebpf.Map, key []byte) (value, error) {
	var v value
	var err error
	if perCPU(m) {
		var each [][]byte
		err = m.Lookup(key, &each)
		v = each
	} else {
		one := make([]byte, m.ValueSize())
		err = m.Lookup(key, one)
		v = value{one}
	}
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read map %s: %w", m, err)
	}
	return v, nil
}

func put(m *ebpf.Map, key []byte, v value, how ebpf.MapUpdateFlags) error {
	if perCPU(m) {
		return m.Update(key, [][]byte(v), how)
	}
	return m.Update(key, v[0], how)
}

// each calls fn with every entry of the map; key and value are only good until
// it returns. A flow table is read by buckets, so that no entry which is there all
// the time is missed however much the programs write.
func each(m *ebpf.Map, fn func(key []byte, v value) error) error {
	var err error
	switch m.Type() {
	case ebpf.Hash, ebpf.LRUHash:
		err = eachInBatches(m, fn)
	case ebpf.Array, ebpf.PerCPUArray:
		err = eachIndex(m, fn)
	default:
		err = eachKey(m, fn)
	}
	if err != nil {
		return fmt.Errorf("walk map %s: %w", m, err)
	}
	return nil
}

func eachIndex(m *ebpf.Map, fn func(key []byte, v value) error) error {
	key := make([]byte, 4)
	for i := range m.MaxEntries() {
		binary.NativeEndian.PutUint32(key, i)
		v, err := lookup(m, key)
		if err != nil {
			return err
		}
		if err := fn(key, v); err != nil {
			return err
		}
	}
	return nil
}

// eachKey collects the keys first: the map may lose the one it stands on.
func eachKey(m *ebpf.Map, fn func(key []byte, v value) error) error {
	var keys [][]byte
	// An untyped nil asks for the first key.
	var key any
	for {
		next, err := m.NextKeyBytes(key)
		if err != nil {
			return err
		}
		if next == nil || len(keys) > int(m.MaxEntries()) {
			break
		}
		keys = append(keys, next)
		key = next
	}
	for _, k := range keys {
		v, err := lookup(m, k)
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

// firstBatch is more than a bucket ever holds, short of an attack.
const firstBatch = 1024

func eachInBatches(m *ebpf.Map, fn func(key []byte, v value) error) error {
	var cursor ebpf.MapBatchCursor
	size := firstBatch
	keys, values := records(size, m.KeySize()), records(size, m.ValueSize())
	for {
		n, err := m.BatchLookup(&cursor, keys.Interface(), values.Interface(), nil)
		if errors.Is(err, unix.ENOSPC) && size < int(m.MaxEntries()) {
			size *= 2
			keys, values = records(size, m.KeySize()), records(size, m.ValueSize())
			continue
		}
		done := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !done {
			return err
		}
		for i := range n {
			if err := fn(keys.Index(i).Bytes(), value{values.Index(i).Bytes()}); err != nil {
				return err
			}
		}
		if done {
			return nil
		}
	}
}

// records is a slice of n arrays of size bytes, which is how batches are passed
// when the size is known at run time only.
func records(n int, size uint32) reflect.Value {
	one := reflect.ArrayOf(int(size), reflect.TypeFor[byte]())
	return reflect.MakeSlice(reflect.SliceOf(one), n, n)
}

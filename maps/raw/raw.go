// Package raw reads and writes maps as bytes: maps of another build, whose records
// may be longer or shorter than this one's, and maps of any type alike. It does not
// know what is in them.
package raw

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/cilium/ebpf"
)

// Value is the value of an entry as bytes: one slice, or one for each CPU.
type Value [][]byte

// Zero reports whether every byte is 0.
func (v Value) Zero() bool {
	return !slices.ContainsFunc(v, func(one []byte) bool {
		return slices.ContainsFunc(one, func(b byte) bool { return b != 0 })
	})
}

// Equal reports whether both are the same bytes.
func (v Value) Equal(other Value) bool { return slices.EqualFunc(v, other, bytes.Equal) }

// Resized is a copy for a map whose values have size bytes; added bytes are zero.
func (v Value) Resized(size int) Value {
	out := make(Value, len(v))
	for i := range v {
		out[i] = make([]byte, size)
		copy(out[i], v[i])
	}
	return out
}

// Open opens a pinned map; nil when nothing is pinned at path.
func Open(path string) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	return m, nil
}

func perCPU(m *ebpf.Map) bool {
	switch m.Type() {
	case ebpf.PerCPUArray, ebpf.PerCPUHash, ebpf.LRUCPUHash:
		return true
	}
	return false
}

// IsArray reports whether the map is an array, where every key always exists.
func IsArray(m *ebpf.Map) bool {
	return m.Type() == ebpf.Array || m.Type() == ebpf.PerCPUArray
}

// IsHash reports whether the map is a hash, which is read bucket by bucket.
func IsHash(m *ebpf.Map) bool { return m.Type() == ebpf.Hash || m.Type() == ebpf.LRUHash }

// Lookup returns the value of key, nil when there is none.
func Lookup(m *ebpf.Map, key []byte) (v Value, err error) {
	if perCPU(m) {
		err = m.Lookup(key, (*[][]byte)(&v))
	} else {
		v = Value{make([]byte, m.ValueSize())}
		err = m.Lookup(key, v[0])
	}
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read map %s: %w", m, err)
	}
	return v, nil
}

// Update writes the value of key.
func Update(m *ebpf.Map, key []byte, v Value, how ebpf.MapUpdateFlags) error {
	if perCPU(m) {
		return m.Update(key, [][]byte(v), how)
	}
	return m.Update(key, v[0], how)
}

// Decode reads the fields that this build knows; a newer layout may have more.
func Decode[V any](b []byte) V {
	var v V
	padded := make([]byte, max(len(b), binary.Size(v)))
	copy(padded, b)
	// Neither fails: V is a struct of fixed size and the buffer is long enough.
	_, _ = binary.Decode(padded, binary.NativeEndian, &v)
	return v
}

// Encode returns b with the fields that this build knows replaced.
func Encode[V any](b []byte, v V) []byte {
	known, _ := binary.Append(nil, binary.NativeEndian, v)
	out := slices.Clone(b)
	copy(out, known)
	return out
}

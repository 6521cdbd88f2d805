package migrate

import (
	"encoding/binary"
	"reflect"

	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/raw"
)

// combine merges theirs, the other map's value, into have. base is the value when
// both were last equal, nil if unknown. The result has the size of have.
func (t *table) combine(have, theirs, base raw.Value) raw.Value {
	size := len(have[0])
	out := theirs.Resized(size)
	if t.Flows != nil {
		return raw.Value{t.Flows.Join(have[0], out[0])}
	}
	if base != nil {
		base = base.Resized(size)
	}
	for cpu := range out {
		for _, f := range t.counters {
			if int(f.Offset+f.Type.Size()) > size {
				continue
			}
			ours, other := number(have[cpu], f), number(out[cpu], f)
			sum := max(ours, other)
			if base != nil {
				sum = ours + other - number(base[cpu], f)
			}
			setNumber(out[cpu], f, sum)
		}
	}
	return out
}

func number(b []byte, f reflect.StructField) uint64 {
	if f.Type.Size() == 4 {
		return uint64(binary.NativeEndian.Uint32(b[f.Offset:]))
	}
	return binary.NativeEndian.Uint64(b[f.Offset:])
}

func setNumber(b []byte, f reflect.StructField, n uint64) {
	if f.Type.Size() == 4 {
		binary.NativeEndian.PutUint32(b[f.Offset:], uint32(n))
	} else {
		binary.NativeEndian.PutUint64(b[f.Offset:], n)
	}
}

// gone reports whether a flow's entry is being removed. It is called for every entry
// of the large tables, so it reads only the stamp.
func (t *table) gone(v raw.Value) bool {
	return t.Flows != nil && binary.NativeEndian.Uint64(v[0][t.Flows.LastSeen:]) < flow.Marks
}

package raw

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestBatchesAreLargeEnoughForAnyBucket(t *testing.T) {
	priv.Require(t)
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: 50000})
	check(t, err)
	defer m.Close()
	for i := range uint32(50000) {
		check(t, m.Put(i, ^i))
	}
	seen := make(map[uint32]bool)
	check(t, Each(m, func(key []byte, v Value) error {
		k := Decode[uint32](key)
		if Decode[uint32](v[0]) != ^k {
			return fmt.Errorf("value of %d is %x", k, v[0])
		}
		seen[k] = true
		return nil
	}))
	if len(seen) != 50000 {
		t.Errorf("%d of 50000 entries", len(seen))
	}
	if n, err := Count(m); err != nil || n != 50000 {
		t.Errorf("counted %d, %v", n, err)
	}
}

// TestEveryType reads and writes a map of each type that the dataplane has.
func TestEveryType(t *testing.T) {
	priv.Require(t)
	for _, spec := range []ebpf.MapSpec{
		{Type: ebpf.Hash, KeySize: 4}, {Type: ebpf.LPMTrie, KeySize: 8, Flags: 1}, {Type: ebpf.Array, KeySize: 4}, {Type: ebpf.PerCPUArray, KeySize: 4},
	} {
		t.Run(spec.Type.String(), func(t *testing.T) {
			spec.ValueSize, spec.MaxEntries = 8, 3
			m, err := ebpf.NewMap(&spec)
			check(t, err)
			defer m.Close()
			key := Encode(make([]byte, spec.KeySize), uint32(2))
			have, err := Lookup(m, key)
			check(t, err)
			if IsArray(m) == (have == nil) || !have.Zero() {
				t.Errorf("at first: %v", have)
			}
			want := Value{Encode(make([]byte, 8), uint32(77))}
			for perCPU(m) && len(want) < ebpf.MustPossibleCPU() {
				want = append(want, make([]byte, 8))
			}
			check(t, Update(m, key, want, ebpf.UpdateAny))
			found := false
			check(t, Each(m, func(k []byte, v Value) error {
				found = found || Decode[uint32](k) == 2 && v.Equal(want)
				return nil
			}))
			if have, err := Lookup(m, key); !found || err != nil || !have.Equal(want) || have.Zero() {
				t.Errorf("found %v, looked up %v, %v", found, have, err)
			}
			entries := uint64(1)
			if IsArray(m) {
				entries = 3
			}
			if n, err := Count(m); err != nil || n != entries {
				t.Errorf("counted %d, %v", n, err)
			}
		})
	}
}

func TestEncodeKeepsWhatItDoesNotKnow(t *testing.T) {
	type short struct{ A, B uint16 }
	long := []byte{1, 0, 2, 0, 9, 9}
	v := Decode[short](long)
	v.B = 7
	if got := Encode(long, v); !bytes.Equal(got, []byte{1, 0, 7, 0, 9, 9}) {
		t.Errorf("%v", got)
	}
	if got := Decode[short](long[:2]); got != (short{1, 0}) {
		t.Errorf("of a shorter one: %v", got)
	}
	if got := (Value{long}).Resized(8); fmt.Sprint(got) != "[[1 0 2 0 9 9 0 0]]" {
		t.Errorf("resized: %v", got)
	}
}

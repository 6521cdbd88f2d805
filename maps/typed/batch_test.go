package typed

import (
	"errors"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

func TestPutAllAndDeleteAll(t *testing.T) {
	m := newMap(t, 4)
	keys, values := []key{{1}, {2}, {3}, {4}}, []value{{Wanted: 1}, {Wanted: 2}, {Wanted: 3}, {Wanted: 4}}
	if err := m.PutAll(keys, values); err != nil {
		t.Fatal(err)
	}
	err := m.PutAll([]key{{1}, {9}, {2}}, []value{{Wanted: 11}, {Wanted: 9}, {Wanted: 12}})
	failed, some := errors.AsType[Errors[key]](err)
	if !some || len(failed) != 1 || !errors.Is(failed[key{9}], ErrFull) {
		t.Errorf("a full map: %v", err)
	}
	if err := m.DeleteAll([]key{{7}, {3}, {8}, {4}}); err != nil {
		t.Errorf("delete missing keys too: %v", err)
	}
	if got := content(t, m); len(got) != 2 || got[key{1}].Wanted != 11 || got[key{2}].Wanted != 12 {
		t.Errorf("the map holds %v", got)
	}
}

// A batch that the kernel refuses as a whole has written nothing, and does not say so by its count.
func TestBatchRefused(t *testing.T) {
	m := newMap(t, 4)
	if err := m.PutAll([]key{{1}}, []value{{Wanted: 1}}); err != nil {
		t.Fatal(err)
	}
	if err := m.Freeze(); err != nil {
		t.Fatal(err)
	}
	if err := m.PutAll([]key{{1}, {2}}, []value{{Wanted: 11}, {Wanted: 12}}); !errors.Is(err, unix.EPERM) {
		t.Errorf("writing: error %v", err)
	}
	if err := m.DeleteAll([]key{{1}}); !errors.Is(err, unix.EPERM) {
		t.Errorf("deleting: error %v", err)
	}
	if got := content(t, m); len(got) != 1 || got[key{1}].Wanted != 1 {
		t.Errorf("the map holds %v", got)
	}
}

// An array is read in batches of a limited size, and its end by the batch that reaches it.
func TestValues(t *testing.T) {
	priv.Require(t)
	const entries = valuesAtOnce + 5
	array, err := ebpf.NewMap(&ebpf.MapSpec{Name: "test", Type: ebpf.Array, KeySize: 4, ValueSize: 16, MaxEntries: entries})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { array.Close() })
	m := New[key, value](array, "test")
	keys, want := make([]key, entries), make([]value, entries)
	for i := range want {
		keys[i], want[i] = key{uint32(i)}, value{Wanted: uint32(i), Theirs: 7}
	}
	if err := m.PutAll(keys, want); err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{0, 1, valuesAtOnce, valuesAtOnce + 1, entries, entries + 100} {
		got, err := m.Values(n)
		if err != nil || !slices.Equal(got, want[:min(n, entries)]) {
			t.Errorf("%d values: %d that may be others, error %v", n, len(got), err)
		}
	}
	if got := content(t, m); len(got) != entries || got[key{valuesAtOnce}].Wanted != valuesAtOnce {
		t.Errorf("all entries: %d, want %d", len(got), entries)
	}
}

package typed

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

type key struct {
	ID uint32
}

// value has a field that its writer leaves to the programs, and padding.
type value struct {
	Wanted uint32
	_      uint32
	Theirs uint64
}

func same(have, want value) bool { return have.Wanted == want.Wanted }

func newMap(t *testing.T, entries uint32) *Map[key, value] {
	t.Helper()
	priv.Require(t)
	m, err := ebpf.NewMap(&ebpf.MapSpec{Name: "test", Type: ebpf.Hash, KeySize: 4, ValueSize: 16, MaxEntries: entries})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return New[key, value](m, "test")
}

func content(t *testing.T, m *Map[key, value]) map[key]value {
	t.Helper()
	out := map[key]value{}
	for e, err := range m.All() {
		if err != nil {
			t.Fatal(err)
		}
		out[e.Key] = e.Value
	}
	return out
}

func TestGetPutInsertDelete(t *testing.T) {
	m := newMap(t, 8)
	if _, err := m.Get(key{1}); !errors.Is(err, ErrKeyNotExist) {
		t.Errorf("get a missing key: %v", err)
	}
	if err := m.Delete(key{1}); err != nil {
		t.Errorf("delete a missing key: %v", err)
	}
	if err := m.Insert(key{1}, value{Wanted: 10}); err != nil {
		t.Fatal(err)
	}
	if err := m.Insert(key{1}, value{Wanted: 11}); !errors.Is(err, ErrKeyExist) {
		t.Errorf("insert twice: %v", err)
	}
	if v, err := m.Get(key{1}); err != nil || v.Wanted != 10 {
		t.Errorf("an insert that is refused must not write: %v, %v", v, err)
	}
	if err := m.Put(key{1}, value{Wanted: 12, Theirs: 1 << 60}); err != nil {
		t.Fatal(err)
	}
	if v, err := m.Get(key{1}); err != nil || v != (value{Wanted: 12, Theirs: 1 << 60}) {
		t.Errorf("get: %v, %v", v, err)
	}
	if err := m.Delete(key{1}); err != nil || len(content(t, m)) != 0 {
		t.Errorf("delete: %v, left %v", err, content(t, m))
	}
}

func TestAllStops(t *testing.T) {
	m := newMap(t, 8)
	for i := range uint32(5) {
		if err := m.Put(key{i}, value{}); err != nil {
			t.Fatal(err)
		}
	}
	n := 0
	for _, err := range m.All() {
		if err != nil {
			t.Fatal(err)
		}
		if n++; n == 2 {
			break
		}
	}
	if n != 2 || len(content(t, m)) != 5 {
		t.Errorf("a walk that is left after 2 saw %d; %d entries", n, len(content(t, m)))
	}
}

func TestSync(t *testing.T) {
	for name, c := range map[string]struct {
		have, want map[key]value
		result     map[key]value
		changes    Changes
	}{
		"empty to empty": {nil, nil, map[key]value{}, Changes{}},
		"fill": {
			nil, map[key]value{{1}: {Wanted: 1}, {2}: {Wanted: 2}},
			map[key]value{{1}: {Wanted: 1}, {2}: {Wanted: 2}}, Changes{Written: 2},
		},
		"empty": {
			map[key]value{{1}: {Wanted: 1}, {2}: {Wanted: 2}}, nil,
			map[key]value{}, Changes{Deleted: 2},
		},
		"nothing to do": {
			map[key]value{{1}: {Wanted: 1}}, map[key]value{{1}: {Wanted: 1}},
			map[key]value{{1}: {Wanted: 1}}, Changes{},
		},
		"the programs' field is kept": {
			map[key]value{{1}: {Wanted: 1, Theirs: 99}}, map[key]value{{1}: {Wanted: 1}},
			map[key]value{{1}: {Wanted: 1, Theirs: 99}}, Changes{},
		},
		"one of each": {
			map[key]value{{1}: {Wanted: 1}, {2}: {Wanted: 2, Theirs: 99}, {3}: {Wanted: 3}},
			map[key]value{{1}: {Wanted: 1}, {2}: {Wanted: 22}, {4}: {Wanted: 4}},
			map[key]value{{1}: {Wanted: 1}, {2}: {Wanted: 22}, {4}: {Wanted: 4}}, Changes{Written: 2, Deleted: 1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMap(t, 8)
			for k, v := range c.have {
				if err := m.Put(k, v); err != nil {
					t.Fatal(err)
				}
			}
			wanted := maps.Clone(c.want)
			changes, err := Sync(m, c.want, same)
			if err != nil || changes != c.changes {
				t.Errorf("changes %+v, %v; want %+v", changes, err, c.changes)
			}
			if got := content(t, m); !maps.Equal(got, c.result) {
				t.Errorf("content is %v, want %v", got, c.result)
			}
			if !maps.Equal(wanted, c.want) {
				t.Error("Sync has changed what was wanted")
			}
			again, err := Sync(m, c.want, same)
			if err != nil || again != (Changes{}) {
				t.Errorf("a second Sync: %+v, %v", again, err)
			}
		})
	}
}

// TestSyncIntoFullMap has room for what is wanted only after the deletes, which
// come last: what is there must not suffer.
func TestSyncIntoFullMap(t *testing.T) {
	m := newMap(t, 2)
	for i := range uint32(2) {
		if err := m.Put(key{i}, value{Wanted: i}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Sync(m, map[key]value{{7}: {}}, same); err == nil {
		t.Fatal("a map of 2 took a third entry")
	}
	if left := content(t, m); len(left) != 2 {
		t.Errorf("entries were deleted before the new ones were in: %v", left)
	}
}

func TestOpen(t *testing.T) {
	dir := priv.Isolate(t)
	path := filepath.Join(dir, "test")
	if _, err := Open[key, value](path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("open what is not there: %v", err)
	}
	m := newMap(t, 8)
	if err := m.Pin(path); err != nil {
		t.Fatal(err)
	}
	again, err := Open[key, value](path)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if err := again.Put(key{5}, value{Wanted: 55}); err != nil {
		t.Fatal(err)
	}
	if v, err := m.Get(key{5}); err != nil || v.Wanted != 55 {
		t.Errorf("through the other handle: %v, %v", v, err)
	}
}

func TestErrorsNameTheMap(t *testing.T) {
	m := newMap(t, 8)
	_, err := m.Get(key{7})
	if want := fmt.Sprintf("look up %v in map test: ", key{7}); err == nil || err.Error()[:len(want)] != want {
		t.Errorf("error: %v, want %q...", err, want)
	}
}

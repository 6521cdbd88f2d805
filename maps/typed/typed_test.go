package typed

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

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

// bring does both halves of a Sync in the order of most callers.
func bring(t *testing.T, m *Map[key, value], want map[key]value) error {
	t.Helper()
	s := Sync[key, value]{Map: m, Have: content(t, m), Same: same}
	keep := func(k key, _ value) bool { _, ok := want[k]; return ok }
	err := errors.Join(s.Add(want), s.Remove(keep))
	if got := content(t, m); !maps.EqualFunc(got, s.Have, same) {
		t.Errorf("Sync takes the map to hold %v, it holds %v", s.Have, got)
	}
	return err
}

func TestSync(t *testing.T) {
	for name, c := range map[string]struct {
		have, want map[key]value
		result     map[key]value
	}{
		"empty to empty": {nil, nil, map[key]value{}},
		"fill": {
			nil, map[key]value{{1}: {Wanted: 1}, {2}: {Wanted: 2}},
			map[key]value{{1}: {Wanted: 1}, {2}: {Wanted: 2}},
		},
		"empty": {
			map[key]value{{1}: {Wanted: 1}, {2}: {Wanted: 2}}, nil,
			map[key]value{},
		},
		"nothing to do": {
			map[key]value{{1}: {Wanted: 1}}, map[key]value{{1}: {Wanted: 1}},
			map[key]value{{1}: {Wanted: 1}},
		},
		"the programs' field is kept": {
			map[key]value{{1}: {Wanted: 1, Theirs: 99}}, map[key]value{{1}: {Wanted: 1}},
			map[key]value{{1}: {Wanted: 1, Theirs: 99}},
		},
		"one of each": {
			map[key]value{{1}: {Wanted: 1}, {2}: {Wanted: 2, Theirs: 99}, {3}: {Wanted: 3}},
			map[key]value{{1}: {Wanted: 1}, {2}: {Wanted: 22}, {4}: {Wanted: 4}},
			map[key]value{{1}: {Wanted: 1}, {2}: {Wanted: 22}, {4}: {Wanted: 4}},
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
			if err := bring(t, m, c.want); err != nil {
				t.Error(err)
			}
			if got := content(t, m); !maps.Equal(got, c.result) {
				t.Errorf("content is %v, want %v", got, c.result)
			}
			if !maps.Equal(wanted, c.want) {
				t.Error("Sync has changed what was wanted")
			}
			// A frozen map takes no write.
			if err := m.Freeze(); err != nil {
				t.Fatal(err)
			}
			if err := bring(t, m, c.want); err != nil {
				t.Errorf("a second Sync writes: %v", err)
			}
		})
	}
}

// TestSyncIntoFullMap has room for what is wanted only after the deletes: what
// comes first is the caller's to say, and what there is no room for is named.
func TestSyncIntoFullMap(t *testing.T) {
	m := newMap(t, 2)
	for i := range uint32(2) {
		if err := m.Put(key{i}, value{Wanted: i}); err != nil {
			t.Fatal(err)
		}
	}
	s := Sync[key, value]{Map: m, Have: content(t, m), Same: same}
	// Two that are new and one that changes: the map is full for the new ones alone.
	want := map[key]value{{0}: {Wanted: 77}, {7}: {}, {8}: {}}
	err := s.Add(want)
	var failed Errors[key]
	if !errors.As(err, &failed) || len(failed) != 2 || failed[key{7}] == nil || failed[key{8}] == nil || !errors.Is(err, ErrFull) {
		t.Fatalf("a map of 2 took more: %v", err)
	}
	if want := "write {7}: map test is full (2 entries), and 1 more"; err.Error() != want {
		t.Errorf("the error says %q, want %q", err, want)
	}
	if seven, others := failed.Split(func(k key) bool { return k.ID == 7 }); seven.Error() != failed[key{7}].Error() || others.Error() != failed[key{8}].Error() {
		t.Errorf("split into %v and %v", seven, others)
	}
	if all, none := failed.Split(func(key) bool { return true }); none != nil || all.Error() != err.Error() {
		t.Errorf("split into %v and %v", all, none)
	}
	if left := content(t, m); !maps.Equal(left, map[key]value{{0}: {Wanted: 77}, {1}: {Wanted: 1}}) {
		t.Errorf("entries were deleted before the new ones were in, or kept back: %v", left)
	}
	if err := s.Remove(func(key, value) bool { return false }); err != nil || len(s.Have) != 0 {
		t.Errorf("remove all: %v, left %v", err, s.Have)
	}
	delete(want, key{8})
	if err := s.Add(want); err != nil || !maps.Equal(content(t, m), want) {
		t.Errorf("after the deletes: %v, %v", err, content(t, m))
	}
}

// TestSyncOfWhatIsGone deletes entries that somebody else has deleted already.
func TestSyncOfWhatIsGone(t *testing.T) {
	m := newMap(t, 8)
	s := Sync[key, value]{Map: m, Have: map[key]value{}}
	for i := range uint32(6) {
		s.Have[key{i}] = value{}
	}
	for _, i := range []uint32{1, 4} {
		if err := m.Put(key{i}, value{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Remove(func(key, value) bool { return false }); err != nil || len(s.Have)+len(content(t, m)) != 0 {
		t.Errorf("%v; left %v, in the map %v", err, s.Have, content(t, m))
	}
}

// TestSyncOfATrie is about the one map type beside hashes that is brought to a content.
func TestSyncOfATrie(t *testing.T) {
	priv.Require(t)
	type prefix struct{ Len, Addr uint32 }
	raw, err := ebpf.NewMap(&ebpf.MapSpec{Name: "test", Type: ebpf.LPMTrie, KeySize: 8, ValueSize: 16, MaxEntries: 3000, Flags: unix.BPF_F_NO_PREALLOC})
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	m := New[prefix, value](raw, "test")
	want := map[prefix]value{}
	for i := range uint32(2500) {
		want[prefix{32, i}] = value{Wanted: i}
	}
	s := Sync[prefix, value]{Map: m, Have: map[prefix]value{}}
	if err := s.Add(want); err != nil {
		t.Fatal(err)
	}
	if got, err := m.Content(); err != nil || !maps.Equal(got, want) {
		t.Errorf("%d entries of %d, %v", len(got), len(want), err)
	}
	if err := s.Remove(func(p prefix, _ value) bool { return p.Addr%2 == 0 }); err != nil {
		t.Fatal(err)
	}
	if got, err := m.Content(); err != nil || len(got) != 1250 || !maps.Equal(got, s.Have) {
		t.Errorf("%d entries are left, %v", len(got), err)
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

// TestFullMap is full in the same words whatever its type, and whoever writes to it.
func TestFullMap(t *testing.T) {
	dir := priv.Isolate(t)
	for _, kind := range []ebpf.MapSpec{
		{Type: ebpf.Hash}, {Type: ebpf.Hash, Flags: unix.BPF_F_NO_PREALLOC}, {Type: ebpf.LPMTrie, Flags: unix.BPF_F_NO_PREALLOC},
	} {
		kind.Name, kind.KeySize, kind.ValueSize, kind.MaxEntries = "test", 8, 16, 2
		raw, err := ebpf.NewMap(&kind)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = raw.Close() })
		path := filepath.Join(dir, fmt.Sprint(kind.Type, kind.Flags))
		if err := raw.Pin(path); err != nil {
			t.Fatal(err)
		}
		type prefix struct{ Len, Addr uint32 }
		m, err := Open[prefix, value](path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = m.Close() })
		for i := range uint32(2) {
			if err := m.Put(prefix{32, i}, value{}); err != nil {
				t.Fatal(err)
			}
		}
		s := Sync[prefix, value]{Map: m, Have: map[prefix]value{}}
		for verb, err := range map[string]error{
			"write": m.Put(prefix{32, 7}, value{}), "insert": m.Insert(prefix{32, 7}, value{}), "write ": s.Add(map[prefix]value{{32, 7}: {}}),
		} {
			want := fmt.Sprintf("%s {32 7}: map %s is full (2 entries)", strings.TrimSpace(verb), filepath.Base(path))
			if !errors.Is(err, ErrFull) || err.Error() != want {
				t.Errorf("%v says %q, want %q", kind.Type, err, want)
			}
		}
	}
}

func TestErrorsNameTheMap(t *testing.T) {
	m := newMap(t, 8)
	_, err := m.Get(key{7})
	if want := fmt.Sprintf("look up %v in map test: ", key{7}); err == nil || err.Error()[:len(want)] != want {
		t.Errorf("error: %v, want %q...", err, want)
	}
}

// TestTrieIsReadWhileItChanges reads prefixes of which most stay and some come and go meanwhile. A change beside the key
// that the kernel's walk has come to can make it pass over the prefixes next to it, so a reading may lack a few; none is
// told twice or with another's value, and once nothing changes nothing is lacking.
func TestTrieIsReadWhileItChanges(t *testing.T) {
	priv.Require(t)
	type prefix struct{ Bits, Address uint32 }
	raw, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.LPMTrie, KeySize: 8, ValueSize: 4, MaxEntries: 20000, Flags: unix.BPF_F_NO_PREALLOC})
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	m := New[prefix, uint32](raw, "trie")
	const stay = 5000
	at := func(i uint32) prefix { return prefix{32, i * 2654435761} } // spread
	for i := range uint32(stay) {
		if err := m.Put(at(i), i); err != nil {
			t.Fatal(err)
		}
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for i := uint32(0); ; i++ {
			select {
			case <-stop:
				return
			default:
				_ = m.Put(at(stay+i%100), 0)
				_ = m.Delete(at(stay + i%100))
			}
		}
	}()
	const few = stay / 100
	for range 20 {
		if missing := missingFrom(t, m, stay, at); missing > few {
			t.Errorf("%d of %d entries that stay are missing, want at most %d", missing, stay, few)
		}
	}
	close(stop)
	<-stopped
	if missing := missingFrom(t, m, stay, at); missing > 0 {
		t.Errorf("%d of %d entries are missing although nothing changes", missing, stay)
	}
}

// missingFrom reads the map both ways and returns how many of the first entries the poorer reading lacks.
func missingFrom[K comparable](t *testing.T, m *Map[K, uint32], entries uint32, at func(uint32) K) int {
	t.Helper()
	have, err := m.Content()
	if err != nil {
		t.Fatal(err)
	}
	told := map[K]uint32{}
	for e, err := range m.All() {
		if err != nil {
			t.Fatal(err)
		}
		if _, twice := told[e.Key]; twice {
			t.Errorf("%v is told twice", e.Key)
		}
		told[e.Key] = e.Value
	}
	missing := 0
	for _, reading := range []map[K]uint32{have, told} {
		lacks := 0
		for i := range entries {
			switch v, there := reading[at(i)]; {
			case !there:
				lacks++
			case v != i:
				t.Errorf("entry %d is %d", i, v)
			}
		}
		missing = max(missing, lacks)
	}
	return missing
}

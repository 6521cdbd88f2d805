package typed

import (
	"fmt"
	"reflect"
	"slices"

	"github.com/cilium/ebpf"
)

// Viewer shows a map to operators.
type Viewer interface {
	// Show reads the open map; now is CLOCK_MONOTONIC in ns, for ages.
	Show(m *ebpf.Map, name string, now uint64) (Table, error)
}

// View shows a map with a row for each entry.
type View[K comparable, V any] struct {
	Columns []Column
	// Compare sorts the entries.
	Compare func(a, b Entry[K, V]) int
	// Cells is a row of the table: each is printed by fmt.Sprint, a Stamp as its age.
	Cells func(k K, v V) []any
	// Object is a row with all fields; nil: those of key and value.
	Object func(k K, v V) Object
	// Unused reports whether an entry is empty and not to be shown; nil: none is.
	Unused func(v V) bool
}

// Show implements Viewer.
func (w View[K, V]) Show(m *ebpf.Map, name string, now uint64) (Table, error) {
	var entries []Entry[K, V]
	for e, err := range New[K, V](m, name).All() {
		if err != nil {
			return Table{}, err
		}
		if w.Unused == nil || !w.Unused(e.Value) {
			entries = append(entries, e)
		}
	}
	return w.Table(name, entries, now), nil
}

// Table makes the table of entries that have been read.
func (w View[K, V]) Table(name string, entries []Entry[K, V], now uint64) Table {
	slices.SortFunc(entries, w.Compare)
	object := w.Object
	if object == nil {
		keys, values := shapeOf(reflect.TypeFor[K]()), shapeOf(reflect.TypeFor[V]())
		object = func(k K, v V) Object {
			o := make(Object, 0, len(keys)+len(values))
			return values.append(keys.append(o, reflect.ValueOf(k)), reflect.ValueOf(v))
		}
	}
	return Table{
		Name:    name,
		Columns: w.Columns,
		Len:     len(entries),
		Cells:   func(i int) []string { return texts(w.Cells(entries[i].Key, entries[i].Value), now) },
		Object:  func(i int) Object { return object(entries[i].Key, entries[i].Value) },
	}
}

// Stamp is a time (CLOCK_MONOTONIC, ns), shown as how long ago it was; 0: never.
type Stamp uint64

func texts(cells []any, now uint64) []string {
	out := make([]string, len(cells))
	for i, c := range cells {
		if stamp, ok := c.(Stamp); ok {
			out[i] = Age(now, uint64(stamp))
		} else {
			out[i] = fmt.Sprint(c)
		}
	}
	return out
}

// Columns makes columns of names; one that ends in # holds numbers, aligned right.
func Columns(names ...string) []Column {
	out := make([]Column, 0, len(names))
	for _, n := range names {
		if last := len(n) - 1; n[last] == '#' {
			out = append(out, Column{Name: n[:last], Right: true})
			continue
		}
		out = append(out, Column{Name: n})
	}
	return out
}

// Number is a number where 0 means that there is none, shown as a dash.
type Number uint32

// String implements fmt.Stringer.
func (n Number) String() string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(uint32(n))
}

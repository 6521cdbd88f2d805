package registry

import (
	"encoding/binary"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
)

const now = uint64(10 * time.Hour)

// FuzzRows shows whatever bytes a map may hold, in every view.
func FuzzRows(f *testing.F) {
	f.Add([]byte{}, now)
	f.Add([]byte(strings.Repeat("\xff", 160)), uint64(0))
	f.Add([]byte("\x78\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\x0a\xf4\x02\x00"), now)
	f.Fuzz(func(t *testing.T, raw []byte, at uint64) {
		for _, d := range All() {
			if d.View == nil || d.Name == drops.Name || d.Name == traffic.Name { // numbers only
				continue
			}
			// The views have different types, but one pure half.
			view := reflect.ValueOf(d.View).MethodByName("Table")
			if !view.IsValid() {
				t.Fatalf("map %s is not fuzzed", d.Name)
			}
			entries := cut(t, raw, view.Type().In(1))
			show(t, view.Call([]reflect.Value{reflect.ValueOf(d.Name), entries, reflect.ValueOf(at)})[0].Interface().(typed.Table))
		}
	})
}

// cut cuts two entries out of the bytes, as far as they go.
func cut(t *testing.T, raw []byte, slice reflect.Type) reflect.Value {
	t.Helper()
	entries := reflect.MakeSlice(slice, 2, 2)
	buffer := make([]byte, binary.Size(entries.Interface()))
	copy(buffer, raw)
	if _, err := binary.Decode(buffer, binary.NativeEndian, entries.Interface()); err != nil {
		t.Fatal(err)
	}
	return entries
}

func show(t *testing.T, table typed.Table) {
	t.Helper()
	for i := range table.Len {
		cells := table.Cells(i)
		if len(cells) != len(table.Columns) {
			t.Fatalf("%s: %d cells, %d columns", table.Name, len(cells), len(table.Columns))
		}
		for _, cell := range cells {
			if cell == "" || cell != typed.Printable(cell) {
				t.Errorf("%s: cell %q", table.Name, cell)
			}
		}
		object, err := table.Object(i).MarshalJSON()
		if err != nil || !json.Valid(object) {
			t.Errorf("%s: %s, %v", table.Name, object, err)
		}
	}
}

package observe

import (
	"encoding/binary"
	"encoding/json"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
)

// FuzzRows shows whatever bytes a map may hold, in every view.
func FuzzRows(f *testing.F) {
	f.Add([]byte{}, now)
	f.Add([]byte(strings.Repeat("\xff", 160)), uint64(0))
	f.Add([]byte("\x78\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\x0a\xf4\x02\x00"), now)
	f.Fuzz(func(t *testing.T, raw []byte, at uint64) {
		for _, v := range views {
			switch v := v.(type) {
			case view[endpoints.Key, endpoints.Value]:
				show(t, v, raw, at)
			case view[devices.Key, devices.Value]:
				show(t, v, raw, at)
			case view[destinations.Key, destinations.Value]:
				show(t, v, raw, at)
			case view[uplinks.Key, uplinks.Value]:
				show(t, v, raw, at)
			case view[snat.Key, snat.Value]:
				show(t, v, raw, at)
			case view[conntrack.Key, conntrack.Value]:
				show(t, v, raw, at)
			case fragmentsView:
				show(t, datagrams, raw, at)
			case view[config.Key, config.Value]:
				show(t, v, raw, at)
			case view[usage.Key, usage.Value]:
				show(t, v, raw, at)
			case dropsView, trafficView: // numbers only
			default:
				t.Fatalf("map %s is not fuzzed", v.name())
			}
		}
	})
}

// show cuts two entries out of the bytes and shows them.
func show[K comparable, V any](t *testing.T, v view[K, V], raw []byte, at uint64) {
	t.Helper()
	entries := make([]typed.Entry[K, V], 2)
	for i := range entries {
		var k K
		var value V
		raw = cut(t, raw, &k)
		raw = cut(t, raw, &value)
		entries[i] = typed.Entry[K, V]{Key: k, Value: value}
	}
	table := v.table(entries, at)
	for i := range table.Len {
		cells := table.Cells(i)
		if len(cells) != len(table.Columns) {
			t.Fatalf("%s: %d cells, %d columns", v.mapName, len(cells), len(table.Columns))
		}
		for _, cell := range cells {
			if cell == "" || cell != printable(cell) {
				t.Errorf("%s: cell %q", v.mapName, cell)
			}
		}
		object, err := table.Object(i).MarshalJSON()
		if err != nil || !json.Valid(object) {
			t.Errorf("%s: %s, %v", v.mapName, object, err)
		}
	}
}

// cut fills into, as far as the bytes go, and returns the rest of them.
func cut(t *testing.T, raw []byte, into any) []byte {
	t.Helper()
	size := binary.Size(into)
	buffer := make([]byte, size)
	n := copy(buffer, raw)
	if _, err := binary.Decode(buffer, binary.NativeEndian, into); err != nil {
		t.Fatal(err)
	}
	return raw[n:]
}

// Package maps holds the one test that compares both languages' view of the
// maps: every record of the headers, as the BTF of the embedded objects has it,
// against its Go type.
package maps

import (
	"fmt"
	"maps"
	"reflect"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/ebpf-cni/ebpf-cni/bpf"
	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/fragments"
	"github.com/ebpf-cni/ebpf-cni/maps/ports"
	"github.com/ebpf-cni/ebpf-cni/maps/registry"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// shared is every struct of the headers that is no map's key or value, with its Go type.
var shared = map[string]reflect.Type{
	"addr":             reflect.TypeFor[wire.Addr](),
	"tuple":            reflect.TypeFor[wire.Tuple](),
	"port_range":       reflect.TypeFor[config.PortRange](),
	"node_config":      reflect.TypeFor[config.NodeConfig](),
	"tunnel_addresses": reflect.TypeFor[config.TunnelAddresses](),
}

// records is every struct of the headers with its Go type, as the maps of the object have them.
func records(t *testing.T) map[string]reflect.Type {
	t.Helper()
	spec, out := load(t), maps.Clone(shared)
	for _, d := range registry.Pinned() {
		m := spec.Maps[d.Name]
		if m == nil {
			t.Fatalf("map %s is not in the object", d.Name)
		}
		for _, c := range []struct {
			c      btf.Type
			goType reflect.Type
		}{{m.Key, d.Key}, {m.Value, d.Value}} {
			s, ok := c.c.(*btf.Struct)
			if !ok {
				continue
			}
			if was, known := out[s.Name]; known && was != c.goType {
				t.Errorf("map %s has struct %s as %s, elsewhere it is %s", d.Name, s.Name, c.goType, was)
			}
			out[s.Name] = c.goType
		}
	}
	return out
}

func load(t *testing.T) *ebpf.CollectionSpec {
	t.Helper()
	spec, err := bpf.LoadDataplane()
	if err != nil {
		t.Fatal(err)
	}
	return spec
}

func TestStructs(t *testing.T) {
	types, records := load(t).Types, records(t)
	for name, goType := range records {
		t.Run(name, func(t *testing.T) {
			var c *btf.Struct
			if err := types.TypeByName(name, &c); err != nil {
				t.Fatalf("struct %s is not in the object's BTF: %v", name, err)
			}
			for _, difference := range compareStruct(records, c, goType) {
				t.Error(difference)
			}
		})
	}
}

// compareStruct lists how the Go type differs from the C struct.
func compareStruct(records map[string]reflect.Type, c *btf.Struct, goType reflect.Type) (differences []string) {
	differ := func(format string, args ...any) { differences = append(differences, fmt.Sprintf(format, args...)) }
	if goType.Size() != uintptr(c.Size) {
		differ("%s has %d bytes, struct %s has %d", goType, goType.Size(), c.Name, c.Size)
	}
	if goType.Kind() != reflect.Struct {
		// One member stands for the whole: an address, an index.
		if len(c.Members) != 1 || !sameKind(records, c.Members[0].Type, goType) {
			differ("%s is not the one member of struct %s", goType, c.Name)
		}
		return differences
	}
	if goType.NumField() != len(c.Members) {
		differ("%s has %d fields, struct %s has %d", goType, goType.NumField(), c.Name, len(c.Members))
		return differences
	}
	for i, m := range c.Members {
		f := goType.Field(i)
		if want := memberName(f); m.Name != want {
			differ("%s.%s is %s in C, where struct %s has %s; abbreviations are listed in maps/typed/object.go", goType, f.Name, want, c.Name, m.Name)
		}
		if f.Offset != uintptr(m.Offset.Bytes()) {
			differ("%s.%s is at byte %d, %s.%s at %d", goType, f.Name, f.Offset, c.Name, m.Name, m.Offset.Bytes())
		}
		if size, err := btf.Sizeof(m.Type); err != nil || f.Type.Size() != uintptr(size) {
			differ("%s.%s has %d bytes, %s.%s has %d (%v)", goType, f.Name, f.Type.Size(), c.Name, m.Name, size, err)
		}
		if !sameKind(records, m.Type, f.Type) {
			differ("%s.%s is %s, %s.%s is %v", goType, f.Name, f.Type, c.Name, m.Name, m.Type)
		}
	}
	return differences
}

func memberName(f reflect.StructField) string {
	if f.Name == "_" {
		return "pad"
	}
	return typed.CName(f.Name)
}

// sameKind reports whether the two types mean the same bytes: byte order, an
// address against a mere array, an enum against its own Go type.
func sameKind(records map[string]reflect.Type, c btf.Type, goType reflect.Type) bool {
	if t, ok := c.(*btf.Typedef); ok && strings.HasPrefix(t.Name, "__be") {
		return t.Name == "__be16" && goType == reflect.TypeFor[wire.Port]()
	}
	switch c := btf.UnderlyingType(c).(type) {
	case *btf.Struct:
		return records[c.Name] == goType
	case *btf.Enum:
		// destination_kind is the Kind beside the record.
		last := c.Name[strings.LastIndex(c.Name, "_")+1:]
		return strings.EqualFold(goType.Name(), last) && goType.Kind() == reflect.Uint32 && goType != reflect.TypeFor[uint32]()
	case *btf.Array:
		if goType.Kind() != reflect.Array || goType == reflect.TypeFor[wire.Port]() || goType.Len() != int(c.Nelems) {
			return false
		}
		return goType.Elem().Kind() == reflect.Uint8 || sameKind(records, c.Type, goType.Elem())
	case *btf.Int:
		unsigned := c.Encoding&btf.Signed == 0
		switch goType.Kind() {
		case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
			return unsigned
		}
	}
	return false
}

// tupleOf is struct tuple, if P is its ports' type.
type tupleOf[P any] struct {
	Src, Dst     wire.Addr
	Sport, Dport P
	Proto        wire.Protocol
	_            [3]byte
}

// TestCompareStructFindsDifferences spoils a type in every way that matters.
func TestCompareStructFindsDifferences(t *testing.T) {
	var c *btf.Struct
	if err := load(t).Types.TypeByName("tuple", &c); err != nil {
		t.Fatal(err)
	}
	for name, spoilt := range map[string]any{
		"swapped": struct {
			Src, Dst     wire.Addr
			Dport, Sport wire.Port
			Proto        wire.Protocol
			_            [3]byte
		}{},
		"host order": tupleOf[uint16]{}, "too long": tupleOf[uint32]{},
		"other name": struct {
			Src, Dst          wire.Addr
			SourcePort, Dport wire.Port
			Proto             wire.Protocol
			_                 [3]byte
		}{},
		"no struct": uint32(0), "too short": struct{ Src, Dst wire.Addr }{},
		"extra field": struct {
			Src, Dst     wire.Addr
			Sport, Dport wire.Port
			Proto        wire.Protocol
			X            wire.Protocol
			_            [2]byte
		}{},
	} {
		if len(compareStruct(shared, c, reflect.TypeOf(spoilt))) == 0 {
			t.Errorf("%s: %T passes for struct tuple", name, spoilt)
		}
	}
}

// TestMaps holds the registry against what the object declares.
func TestMaps(t *testing.T) {
	spec, records := load(t), records(t)
	known := make(map[string]bool)
	for _, d := range registry.All() {
		m := spec.Maps[d.Name]
		if m == nil || known[d.Name] {
			t.Errorf("map %s: is it in the object? %v, in the registry before? %v", d.Name, m != nil, known[d.Name])
			continue
		}
		known[d.Name] = true
		if d.Content == 0 {
			t.Errorf("map %s: its definition does not say who writes it", d.Name)
		}
		if d.Content == typed.Private {
			continue
		}
		for _, c := range []struct {
			c      btf.Type
			goType reflect.Type
		}{{m.Key, d.Key}, {m.Value, d.Value}} {
			s, isRecord := c.c.(*btf.Struct)
			if isRecord && records[s.Name] != c.goType || !isRecord && !isIndex(c.c, c.goType) {
				t.Errorf("map %s has %v, Go opens it as %s", d.Name, c.c, c.goType)
			}
		}
		if table := spec.Maps[d.Capacity]; d.Capacity != "" && (table == nil || table.MaxEntries != m.MaxEntries) {
			t.Errorf("map %s has %d entries, not the capacity of %q", d.Name, m.MaxEntries, d.Capacity)
		}
	}
	for name := range spec.Maps {
		if !strings.HasPrefix(name, ".") && !known[name] {
			t.Errorf("map %s of the object has no line in maps/registry", name)
		}
	}
	for name, want := range map[string]uint32{
		drops.Name:      wire.DirectionSlots * drops.Slots,
		traffic.Name:    wire.DirectionSlots * traffic.Slots,
		usage.Name:      uint32(usage.Tables),
		ports.Name:      1 << ports.Bits,
		ports.GivenName: (1 << 16) / ports.GivenBits,
		fragments.Name:  fragments.OfWorld + fragments.OfOthers,
		config.Name:     1,
	} {
		if m := spec.Maps[name]; m != nil && m.MaxEntries != want {
			t.Errorf("map %s has %d entries, want %d", name, m.MaxEntries, want)
		}
	}
}

// isIndex reports whether both are the index of an array: in Go a uint32, or a struct of one.
func isIndex(c btf.Type, goType reflect.Type) bool {
	if goType.Kind() == reflect.Struct && goType.NumField() == 1 {
		goType = goType.Field(0).Type
	}
	i, ok := btf.UnderlyingType(c).(*btf.Int)
	return ok && i.Size == 4 && i.Encoding&btf.Signed == 0 && goType.Kind() == reflect.Uint32
}

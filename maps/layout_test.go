// Package maps holds the one test that compares both languages' view of the
// maps: every record of the headers, as the BTF of the embedded objects has it,
// against its Go type.
package maps

import (
	"fmt"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/ebpf-cni/ebpf-cni/bpf"
	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/fragments"
	"github.com/ebpf-cni/ebpf-cni/maps/journal"
	"github.com/ebpf-cni/ebpf-cni/maps/ports"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
)

// records is every struct of the headers with its Go type.
var records = map[string]reflect.Type{
	"addr":            reflect.TypeFor[wire.Addr](),
	"tuple":           reflect.TypeFor[wire.Tuple](),
	"config":          reflect.TypeFor[config.Value](),
	"node_config":     reflect.TypeFor[config.NodeConfig](),
	"conntrack_entry": reflect.TypeFor[conntrack.Value](),
	"destination_key": reflect.TypeFor[destinations.Key](),
	"destination":     reflect.TypeFor[destinations.Value](),
	"device_key":      reflect.TypeFor[devices.Key](),
	"device":          reflect.TypeFor[devices.Value](),
	"drop_counter":    reflect.TypeFor[drops.Value](),
	"endpoint_key":    reflect.TypeFor[endpoints.Key](),
	"endpoint":        reflect.TypeFor[endpoints.Value](),
	"fragment":        reflect.TypeFor[fragments.Value](),
	"port_count":      reflect.TypeFor[ports.Value](),
	"snat_entry":      reflect.TypeFor[snat.Value](),
	"traffic_counter": reflect.TypeFor[traffic.Value](),
	"uplink_key":      reflect.TypeFor[uplinks.Key](),
	"uplink":          reflect.TypeFor[uplinks.Value](),
	"usage":           reflect.TypeFor[usage.Value](),
}

// mapTypes is what the Go packages open each map as.
var mapTypes = map[string]struct{ key, value reflect.Type }{
	config.Name:            {reflect.TypeFor[config.Key](), reflect.TypeFor[config.Value]()},
	conntrack.Name:         {reflect.TypeFor[conntrack.Key](), reflect.TypeFor[conntrack.Value]()},
	destinations.Name:      {reflect.TypeFor[destinations.Key](), reflect.TypeFor[destinations.Value]()},
	devices.Name:           {reflect.TypeFor[devices.Key](), reflect.TypeFor[devices.Value]()},
	drops.Name:             {reflect.TypeFor[uint32](), reflect.TypeFor[drops.Value]()},
	endpoints.Name:         {reflect.TypeFor[endpoints.Key](), reflect.TypeFor[endpoints.Value]()},
	fragments.Name:         {reflect.TypeFor[fragments.Key](), reflect.TypeFor[fragments.Value]()},
	journal.SnatName:       {reflect.TypeFor[journal.Key](), reflect.TypeFor[journal.Value]()},
	journal.ConntrackName:  {reflect.TypeFor[journal.Key](), reflect.TypeFor[journal.Value]()},
	journal.CandidatesName: {reflect.TypeFor[journal.Key](), reflect.TypeFor[journal.Value]()},
	ports.Name:             {reflect.TypeFor[ports.Key](), reflect.TypeFor[ports.Value]()},
	snat.Name:              {reflect.TypeFor[snat.Key](), reflect.TypeFor[snat.Value]()},
	snat.ReverseName:       {reflect.TypeFor[snat.Key](), reflect.TypeFor[snat.Value]()},
	traffic.Name:           {reflect.TypeFor[uint32](), reflect.TypeFor[traffic.Value]()},
	uplinks.Name:           {reflect.TypeFor[uplinks.Key](), reflect.TypeFor[uplinks.Value]()},
	usage.Name:             {reflect.TypeFor[usage.Key](), reflect.TypeFor[usage.Value]()},
}

// enum is one enum of the headers with its Go constants.
type enum struct {
	// prefix of the enumerators; what follows is name(value) in capitals.
	prefix string
	// name is the String method of the Go type; nil for constants that have none.
	name func(uint64) string
	// constants are all enumerators.
	constants map[string]uint64
	// count is the enumerator that counts the others, if there is one.
	count string
	// unnamed is a value that C does not know and Go must not name.
	unnamed uint64
}

func named[E interface {
	~uint8 | ~uint32
	fmt.Stringer
}](v uint64) string {
	return E(v).String()
}

var enums = map[string]enum{
	"layout": {constants: map[string]uint64{"LAYOUT_VERSION": wire.LayoutVersion}},
	"fragments_layout": {constants: map[string]uint64{
		"FRAGMENTS_OF_WORLD": fragments.OfWorld, "FRAGMENTS_OF_OTHERS": fragments.OfOthers, "FRAGMENTS_EACH": fragments.Each,
	}},
	"fragments_holder": {constants: map[string]uint64{"FRAGMENTS_WORLD": fragments.World, "FRAGMENTS_NODE": fragments.Node}},
	"ports_layout":     {constants: map[string]uint64{"PORTS_BITS": ports.Bits}},
	"drop_layout":      {constants: map[string]uint64{"DROP_SLOTS": drops.Slots}},
	"traffic_layout":   {constants: map[string]uint64{"TRAFFIC_SLOTS": traffic.Slots}},
	"direction": {
		prefix: "DIRECTION_", name: named[wire.Direction], count: "DIRECTIONS", unnamed: uint64(wire.Directions),
		constants: map[string]uint64{
			"DIRECTION_FROM_POD": uint64(wire.FromPod), "DIRECTION_FROM_UPLINK": uint64(wire.FromUplink),
			"DIRECTION_TO_UPLINK": uint64(wire.ToUplink), "DIRECTION_FROM_TUNNEL": uint64(wire.FromTunnel),
			"DIRECTION_TO_POD": uint64(wire.ToPod), "DIRECTIONS": uint64(wire.Directions),
		},
	},
	"destination_kind": {
		prefix: "DESTINATION_", name: named[destinations.Kind], unnamed: 6,
		constants: map[string]uint64{
			"DESTINATION_WORLD": uint64(destinations.World), "DESTINATION_HOST": uint64(destinations.Host),
			"DESTINATION_LOCAL": uint64(destinations.Local), "DESTINATION_POD_CIDR": uint64(destinations.PodCIDR),
			"DESTINATION_NODE": uint64(destinations.Node), "DESTINATION_NATIVE": uint64(destinations.Native),
		},
	},
	"destination_flags": {
		prefix: "DESTINATION_", name: named[destinations.Flags], unnamed: 8,
		constants: map[string]uint64{
			"DESTINATION_TO_STACK": uint64(destinations.ToStack), "DESTINATION_PROTECTED": uint64(destinations.Protected),
			"DESTINATION_PART": uint64(destinations.Part),
		},
	},
	"config_flags": {
		prefix: "CONFIG_", name: named[config.Flags], unnamed: 16,
		constants: map[string]uint64{
			"CONFIG_POD_CIDR_TO_STACK": uint64(config.PodCIDRToStack), "CONFIG_ROUTES_TO_STACK": uint64(config.RoutesToStack),
			"CONFIG_POLICIES":   uint64(config.Policies),
			"CONFIG_FLOWS_MOVE": uint64(config.FlowsMove),
		},
	},
	"flow_state": {
		prefix: "FLOW_", name: named[snat.State], unnamed: 32,
		constants: map[string]uint64{
			"FLOW_SYN": uint64(snat.SYN), "FLOW_ACK": uint64(snat.ACK), "FLOW_FIN": uint64(snat.FIN),
			"FLOW_RESET": uint64(snat.Reset), "FLOW_PACKET": uint64(snat.Packet),
		},
	},
	"snat_flags": {
		prefix: "SNAT_", name: named[snat.Flags], unnamed: 8,
		constants: map[string]uint64{
			"SNAT_VIA_STACK": uint64(snat.ViaStack), "SNAT_HOST": uint64(snat.Host), "SNAT_COUNTED": uint64(snat.Counted),
		},
	},
	"traffic_event": {
		prefix: "TRAFFIC_", name: named[traffic.Event], count: "TRAFFIC_EVENTS", unnamed: uint64(traffic.Events),
		constants: map[string]uint64{
			"TRAFFIC_DELIVERED": uint64(traffic.Delivered), "TRAFFIC_FORWARDED": uint64(traffic.Forwarded),
			"TRAFFIC_STACK": uint64(traffic.Stack), "TRAFFIC_ANSWERED": uint64(traffic.Answered),
			"TRAFFIC_SNAT_ALLOCATED": uint64(traffic.SnatAllocated), "TRAFFIC_SNAT_RETRIED": uint64(traffic.SnatRetried),
			"TRAFFIC_EVENTS": uint64(traffic.Events),
		},
	},
	"usage_table": {
		prefix: "USAGE_", name: named[usage.Table], count: "USAGE_TABLES", unnamed: uint64(usage.Tables),
		constants: map[string]uint64{
			"USAGE_SNAT": uint64(usage.Snat), "USAGE_CONNTRACK": uint64(usage.Conntrack), "USAGE_TABLES": uint64(usage.Tables),
		},
	},
	"drop_reason": {
		prefix: "DROP_", name: named[drops.Reason], count: "DROP_REASONS", unnamed: uint64(drops.Reasons),
		constants: map[string]uint64{
			"DROP_NONE": uint64(drops.None), "DROP_INVALID": uint64(drops.Invalid), "DROP_NOT_IP": uint64(drops.NotIP),
			"DROP_IPV6_UNSUPPORTED": uint64(drops.IPv6Unsupported), "DROP_SPOOFED_SOURCE": uint64(drops.SpoofedSource),
			"DROP_NO_ENDPOINT": uint64(drops.NoEndpoint), "DROP_NODE_OFF_LINK": uint64(drops.NodeOffLink),
			"DROP_UNKNOWN_PROTOCOL": uint64(drops.UnknownProtocol), "DROP_NO_MAPPING": uint64(drops.NoMapping),
			"DROP_SNAT_EXHAUSTED": uint64(drops.SnatExhausted), "DROP_SNAT_LIMIT": uint64(drops.SnatLimit),
			"DROP_SNAT_FULL": uint64(drops.SnatFull), "DROP_CONNTRACK_LIMIT": uint64(drops.ConntrackLimit),
			"DROP_CONNTRACK_FULL": uint64(drops.ConntrackFull), "DROP_FLOW_COLLISION": uint64(drops.FlowCollision),
			"DROP_FRAGMENT_UNKNOWN": uint64(drops.FragmentUnknown), "DROP_NO_SNAT_ADDRESS": uint64(drops.NoSnatAddress),
			"DROP_WRITE_FAILED": uint64(drops.WriteFailed), "DROP_IPSEC_POLICY": uint64(drops.IPsecPolicy),
			"DROP_FORGED_ERROR": uint64(drops.ForgedError), "DROP_ICMP_REDIRECT": uint64(drops.ICMPRedirect),
			"DROP_TABLE_BUSY": uint64(drops.TableBusy), "DROP_BAD_OFFLOAD": uint64(drops.BadOffload),
			"DROP_WRONG_UPLINK": uint64(drops.WrongUplink), "DROP_PORT_LIMIT": uint64(drops.PortLimit),
			"DROP_REASONS": uint64(drops.Reasons),
		},
	},
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
	types := load(t).Types
	for name, goType := range records {
		t.Run(name, func(t *testing.T) {
			var c *btf.Struct
			if err := types.TypeByName(name, &c); err != nil {
				t.Fatalf("struct %s is not in the object's BTF: %v", name, err)
			}
			for _, difference := range compareStruct(c, goType) {
				t.Error(difference)
			}
		})
	}
}

// compareStruct lists how the Go type differs from the C struct.
func compareStruct(c *btf.Struct, goType reflect.Type) (differences []string) {
	differ := func(format string, args ...any) { differences = append(differences, fmt.Sprintf(format, args...)) }
	if goType.Size() != uintptr(c.Size) {
		differ("%s has %d bytes, struct %s has %d", goType, goType.Size(), c.Name, c.Size)
	}
	if goType.Kind() != reflect.Struct {
		// One member stands for the whole: an address, an index.
		if len(c.Members) != 1 || !sameKind(c.Members[0].Type, goType) {
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
			differ("%s.%s stands where struct %s has %s", goType, f.Name, c.Name, m.Name)
		}
		if f.Offset != uintptr(m.Offset.Bytes()) {
			differ("%s.%s is at byte %d, %s.%s at %d", goType, f.Name, f.Offset, c.Name, m.Name, m.Offset.Bytes())
		}
		if size, err := btf.Sizeof(m.Type); err != nil || f.Type.Size() != uintptr(size) {
			differ("%s.%s has %d bytes, %s.%s has %d (%v)", goType, f.Name, f.Type.Size(), c.Name, m.Name, size, err)
		}
		if !sameKind(m.Type, f.Type) {
			differ("%s.%s is %s, %s.%s is %v", goType, f.Name, f.Type, c.Name, m.Name, m.Type)
		}
	}
	return differences
}

func memberName(f reflect.StructField) string {
	if f.Name == "_" {
		return "pad"
	}
	return observe.CName(f.Name)
}

// sameKind reports whether the two types mean the same bytes: byte order, an
// address against a mere array, an enum against its own Go type.
func sameKind(c btf.Type, goType reflect.Type) bool {
	if t, ok := c.(*btf.Typedef); ok && strings.HasPrefix(t.Name, "__be") {
		return t.Name == "__be16" && goType == reflect.TypeFor[wire.Port]()
	}
	switch c := btf.UnderlyingType(c).(type) {
	case *btf.Struct:
		return records[c.Name] == goType
	case *btf.Enum:
		return c.Name == "destination_kind" && goType == reflect.TypeFor[destinations.Kind]()
	case *btf.Array:
		return goType.Kind() == reflect.Array && goType.Elem().Kind() == reflect.Uint8 && goType != reflect.TypeFor[wire.Port]()
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
		if len(compareStruct(c, reflect.TypeOf(spoilt))) == 0 {
			t.Errorf("%s: %T passes for struct tuple", name, spoilt)
		}
	}
}

// TestMaps holds what the Go packages open against what the object declares.
func TestMaps(t *testing.T) {
	spec := load(t)
	for name, m := range spec.Maps {
		if strings.HasPrefix(name, ".") || name == "paths" || name == "refusals" || name == "scratch" {
			continue // of the programs alone: constants, and what they keep for a moment
		}
		types, ok := mapTypes[name]
		if !ok {
			t.Errorf("map %s has no Go package", name)
			continue
		}
		for _, c := range []struct {
			c      btf.Type
			goType reflect.Type
		}{{m.Key, types.key}, {m.Value, types.value}} {
			s, isRecord := c.c.(*btf.Struct)
			if isRecord && records[s.Name] != c.goType || !isRecord && !isIndex(c.c, c.goType) {
				t.Errorf("map %s has %v, Go opens it as %s", name, c.c, c.goType)
			}
		}
	}
	for name := range mapTypes {
		if spec.Maps[name] == nil {
			t.Errorf("map %s is not in the object", name)
		}
	}
	for name, want := range map[string]uint32{
		drops.Name:     uint32(wire.Directions) * drops.Slots,
		traffic.Name:   uint32(wire.Directions) * traffic.Slots,
		usage.Name:     uint32(usage.Tables),
		ports.Name:     1 << ports.Bits,
		fragments.Name: fragments.OfWorld + fragments.OfOthers,
		config.Name:    1,
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

func TestEnums(t *testing.T) {
	types := load(t).Types
	for name, e := range enums {
		t.Run(name, func(t *testing.T) {
			var c *btf.Enum
			if err := types.TypeByName(name, &c); err != nil {
				t.Fatalf("enum %s is not in the object's BTF: %v", name, err)
			}
			seen := map[string]bool{}
			for _, v := range c.Values {
				seen[v.Name] = true
				got, ok := e.constants[v.Name]
				if !ok || got != v.Value {
					t.Errorf("%s is %d in C, in Go %d (known: %v)", v.Name, v.Value, got, ok)
				}
				if e.name == nil || v.Name == e.count {
					continue
				}
				if want := e.prefix + strings.ToUpper(e.name(v.Value)); want != v.Name {
					t.Errorf("Go calls %s %q", v.Name, e.name(v.Value))
				}
			}
			for constant := range e.constants {
				if !seen[constant] {
					t.Errorf("%s is not in C", constant)
				}
			}
			if e.name != nil && regexp.MustCompile(`[a-zA-Z]`).MatchString(e.name(e.unnamed)) {
				t.Errorf("Go calls %d %q, which C does not know", e.unnamed, e.name(e.unnamed))
			}
		})
	}
}

package observe

import (
	"cmp"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// reader is a map that can be shown.
type reader interface {
	name() string
	read(dir bpffs.Dir, now uint64) (Table, error)
}

// view says how one map of keys and values is shown.
type view[K comparable, V any] struct {
	mapName string
	columns []Column
	compare func(a, b K) int
	cells   func(k K, v V, now uint64) []string
	// object is nil where the flattened structs say it all.
	object func(k K, v V) Object
}

func (w view[K, V]) name() string { return w.mapName }

func (w view[K, V]) read(dir bpffs.Dir, now uint64) (Table, error) {
	entries, err := load[K, V](dir, w.mapName)
	if err != nil {
		return Table{}, err
	}
	return w.table(entries, now), nil
}

// table is the pure half of read.
func (w view[K, V]) table(entries []typed.Entry[K, V], now uint64) Table {
	slices.SortFunc(entries, func(a, b typed.Entry[K, V]) int { return w.compare(a.Key, b.Key) })
	object := w.object
	if object == nil {
		keys, values := shapeOf(reflect.TypeFor[K]()), shapeOf(reflect.TypeFor[V]())
		object = func(k K, v V) Object {
			o := make(Object, 0, len(keys)+len(values))
			return values.append(keys.append(o, reflect.ValueOf(k)), reflect.ValueOf(v))
		}
	}
	return Table{
		Name:    w.mapName,
		Columns: w.columns,
		Len:     len(entries),
		Cells:   func(i int) []string { return w.cells(entries[i].Key, entries[i].Value, now) },
		Object:  func(i int) Object { return object(entries[i].Key, entries[i].Value) },
	}
}

// load reads all entries of a pinned map.
func load[K comparable, V any](dir bpffs.Dir, name string) ([]typed.Entry[K, V], error) {
	m, err := ebpf.LoadPinnedMap(dir.Map(name), &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("open pinned map %s: %w", dir.Map(name), err)
	}
	defer m.Close()
	return collect(typed.New[K, V](m, name))
}

// columns makes columns of names; a name that ends in # is a number's.
func columns(names ...string) []Column {
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

var views = []reader{
	view[endpoints.Key, endpoints.Value]{
		mapName: endpoints.Name,
		columns: columns("ADDRESS", "IFINDEX#", "POD MAC", "HOST MAC"),
		compare: func(a, b endpoints.Key) int { return compareAddr(a.Address, b.Address) },
		cells: func(k endpoints.Key, v endpoints.Value, _ uint64) []string {
			return []string{k.Address.String(), number(v.Ifindex), v.PodMAC.String(), v.HostMAC.String()}
		},
	},
	view[devices.Key, devices.Value]{
		mapName: devices.Name,
		columns: columns("IFINDEX#", "IPV4", "IPV6", "POD MAC", "HOST MAC", "SNAT#", "CONNTRACK#", "PACKETS#", "BYTES#"),
		compare: func(a, b devices.Key) int { return cmp.Compare(a.Ifindex, b.Ifindex) },
		cells: func(k devices.Key, v devices.Value, _ uint64) []string {
			return []string{
				number(k.Ifindex), v.IPv4.String(), v.IPv6.String(), v.PodMAC.String(), v.HostMAC.String(),
				number(v.SnatFlows), number(v.ConntrackFlows), number(v.Packets), number(v.Bytes),
			}
		},
	},
	view[destinations.Key, destinations.Value]{
		mapName: destinations.Name,
		columns: columns("PREFIX", "KIND", "NODE", "IFINDEX#", "MTU#", "FLAGS", "UPLINKS", "CHECKED#"),
		compare: func(a, b destinations.Key) int {
			return cmp.Or(compareAddr(a.Prefix, b.Prefix), cmp.Compare(a.PrefixLen, b.PrefixLen))
		},
		cells: func(k destinations.Key, v destinations.Value, now uint64) []string {
			return []string{
				k.Netip().String(), v.Kind.String(), v.Node.String(), orDash(v.Ifindex), orDash(v.MTU),
				v.Flags.String(), bitNumbers(v.Uplinks), Age(now, v.NeighbourChecked),
			}
		},
		object: func(k destinations.Key, v destinations.Value) Object {
			return append(Object{{"prefix", k.Netip().String()}}, flatten(v)...)
		},
	},
	view[uplinks.Key, uplinks.Value]{
		mapName: uplinks.Name,
		columns: columns("IFINDEX#", "IPV4", "IPV6", "BIT#"),
		compare: func(a, b uplinks.Key) int { return cmp.Compare(a.Ifindex, b.Ifindex) },
		cells: func(k uplinks.Key, v uplinks.Value, _ uint64) []string {
			return []string{number(k.Ifindex), v.IPv4.String(), v.IPv6.String(), number(v.Bit)}
		},
	},
	snatView(snat.Name, "AS"),
	snatView(snat.ReverseName, "POD"),
	view[conntrack.Key, conntrack.Value]{
		mapName: conntrack.Name,
		columns: columns("PROTO", "POD", "WORLD", "FROM POD", "FROM WORLD", "IFINDEX#", "AGE#"),
		compare: compareTuple,
		cells: func(k conntrack.Key, v conntrack.Value, now uint64) []string {
			return []string{
				k.Proto.String(), end(k.Src, k.Sport), end(k.Dst, k.Dport), v.FromPod.String(), v.FromWorld.String(),
				number(v.Ifindex), Age(now, v.LastSeen),
			}
		},
	},
	fragmentsView{},
	dropsView{},
	trafficView{},
	view[config.Key, config.Value]{
		mapName: config.Name,
		columns: columns("LAYOUT#", "NODE IPV4", "NODE IPV6", "POD CIDR IPV4", "POD CIDR IPV6", "FLAGS"),
		compare: func(a, b config.Key) int { return cmp.Compare(a.Index, b.Index) },
		cells: func(_ config.Key, v config.Value, _ uint64) []string {
			return []string{
				number(v.Layout), v.NodeIPv4.String(), v.NodeIPv6.String(),
				prefixText(v.PodCIDRIPv4, v.PodCIDRIPv4Len), prefixText(v.PodCIDRIPv6, v.PodCIDRIPv6Len),
				v.Flags.String(),
			}
		},
		object: configObject,
	},
	view[usage.Key, usage.Value]{
		mapName: usage.Name,
		columns: columns("TABLE", "ENTRIES#"),
		compare: func(a, b usage.Key) int { return cmp.Compare(a.Table, b.Table) },
		cells: func(k usage.Key, v usage.Value, _ uint64) []string {
			return []string{k.Table.String(), number(v.Entries)}
		},
	},
}

// snatView shows one half of the masqueraded flows; to names the column of
// what the pod's side becomes.
func snatView(name, to string) view[snat.Key, snat.Value] {
	return view[snat.Key, snat.Value]{
		mapName: name,
		columns: columns("PROTO", "SOURCE", "DESTINATION", to, "STATE", "FLAGS", "IFINDEX#", "AGE#"),
		compare: compareTuple,
		cells: func(k snat.Key, v snat.Value, now uint64) []string {
			return []string{
				k.Proto.String(), end(k.Src, k.Sport), end(k.Dst, k.Dport), end(v.ToAddress, v.ToPort),
				v.State.String(), v.Flags.String(), number(v.Ifindex), Age(now, v.LastSeen),
			}
		},
	}
}

// configObject shows each podCIDR as one prefix instead of address and length.
func configObject(_ config.Key, v config.Value) Object {
	return Object{
		{"layout", v.Layout},
		{"node_ipv4", orEmpty(v.NodeIPv4.String())},
		{"node_ipv6", orEmpty(v.NodeIPv6.String())},
		{"pod_cidr_ipv4", orEmpty(prefixText(v.PodCIDRIPv4, v.PodCIDRIPv4Len))},
		{"pod_cidr_ipv6", orEmpty(prefixText(v.PodCIDRIPv6, v.PodCIDRIPv6Len))},
		{"flags", orEmpty(v.Flags.String())},
	}
}

func prefixText(a wire.Addr, bits uint32) string {
	if a == (wire.Addr{}) {
		return "-"
	}
	return netip.PrefixFrom(a.Netip(), int(bits)).String()
}

func end(a wire.Addr, p wire.Port) string {
	if a == (wire.Addr{}) {
		return "-"
	}
	return netip.AddrPortFrom(a.Netip(), p.Host()).String()
}

func number[N ~uint8 | ~uint16 | ~uint32 | ~uint64](n N) string {
	return strconv.FormatUint(uint64(n), 10)
}

func orDash(n uint32) string {
	if n == 0 {
		return "-"
	}
	return number(n)
}

// bitNumbers lists the bits that are set, such as "0,3".
func bitNumbers(mask uint64) string {
	var set []string
	for bit := range uplinks.Bits {
		if mask&(1<<bit) != 0 {
			set = append(set, strconv.Itoa(bit))
		}
	}
	if len(set) == 0 {
		return "-"
	}
	return strings.Join(set, ",")
}

// compareAddr puts IPv4 before IPv6, absent addresses first.
func compareAddr(a, b wire.Addr) int { return a.Netip().Compare(b.Netip()) }

func compareTuple(a, b wire.Tuple) int {
	return cmp.Or(
		compareAddr(a.Src, b.Src), cmp.Compare(a.Proto, b.Proto), cmp.Compare(a.Sport.Host(), b.Sport.Host()),
		compareAddr(a.Dst, b.Dst), cmp.Compare(a.Dport.Host(), b.Dport.Host()),
	)
}

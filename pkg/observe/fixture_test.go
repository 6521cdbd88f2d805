package observe

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/affinity"
	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/bridges"
	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/counters"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/fragments"
	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/sockets"
	"github.com/ebpf-cni/ebpf-cni/maps/sources"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/test/pins"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

const now = uint64(10 * time.Hour)

// isolated returns a reader of freshly pinned, empty maps.
func isolated(t *testing.T) Reader {
	t.Helper()
	dir := bpffs.Dir(priv.Isolate(t) + "/ebpf-cni")
	pins.Maps(t, dir)
	return Reader{Dir: dir, StateDir: t.TempDir(), Now: func() uint64 { return now }}
}

// put writes entries into a pinned map.
func put[K comparable, V any](t *testing.T, r Reader, name string, entries ...typed.Entry[K, V]) {
	t.Helper()
	m, err := typed.Open[K, V](r.Dir.Map(name))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for _, e := range entries {
		if err := m.Put(e.Key, e.Value); err != nil {
			t.Fatal(err)
		}
	}
}

// count writes v on the last CPU.
func count[S counters.Slot](t *testing.T, r Reader, name string, d wire.Direction, slot S, v counters.Value) {
	t.Helper()
	m, err := counters.Open[S](r.Dir.Map(name))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	each := make([]counters.Value, ebpf.MustPossibleCPU())
	each[len(each)-1] = v
	if err := m.Put(m.Index(d, slot), each); err != nil {
		t.Fatal(err)
	}
}

func addr(text string) wire.Addr { return wire.AddrFrom(netip.MustParseAddr(text)) }

func prefixKey(text string) destinations.Key {
	return destinations.KeyFrom(netip.MustParsePrefix(text))
}

// name leaves the state file of a pod.
func name(t *testing.T, r Reader, ifindex int, pod, uid string) {
	t.Helper()
	err := endpoint.Write(r.StateDir, endpoint.Endpoint{
		ID: endpoint.ID{ContainerID: fmt.Sprintf("container%d", ifindex), IfName: "eth0"}, HostIndex: ifindex, Pod: pod, PodUID: uid,
	})
	if err != nil {
		t.Fatal(err)
	}
}

func fillAll(t *testing.T, r Reader) {
	t.Helper()
	name(t, r, 42, "shop/web", "6ba7-1")
	mac := func(b byte) wire.MAC { return wire.MAC{2, 0, 0, 0, 0, b} }
	tuple := func(src string, sport uint16, dst string, dport uint16, p wire.Protocol) wire.Tuple {
		return wire.Tuple{Src: addr(src), Dst: addr(dst), Sport: wire.PortFrom(sport), Dport: wire.PortFrom(dport), Proto: p}
	}
	put(t, r, endpoints.Name,
		typed.Entry[endpoints.Key, endpoints.Value]{Key: endpoints.Key{Address: addr("10.244.1.10")}, Value: endpoints.Value{Ifindex: 43, PodMAC: mac(3), HostMAC: mac(4)}},
		typed.Entry[endpoints.Key, endpoints.Value]{Key: endpoints.Key{Address: addr("10.244.1.9")}, Value: endpoints.Value{Ifindex: 42, PodMAC: mac(1), HostMAC: mac(2)}},
	)
	put(t, r, devices.Name, typed.Entry[devices.Key, devices.Value]{
		Key:   devices.Key{Ifindex: 42},
		Value: devices.Value{Addresses: wire.Addresses{addr("10.244.1.9")}, PodMAC: mac(1), HostMAC: mac(2), SnatFlows: 3, ConntrackFlows: 1, Packets: 12345, Bytes: 9876543210},
	})
	put(t, r, bridges.Name,
		typed.Entry[bridges.Key, bridges.Value]{Key: bridges.Key(prefixKey("10.244.1.128/25")), Value: bridges.Value{Ifindex: 44}},
		typed.Entry[bridges.Key, bridges.Value]{Key: bridges.Key(prefixKey("10.244.1.129/32"))},
	)
	put(t, r, destinations.Name,
		typed.Entry[destinations.Key, destinations.Value]{Key: prefixKey("10.244.2.0/24"), Value: destinations.Value{
			Kind: destinations.PodCIDR, Ifindex: 2, Node: addr("172.18.0.3"), MTU: 1500, NeighbourChecked: now - uint64(3*time.Second),
			Flags: destinations.ToStack, Uplinks: 9,
		}},
		typed.Entry[destinations.Key, destinations.Value]{Key: prefixKey("10.244.1.0/24"), Value: destinations.Value{Kind: destinations.Local}},
		typed.Entry[destinations.Key, destinations.Value]{Key: prefixKey("172.18.0.2/32"), Value: destinations.Value{Kind: destinations.Host}},
		typed.Entry[destinations.Key, destinations.Value]{Key: prefixKey("fd00::/48"), Value: destinations.Value{Kind: destinations.Native}},
	)
	put(t, r, sources.Name, typed.Entry[sources.Key, sources.Value]{
		Key: sources.KeyFrom(2, netip.MustParsePrefix("10.0.0.0/8")), Value: sources.Value{Address: addr("192.0.2.2")},
	})
	put(t, r, uplinks.Name, typed.Entry[uplinks.Key, uplinks.Value]{Key: uplinks.Key{Ifindex: 2}, Value: uplinks.Value{Addresses: wire.Addresses{addr("172.18.0.2")}, Bit: 3}})
	put(t, r, snat.Name, typed.Entry[snat.Key, snat.Value]{
		Key: tuple("10.244.1.9", 40000, "192.0.2.80", 443, wire.TCP),
		Value: snat.Value{
			ToAddress: addr("172.18.0.2"), ToPort: wire.PortFrom(50000), State: flow.SYN | flow.ACK, Ifindex: 42,
			LastSeen: now - uint64(90*time.Second),
		},
	})
	put(t, r, snat.Name, typed.Entry[snat.Key, snat.Value]{
		Key: tuple("10.244.1.9", 40001, "10.96.0.10", 53, wire.UDP),
		Value: snat.Value{
			ToAddress: addr("10.244.1.9"), ToPort: wire.PortFrom(40001), Flags: flow.Service, Ifindex: 42, LastSeen: now - uint64(time.Second),
			FarAddress: addr("10.244.2.7"), FarPort: wire.PortFrom(5353), Set: 5, Backend: 9, Generation: 2,
		},
	})
	put(t, r, snat.ReverseName, typed.Entry[snat.Key, snat.Value]{
		Key: tuple("172.18.0.2", 50000, "192.0.2.80", 443, wire.TCP),
		Value: snat.Value{
			ToAddress: addr("10.244.1.9"), ToPort: wire.PortFrom(40000), State: flow.ACK, Flags: flow.ViaStack, Ifindex: 42,
			LastSeen: now - uint64(5*time.Minute),
		},
	})
	put(t, r, conntrack.Name, typed.Entry[conntrack.Key, conntrack.Value]{
		Key:   tuple("10.244.1.9", 80, "192.0.2.81", 5555, wire.TCP),
		Value: conntrack.Value{Ifindex: 42, FromPod: flow.ACK, FromWorld: flow.SYN, LastSeen: now - 1},
	})
	put(t, r, fragments.Name, typed.Entry[fragments.Key, fragments.Value]{
		Key: fragments.Key{Slot: 3},
		Value: fragments.Value{
			Src: addr("10.244.1.9"), Dst: addr("192.0.2.80"), ID: 777, Proto: wire.UDP,
			Sport: wire.PortFrom(4000), Dport: wire.PortFrom(53), Ifindex: 42, LastSeen: now - 1,
		},
	})
	fillServices(t, r)
	toPod := hostports.Value{PodAddress: addr("10.244.1.9"), PodPort: wire.PortFrom(80), Ifindex: 42}
	for _, host := range []string{"[::]:8080", "0.0.0.0:8080", "172.18.0.2:443"} {
		at := netip.MustParseAddrPort(host)
		put(t, r, hostports.Name, typed.Entry[hostports.Key, hostports.Value]{Key: hostports.KeyFrom(at.Addr(), at.Port(), wire.TCP), Value: toPod})
	}
	count(t, r, drops.Name, wire.FromPod, drops.SpoofedSource, counters.Value{Packets: 2, Bytes: 128})
	count(t, r, traffic.Name, wire.FromUplink, traffic.Delivered, counters.Value{Packets: 5, Bytes: 500})
	put(t, r, config.Name, typed.Entry[config.Key, config.Value]{Value: config.Value{
		Layout: wire.LayoutVersion, NodeAddresses: wire.Addresses{addr("172.18.0.2")}, PodCIDRAddresses: wire.Addresses{addr("10.244.1.0")}, PodCIDRLens: [wire.Families]uint32{24},
		Flags: config.RoutesToStack, TunnelIfindex: 7, Tunnel: [wire.Families]config.TunnelAddresses{{Source: addr("172.18.0.2"), Address: addr("10.244.1.0")}},
	}})
	put(t, r, usage.Name,
		typed.Entry[usage.Key, usage.Value]{Key: usage.Key{Table: usage.Snat}, Value: usage.Value{Entries: 7}},
		typed.Entry[usage.Key, usage.Value]{Key: usage.Key{Table: usage.Conntrack}, Value: usage.Value{Entries: 1}},
	)
}

// fillServices makes a Service with two endpoints, one of them on this node, which a client keeps.
func fillServices(t *testing.T, r Reader) {
	t.Helper()
	dns := services.ServiceName{Port: wire.PortFrom(53), Proto: wire.UDP}
	copy(dns.Namespace[:], "kube-system")
	copy(dns.Name[:], "kube-dns")
	copy(dns.PortName[:], "dns")
	put(t, r, services.NamesName, typed.Entry[services.SetKey, services.ServiceName]{Key: services.SetKey{Set: 5}, Value: dns})
	put(t, r, services.SetsName, typed.Entry[services.SetKey, services.Set]{
		Key: services.SetKey{Set: 5}, Value: services.Set{Block: services.BlockOf(64, 2, 1), Affinity: 600},
	})
	put(t, r, services.Name,
		typed.Entry[services.Key, services.Value]{
			Key: services.Key{Address: addr("10.96.0.10"), Port: wire.PortFrom(53), Proto: wire.UDP}, Value: services.Value{Set: 5, Flags: services.Local},
		},
		typed.Entry[services.Key, services.Value]{
			Key: services.Key{Address: addr("10.96.0.10")}, Value: services.Value{Flags: services.ClusterIP | services.Answers},
		},
		typed.Entry[services.Key, services.Value]{
			Key: services.Key{Address: addr("0.0.0.0"), Port: wire.PortFrom(30053), Proto: wire.UDP}, Value: services.Value{Set: 5, Flags: services.ExternalLocal},
		},
		typed.Entry[services.Key, services.Value]{
			Key: services.Key{Port: wire.PortFrom(30053), Proto: wire.UDP}, Value: services.Value{Set: 5},
		},
		typed.Entry[services.Key, services.Value]{Key: services.Key{Address: addr("172.18.0.2")}, Value: services.Value{Flags: services.Node | services.Own}},
	)
	put(t, r, services.RangesName,
		typed.Entry[services.RangeKey, services.Range]{Key: services.RangeKeyFrom(5, netip.MustParsePrefix("192.0.2.0/24")), Value: services.Range{Set: 5}},
		typed.Entry[services.RangeKey, services.Range]{Key: services.RangeKeyFrom(5, netip.MustParsePrefix("2001:db8::/32")), Value: services.Range{Set: 5}},
	)
	put(t, r, backends.Name,
		typed.Entry[backends.Key, backends.Value]{Key: backends.Key{Backend: 9}, Value: backends.Value{
			Address: addr("10.244.2.7"), Port: wire.PortFrom(5353), Proto: wire.UDP, Flags: backends.Serving | backends.OnNode, Generation: 2, Set: 5,
		}},
		typed.Entry[backends.Key, backends.Value]{Key: backends.Key{Backend: 11}, Value: backends.Value{
			Address: addr("10.244.2.8"), Port: wire.PortFrom(5353), Proto: wire.UDP, Generation: 4, // of nobody any more
		}},
	)
	put(t, r, affinity.Name, typed.Entry[affinity.Key, affinity.Value]{Key: affinity.Key{Slot: 70}, Value: affinity.Value{
		Client: addr("10.244.1.9"), Set: 5, Backend: 9, Generation: 2, Ifindex: 42, LastSeen: now - uint64(time.Minute),
	}})
	put(t, r, affinity.ClientsName, typed.Entry[affinity.ClientKey, affinity.Client]{
		Key: affinity.ClientKey{Client: addr("192.0.2.80"), Set: 5}, Value: affinity.Client{Backend: 9, Generation: 2, LastSeen: now - uint64(time.Minute)},
	})
	to := sockets.Value{
		FrontendAddress: addr("10.96.0.10"), FrontendPort: wire.PortFrom(53), BackendAddress: addr("10.244.2.7"), BackendPort: wire.PortFrom(5353),
		Proto: wire.UDP, Connected: 1, Set: 5, Backend: 9, Generation: 2,
	}
	put(t, r, sockets.Name,
		typed.Entry[sockets.Key, sockets.Value]{Key: sockets.Key{Cookie: 77}, Value: to},
		typed.Entry[sockets.Key, sockets.Value]{Key: sockets.Key{Cookie: 77, Number: 1}, Value: to},
	)
}

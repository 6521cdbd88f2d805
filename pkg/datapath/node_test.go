package datapath

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/counters"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/raw"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

// node is a node with pods and an uplink in use: what an upgrade must not harm.
type node struct {
	opts   Options
	pods   []int
	uplink int
}

const nodeFlows = 300

// second is one of CLOCK_MONOTONIC: a flow was seen some time after the machine's start.
const second = uint64(time.Second)

// newNode loads programs, stubs unless the options name others, attaches them and fills every map. What starts on it
// next is the build that the options name, the real one without a name, and is loaded also where it is the same.
func newNode(t *testing.T, opts Options) node {
	t.Helper()
	n := node{opts: opts}
	if opts.Spec == nil {
		opts.Spec = stubs(t)
	}
	dp := mustLoad(t, opts)
	n.uplink = addVeth(t, "up")
	check(t, dp.Maps.Uplinks.Put(uplinks.Key{Ifindex: uint32(n.uplink)}, uplinks.Value{Addresses: wire.Addresses{addr("192.0.2.9")}}))
	check(t, dp.AttachUplink(n.uplink, attach.UplinkHooks()))
	check(t, dp.Maps.Devices.Put(devices.Key{Ifindex: devices.World}, devices.Value{})) // no pod
	for i, name := range []string{"pod1", "pod2", "pod3"} {
		pod := addVeth(t, name)
		n.pods = append(n.pods, pod)
		address := wire.AddrFrom(netip.AddrFrom4([4]byte{10, 244, 1, byte(2 + i)}))
		check(t, dp.Attach(pod, attach.FromPod))
		check(t, dp.Maps.Devices.Put(devices.Key{Ifindex: uint32(pod)}, devices.Value{Addresses: wire.Addresses{address}, Packets: 7, SnatFlows: 100}))
		check(t, dp.Maps.Endpoints.Put(endpoints.Key{Address: address}, endpoints.Value{Ifindex: uint32(pod)}))
	}
	for i := range nodeFlows {
		n.addFlow(t, dp.Maps, uint16(i), 1000*second)
	}
	check(t, dp.Maps.Usage.Put(usage.Key{Table: usage.Snat}, usage.Value{Entries: nodeFlows}))
	for i := range 40 {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(10 + i), 0}), 24)
		check(t, dp.Maps.Destinations.Put(destinations.KeyFrom(p), destinations.Value{Kind: destinations.PodCIDR, MTU: 1500}))
	}
	check(t, opts.forget())
	n.setDrops(t, dp.Maps.Drops.Map, 5)
	return n
}

func addr(s string) wire.Addr { return wire.AddrFrom(netip.MustParseAddr(s)) }

func flowKey(port uint16) wire.Tuple {
	return wire.Tuple{Src: addr("10.244.1.2"), Dst: addr("198.51.100.1"), Sport: wire.PortFrom(port), Dport: wire.PortFrom(80), Proto: wire.TCP}
}

// addFlow adds a masqueraded flow, both halves, and one that the world opened.
func (n node) addFlow(t *testing.T, m *Maps, port uint16, seen uint64) {
	t.Helper()
	v := snat.Value{ToAddress: addr("192.0.2.9"), ToPort: wire.PortFrom(port), Ifindex: uint32(n.pods[0]), LastSeen: seen, State: flow.SYN}
	check(t, m.snat().Put(flowKey(port), v))
	reverse := flowKey(port)
	reverse.Src = addr("192.0.2.9")
	v.ToAddress = addr("10.244.1.2")
	check(t, m.snatReverse().Put(reverse, v))
	check(t, m.conntrack().Put(flowKey(port), conntrack.Value{Ifindex: uint32(n.pods[0]), LastSeen: seen, FromWorld: flow.SYN}))
}

func (n node) setDrops(t *testing.T, m *ebpf.Map, packets uint64) {
	t.Helper()
	each := make([]counters.Value, ebpf.MustPossibleCPU())
	for cpu := range each {
		each[cpu].Packets = packets
	}
	check(t, m.Put(dropIndex(m), each))
}

// dropIndex is the key of the one counter that is not zero.
func dropIndex(m *ebpf.Map) uint32 {
	return counters.Of[drops.Reason](m, drops.Name).Index(wire.FromPod, drops.SpoofedSource)
}

// The flow tables are the programs' own: only tests open them by their types.
func (m *Maps) snat() *snat.Map { return typed.New[snat.Key, snat.Value](m.all[snat.Name], snat.Name) }

func (m *Maps) snatReverse() *snat.Map {
	return typed.New[snat.Key, snat.Value](m.all[snat.ReverseName], snat.ReverseName)
}

func (m *Maps) conntrack() *conntrack.Map {
	return typed.New[conntrack.Key, conntrack.Value](m.all[conntrack.Name], conntrack.Name)
}

// verify checks that nothing of the node was lost and that every attachment runs
// the program that is pinned, in its new form or not.
func (n node) verify(t *testing.T) {
	t.Helper()
	n.verifyPrograms(t)
	pinned := func(name string) *ebpf.Map {
		m, err := ebpf.LoadPinnedMap(n.opts.Dir.Map(name), nil)
		check(t, err)
		t.Cleanup(func() { _ = m.Close() })
		return m
	}
	want := map[string]int{
		snat.Name: nodeFlows, snat.ReverseName: nodeFlows, conntrack.Name: nodeFlows, destinations.Name: 40,
		devices.Name: 4, endpoints.Name: 3, uplinks.Name: 1,
	}
	got := make(map[string]int)
	for name := range want {
		check(t, raw.Each(pinned(name), func([]byte, raw.Value) error { got[name]++; return nil }))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
	use, err := raw.Lookup(pinned(usage.Name), raw.Encode(make([]byte, 4), usage.Key{Table: usage.Snat}))
	check(t, err)
	if entries := raw.Decode[usage.Value](use[0]).Entries; entries != nodeFlows {
		t.Errorf("usage says %d entries, want %d", entries, nodeFlows)
	}
	cfg, err := raw.Lookup(pinned(config.Name), make([]byte, 4))
	check(t, err)
	if layout := raw.Decode[config.Value](cfg[0]).Layout; layout != wire.LayoutVersion {
		t.Errorf("layout %d, want %d", layout, wire.LayoutVersion)
	}
	n.verifyDrops(t, pinned(drops.Name), 5)
}

func (n node) verifyDrops(t *testing.T, m *ebpf.Map, packets uint64) {
	t.Helper()
	v, err := raw.Lookup(m, raw.Encode(make([]byte, 4), dropIndex(m)))
	check(t, err)
	for cpu := range v {
		if got := raw.Decode[counters.Value](v[cpu]).Packets; got != packets {
			t.Errorf("drops on CPU %d: %d, want %d", cpu, got, packets)
		}
	}
}

func (n node) verifyPrograms(t *testing.T) {
	t.Helper()
	for p, state := range n.attached(t) {
		if pin := pinnedID(t, n.opts, p.Hook.Program()); state.ProgramID != pin {
			t.Errorf("%s of interface %d runs program %d, pinned is %d", p.Hook, p.Ifindex, state.ProgramID, pin)
		}
	}
}

// attached returns what is on the node's hooks; each must carry something.
func (n node) attached(t *testing.T) map[attach.Place]attach.State {
	t.Helper()
	places := []attach.Place{{Ifindex: n.uplink, Hook: attach.FromUplink}, {Ifindex: n.uplink, Hook: attach.ToUplink}}
	for _, pod := range n.pods {
		places = append(places, attach.Place{Ifindex: pod, Hook: attach.FromPod})
	}
	out := make(map[attach.Place]attach.State)
	for _, p := range places {
		state, err := n.opts.attacher().Attached(p.Ifindex, p.Hook)
		check(t, err)
		if state.Mode == "" {
			t.Errorf("%s of interface %d carries nothing", p.Hook, p.Ifindex)
		}
		out[p] = state
	}
	return out
}

func pinnedID(t *testing.T, opts Options, name string) ebpf.ProgramID {
	t.Helper()
	p, err := ebpf.LoadPinnedProgram(opts.Dir.Program(name), nil)
	check(t, err)
	defer p.Close()
	info, err := p.Info()
	check(t, err)
	id, _ := info.ID()
	return id
}

// pins lists every pin with the ID of its object.
func (n node) pins(t *testing.T) map[string]int {
	t.Helper()
	out := make(map[string]int)
	check(t, filepath.WalkDir(string(n.opts.Dir), func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if m, err := ebpf.LoadPinnedMap(path, nil); err == nil {
			defer m.Close()
			info, err := m.Info()
			check(t, err)
			id, _ := info.ID()
			out[path] = int(id)
			return nil
		}
		if p, err := ebpf.LoadPinnedProgram(path, nil); err == nil {
			defer p.Close()
			info, err := p.Info()
			check(t, err)
			id, _ := info.ID()
			out[path] = int(id)
			return nil
		}
		out[path] = 0
		return nil
	}))
	return out
}

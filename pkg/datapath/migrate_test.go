package datapath

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/affinity"
	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/counters"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/raw"
	"github.com/ebpf-cni/ebpf-cni/maps/registry"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath/migrate"
	"github.com/ebpf-cni/ebpf-cni/test/pins"
)

// stubs are pins.Stubs with smaller arrays for Services, since tests read maps whole.
func stubs(t testing.TB) *ebpf.CollectionSpec {
	t.Helper()
	spec := pins.Stubs(t)
	for _, name := range []string{services.SetsName, backends.Name, backends.SlotsName, affinity.Name} {
		spec.Maps[name].MaxEntries = 1024
	}
	return spec
}

// grown is a later build in which every map's values are larger.
func grown(t testing.TB) *ebpf.CollectionSpec {
	t.Helper()
	spec := stubs(t)
	for _, d := range registry.Pinned() {
		grow(spec, d.Name, 16)
	}
	return spec
}

// snapshot reads a pinned map whole, values as text.
func snapshot(t *testing.T, opts Options, name string) map[string]string {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(opts.Dir.Map(name), nil)
	check(t, err)
	defer m.Close()
	out := make(map[string]string)
	check(t, raw.Each(m, func(key []byte, v raw.Value) error {
		for cpu := range v {
			out[fmt.Sprintf("%x/%d", key, cpu)] = string(v[cpu])
		}
		return nil
	}))
	return out
}

func TestGrownLayoutKeepsEveryEntry(t *testing.T) {
	for _, mode := range modes() {
		t.Run(string(mode), func(t *testing.T) {
			n := newNode(t, isolated(t, mode))
			before := make(map[string]map[string]string)
			for _, d := range registry.Pinned() {
				name := d.Name
				before[name] = snapshot(t, n.opts, name)
			}
			n.opts.Spec = grown(t)
			mustLoad(t, n.opts)
			n.verify(t)
			for _, d := range registry.Pinned() {
				name := d.Name
				for k, v := range before[name] {
					before[name][k] = v + string(make([]byte, 16))
				}
				if diff := cmp.Diff(before[name], snapshot(t, n.opts, name)); diff != "" {
					t.Errorf("map %s (-want +got):\n%s", name, diff)
				}
			}
		})
	}
}

// older is the build before flows named their far ends and pods their namespaces, whose values are shorter.
func older(t testing.TB) *ebpf.CollectionSpec {
	t.Helper()
	spec := stubs(t)
	for name, size := range map[string]uint32{snat.Name: 40, snat.ReverseName: 40, devices.Name: 80} {
		m := spec.Maps[name]
		m.Key, m.Value, m.ValueSize = nil, nil, size
	}
	return spec
}

// TestRecordsOfAnOlderBuildAreExtended with zeros: its flows are to no Service.
func TestRecordsOfAnOlderBuildAreExtended(t *testing.T) {
	opts := isolated(t, attach.Auto)
	opts.Spec = older(t)
	dp := mustLoad(t, opts)
	short := []string{snat.Name, snat.ReverseName, devices.Name}
	for _, name := range short {
		m := dp.Maps.all[name]
		for i := range byte(nodeFlows % 256) {
			value := bytes.Repeat([]byte{i + 1}, int(m.ValueSize()))
			check(t, raw.Update(m, bytes.Repeat([]byte{i}, int(m.KeySize())), raw.Value{value}, ebpf.UpdateAny))
		}
	}
	opts.Spec = stubs(t)
	dp = mustLoad(t, opts)
	for _, name := range short {
		m, was := dp.Maps.all[name], older(t).Maps[name].ValueSize
		if m.ValueSize() <= was {
			t.Fatalf("%s: a value has %d bytes, had %d: this shows nothing", name, m.ValueSize(), was)
		}
		var entries int
		check(t, raw.Each(m, func(key []byte, v raw.Value) error {
			entries++
			want := append(bytes.Repeat([]byte{key[0] + 1}, int(was)), make([]byte, m.ValueSize()-was)...)
			if !bytes.Equal(v[0], want) {
				t.Errorf("%s: % x, want % x", name, v[0], want)
			}
			return nil
		}))
		if entries != nodeFlows%256 {
			t.Errorf("%s: %d entries, want %d", name, entries, nodeFlows%256)
		}
	}
}

func TestCapacityChangesWithItsEntries(t *testing.T) {
	n := newNode(t, isolated(t, attach.Auto))
	for _, entries := range []uint32{4096, nodeFlows} {
		n.opts.SnatEntries, n.opts.ConntrackEntries = entries, entries
		dp := mustLoad(t, n.opts)
		n.verify(t)
		for _, name := range []string{snat.Name, snat.ReverseName, conntrack.Name} {
			if got := dp.Maps.Capacity(name); got != entries {
				t.Errorf("map %s holds %d, want %d", name, got, entries)
			}
		}
	}
}

// oldMaps opens the maps of a node as the old programs have them, whatever is
// pinned later.
func (n node) oldMaps(t *testing.T) *Maps {
	t.Helper()
	all := make(map[string]*ebpf.Map)
	for _, d := range registry.Pinned() {
		name := d.Name
		m, err := ebpf.LoadPinnedMap(n.opts.Dir.Map(name), nil)
		check(t, err)
		t.Cleanup(func() { _ = m.Close() })
		all[name] = m
	}
	return wrapMaps(all)
}

// newMap opens a map that the new programs have, before it is published.
func (n node) newMap(t *testing.T, name string) *ebpf.Map {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(migrate.Path(n.opts.Dir, name), nil)
	check(t, err)
	t.Cleanup(func() { _ = m.Close() })
	return m
}

// TestWhatHappensDuringTheSwitchIsNotLost plays the old programs, which write to
// the old maps until the last of them is replaced, and the new ones.
func TestWhatHappensDuringTheSwitchIsNotLost(t *testing.T) {
	n := newNode(t, isolated(t, attach.Auto))
	old := n.oldMaps(t)
	n.opts.Spec = grown(t)
	attached := 0
	dp, err := load(context.Background(), n.opts, func(s step) error {
		switch s {
		case stepFilled:
			// A flow that ends and one that begins before the switch.
			check(t, old.snat().Delete(flowKey(1)))
			n.addFlow(t, old, 1, 1500*second)
		case stepAttached:
			if attached++; attached == 1 {
				n.oldProgramsWrite(t, old)
				n.newProgramsWrite(t)
			}
		}
		return nil
	})
	check(t, err)
	defer dp.Close()
	want := map[uint16]snat.Value{
		1: {LastSeen: 1500 * second, State: flow.SYN}, 2: {LastSeen: 3000 * second, State: flow.SYN | flow.ACK}, 3: {LastSeen: 1000 * second, State: flow.SYN | flow.FIN},
		4: {LastSeen: 4000 * second, State: flow.FIN}, 5000: {LastSeen: 2000 * second, State: flow.SYN}, 6000: {LastSeen: 2500 * second, State: flow.SYN},
	}
	for port, w := range want {
		have, err := raw.Lookup(dp.Maps.snat().Map, raw.Encode(make([]byte, 40), flowKey(port)))
		check(t, err)
		if have == nil {
			t.Errorf("flow %d is lost", port)
			continue
		}
		if got := raw.Decode[snat.Value](have[0]); got.LastSeen != w.LastSeen || got.State != w.State {
			t.Errorf("flow %d: seen %d state %s, want %d %s", port, got.LastSeen, got.State, w.LastSeen, w.State)
		}
	}
	n.verifyDrops(t, dp.Maps.Drops.Map, 5+3+4)
	use, err := raw.Lookup(dp.Maps.Usage.Map, make([]byte, 4))
	check(t, err)
	if got := raw.Decode[usage.Value](use[0]).Entries; got != nodeFlows+2 {
		t.Errorf("usage %d, want %d", got, nodeFlows+2)
	}
}

// oldProgramsWrite renews flow 2, sees a FIN of flow 3 in the same second, opens
// flow 5000 and drops three packets on each CPU.
func (n node) oldProgramsWrite(t *testing.T, old *Maps) {
	t.Helper()
	v, err := old.snat().Get(flowKey(2))
	check(t, err)
	v.LastSeen, v.State = 3000*second, flow.ACK
	check(t, old.snat().Put(flowKey(2), v))
	v, err = old.snat().Get(flowKey(3))
	check(t, err)
	v.State = flow.FIN
	check(t, old.snat().Put(flowKey(3), v))
	n.addFlow(t, old, 5000, 2000*second)
	check(t, old.Usage.Put(usage.Key{Table: usage.Snat}, usage.Value{Entries: nodeFlows + 1}))
	n.setDrops(t, old.Drops.Map, 5+3)
}

// newProgramsWrite renews flow 4, opens flow 6000 and drops four packets on each CPU.
func (n node) newProgramsWrite(t *testing.T) {
	t.Helper()
	m := n.newMap(t, snat.Name)
	for port, v := range map[uint16]snat.Value{
		4:    {ToAddress: addr("192.0.2.9"), ToPort: wire.PortFrom(4), Ifindex: uint32(n.pods[0]), LastSeen: 4000 * second, State: flow.FIN},
		6000: {ToAddress: addr("192.0.2.9"), ToPort: wire.PortFrom(6000), Ifindex: uint32(n.pods[0]), LastSeen: 2500 * second, State: flow.SYN},
	} {
		check(t, raw.Update(m, raw.Encode(make([]byte, 40), flowKey(port)), raw.Value{raw.Encode(make([]byte, m.ValueSize()), v)}, ebpf.UpdateAny))
	}
	u := n.newMap(t, usage.Name)
	use := raw.Value{raw.Encode(make([]byte, u.ValueSize()), usage.Value{Entries: nodeFlows + 1})}
	check(t, raw.Update(u, make([]byte, 4), use, ebpf.UpdateAny))
	each := make(raw.Value, ebpf.MustPossibleCPU())
	for cpu := range each {
		each[cpu] = raw.Encode(make([]byte, 32), counters.Value{Packets: 5 + 4})
	}
	m = n.newMap(t, drops.Name)
	check(t, raw.Update(m, raw.Encode(make([]byte, 4), dropIndex(m)), each, ebpf.UpdateAny))
}

// TestAFailureAtAnyStepPutsEverythingBack fails every step in turn, each time it
// comes, with maps that move and with maps that stay.
func TestAFailureAtAnyStepPutsEverythingBack(t *testing.T) {
	for _, build := range []struct {
		name string
		spec func(testing.TB) *ebpf.CollectionSpec
	}{{"same layout", stubs}, {"grown layout", grown}} {
		t.Run(build.name, func(t *testing.T) {
			n := newNode(t, isolated(t, attach.Auto))
			before, old := n.pins(t), n.attached(t)
			broken := errors.New("broken")
			opts := n.opts
			opts.Spec = build.spec(t)
			for fail := 0; ; fail++ {
				var steps []step
				dp, err := load(context.Background(), opts, func(s step) error {
					if steps = append(steps, s); len(steps) > fail {
						return broken
					}
					return nil
				})
				last := slices.Compact(slices.Clone(steps))[len(slices.Compact(slices.Clone(steps)))-1]
				if last == stepPublished {
					// What is published is not taken back: the new programs run.
					if dp != nil {
						_ = dp.Close()
					}
					return
				}
				if !errors.Is(err, broken) {
					t.Fatalf("step %d (%s): %v", fail, last, err)
				}
				if diff := cmp.Diff(before, n.pins(t)); diff != "" {
					t.Errorf("step %d (%s): pins (-before +after):\n%s", fail, last, diff)
				}
				if diff := cmp.Diff(old, n.attached(t)); diff != "" {
					t.Errorf("step %d (%s): attachments (-before +after):\n%s", fail, last, diff)
				}
				n.verify(t)
			}
		})
	}
}

func TestFlowsOfAFailedUpgradeAreGivenBack(t *testing.T) {
	n := newNode(t, isolated(t, attach.Auto))
	old := n.oldMaps(t)
	opts := n.opts
	opts.Spec = grown(t)
	broken := errors.New("broken")
	_, err := load(context.Background(), opts, func(s step) error {
		if s != stepAttached {
			return nil
		}
		n.newProgramsWrite(t)
		return broken
	})
	if !errors.Is(err, broken) {
		t.Fatal(err)
	}
	v, err := old.snat().Get(flowKey(6000))
	check(t, err)
	if v.LastSeen != 2500*second || v.ToPort != wire.PortFrom(6000) {
		t.Errorf("flow 6000 came back as %+v", v)
	}
	n.verifyDrops(t, old.Drops.Map, 5+4)
}

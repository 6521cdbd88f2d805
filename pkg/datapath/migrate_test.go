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
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

// grown is a later build in which every map's values are larger.
func grown(t testing.TB) *ebpf.CollectionSpec {
	t.Helper()
	spec := stubs(t)
	for _, name := range mapNames() {
		grow(spec, name, 16)
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
	check(t, each(m, func(key []byte, v value) error {
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
			for _, name := range mapNames() {
				before[name] = snapshot(t, n.opts, name)
			}
			n.opts.Spec = grown(t)
			mustLoad(t, n.opts)
			n.verify(t)
			for _, name := range mapNames() {
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
	for _, name := range mapNames() {
		m, err := ebpf.LoadPinnedMap(n.opts.Dir.Map(name), nil)
		check(t, err)
		t.Cleanup(func() { _ = m.Close() })
		all[name] = m
	}
	m, err := wrapMaps(all)
	check(t, err)
	return m
}

// newMap opens a map that the new programs have, before it is published.
func (n node) newMap(t *testing.T, name string) *ebpf.Map {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(nextPath(n.opts.Dir, name), nil)
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
			check(t, old.Snat.Delete(flowKey(1)))
			n.addFlow(t, old, 1, 1500*ms)
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
		1: {LastSeen: 1500 * ms, State: snat.SYN}, 2: {LastSeen: 3000 * ms, State: snat.SYN | snat.ACK}, 3: {LastSeen: 1000 * ms, State: snat.SYN | snat.FIN},
		4: {LastSeen: 4000 * ms, State: snat.FIN}, 5000: {LastSeen: 2000 * ms, State: snat.SYN}, 6000: {LastSeen: 2500 * ms, State: snat.SYN},
	}
	for port, w := range want {
		raw, err := lookup(dp.Maps.Snat.Map, encode(make([]byte, 40), flowKey(port)))
		check(t, err)
		if raw == nil {
			t.Errorf("flow %d is lost", port)
			continue
		}
		if got := decode[snat.Value](raw[0]); got.LastSeen != w.LastSeen || got.State != w.State {
			t.Errorf("flow %d: seen %d state %s, want %d %s", port, got.LastSeen, got.State, w.LastSeen, w.State)
		}
	}
	n.verifyDrops(t, dp.Maps.Drops.Map.Map, 5+3+4)
	use, err := lookup(dp.Maps.Usage.Map, make([]byte, 4))
	check(t, err)
	if got := decode[usage.Value](use[0]).Entries; got != nodeFlows+2 {
		t.Errorf("usage %d, want %d", got, nodeFlows+2)
	}
}

// oldProgramsWrite renews flow 2, sees a FIN of flow 3 in the same second, opens
// flow 5000 and drops three packets on each CPU.
func (n node) oldProgramsWrite(t *testing.T, old *Maps) {
	t.Helper()
	v, err := old.Snat.Get(flowKey(2))
	check(t, err)
	v.LastSeen, v.State = 3000*ms, snat.ACK
	check(t, old.Snat.Put(flowKey(2), v))
	v, err = old.Snat.Get(flowKey(3))
	check(t, err)
	v.State = snat.FIN
	check(t, old.Snat.Put(flowKey(3), v))
	n.addFlow(t, old, 5000, 2000*ms)
	check(t, old.Usage.Put(usage.Key{Table: usage.Snat}, usage.Value{Entries: nodeFlows + 1}))
	n.setDrops(t, old.Drops.Map.Map, 5+3)
}

// newProgramsWrite renews flow 4, opens flow 6000 and drops four packets on each CPU.
func (n node) newProgramsWrite(t *testing.T) {
	t.Helper()
	m := n.newMap(t, snat.Name)
	for port, v := range map[uint16]snat.Value{
		4:    {ToAddress: addr("192.0.2.9"), ToPort: wire.PortFrom(4), Ifindex: uint32(n.pods[0]), LastSeen: 4000 * ms, State: snat.FIN},
		6000: {ToAddress: addr("192.0.2.9"), ToPort: wire.PortFrom(6000), Ifindex: uint32(n.pods[0]), LastSeen: 2500 * ms, State: snat.SYN},
	} {
		check(t, put(m, encode(make([]byte, 40), flowKey(port)), value{encode(make([]byte, 56), v)}, ebpf.UpdateAny))
	}
	use := value{encode(make([]byte, 48), usage.Value{Entries: nodeFlows + 1})}
	check(t, put(n.newMap(t, usage.Name), make([]byte, 4), use, ebpf.UpdateAny))
	each := make(value, ebpf.MustPossibleCPU())
	for cpu := range each {
		each[cpu] = encode(make([]byte, 32), drops.Value{Packets: 5 + 4})
	}
	key := encode(make([]byte, 4), drops.Index(wire.FromPod, drops.SpoofedSource))
	check(t, put(n.newMap(t, drops.Name), key, each, ebpf.UpdateAny))
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
				if diff := cmp.Diff(old, n.attached(t), cmp.AllowUnexported(place{})); diff != "" {
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
	v, err := old.Snat.Get(flowKey(6000))
	check(t, err)
	if v.LastSeen != 2500*ms || v.ToPort != wire.PortFrom(6000) {
		t.Errorf("flow 6000 came back as %+v", v)
	}
	n.verifyDrops(t, old.Drops.Map.Map, 5+4)
}

func TestBatchesAreLargeEnoughForAnyBucket(t *testing.T) {
	isolated(t, attach.Auto)
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: 50000})
	check(t, err)
	defer m.Close()
	for i := range uint32(50000) {
		check(t, m.Put(i, ^i))
	}
	seen := make(map[uint32]bool)
	check(t, each(m, func(key []byte, v value) error {
		k := decode[uint32](key)
		if decode[uint32](v[0]) != ^k {
			return fmt.Errorf("value of %d is %x", k, v[0])
		}
		seen[k] = true
		return nil
	}))
	if len(seen) != 50000 {
		t.Errorf("%d of 50000 entries", len(seen))
	}
}

func TestEveryMapHasAKnownContent(t *testing.T) {
	want := map[string]content{
		config.Name: mirrored, destinations.Name: mirrored, endpoints.Name: mirrored, "uplinks": mirrored,
		devices.Name: owned, fragments.Name: hints, snat.Name: flows, snat.ReverseName: flows,
		conntrack.Name: flows, drops.Name: counters, "traffic": counters, usage.Name: counters,
		ports.Name: hints, journal.SnatName: hints, journal.ConntrackName: hints, journal.CandidatesName: hints,
	}
	got := make(map[string]content)
	for name := range embedded(t).Maps {
		if !isPrivate(name) {
			got[name] = contentOf(name)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("a map is new: say in merge.go who writes it (-want +got):\n%s", diff)
	}
}

func TestCombine(t *testing.T) {
	same := snat.Value{ToPort: wire.PortFrom(7), Ifindex: 3}
	flow := func(change func(*snat.Value)) []byte {
		v := same
		v.LastSeen = 1000 * ms
		change(&v)
		return encode(make([]byte, 48), v)
	}
	for _, c := range []struct {
		name               string
		have, theirs, want []byte
	}{
		{"the later one counts", flow(func(v *snat.Value) {}), flow(func(v *snat.Value) { v.LastSeen = 2000 * ms }), flow(func(v *snat.Value) { v.LastSeen = 2000 * ms })},
		{"the earlier one adds its bits", flow(func(v *snat.Value) { v.State = 1 }), flow(func(v *snat.Value) { v.LastSeen, v.State = 900*ms, 4 }), flow(func(v *snat.Value) { v.State = 5 })},
		{"sequence numbers wrap", flow(func(v *snat.Value) { v.SeqEnd = 0xfffffff0 }), flow(func(v *snat.Value) { v.SeqEnd = 5 }), flow(func(v *snat.Value) { v.SeqEnd = 5 })},
		{"no number yet", flow(func(v *snat.Value) { v.Ack = 0xfffffff0 }), flow(func(v *snat.Value) {}), flow(func(v *snat.Value) { v.Ack = 0xfffffff0 })},
		{"an entry being removed is nothing", flow(func(v *snat.Value) {}), flow(func(v *snat.Value) { v.LastSeen, v.State = 0, 8 }), flow(func(v *snat.Value) {})},
		{"nor is one whose removal somebody has met", flow(func(v *snat.Value) {}), flow(func(v *snat.Value) { v.LastSeen, v.State = snat.Marks-1, 8 }), flow(func(v *snat.Value) {})},
		{"another owner's bits don't mix", flow(func(v *snat.Value) { v.State = 1 }), flow(func(v *snat.Value) { v.Ifindex, v.State, v.LastSeen = 4, 8, 2000*ms }), flow(func(v *snat.Value) { v.Ifindex, v.State, v.LastSeen = 4, 8, 2000*ms })},
		{"another owner that is older is nothing", flow(func(v *snat.Value) {}), flow(func(v *snat.Value) { v.Ifindex, v.LastSeen = 4, 900*ms }), flow(func(v *snat.Value) {})},
	} {
		got := combine(snat.Name, flows, value{c.have}, value{c.theirs[:40]}, nil)
		if !bytes.Equal(got[0], c.want) {
			t.Errorf("%s:\n got %+v\nwant %+v", c.name, decode[snat.Value](got[0]), decode[snat.Value](c.want))
		}
	}
}

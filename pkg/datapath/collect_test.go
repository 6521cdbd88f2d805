package datapath

import (
	"maps"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf/btf"
	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

func TestCollectArgsAreThoseOfTheProgram(t *testing.T) {
	var c *btf.Struct
	if err := embedded(t).Types.TypeByName("collect_args", &c); err != nil {
		t.Fatal(err)
	}
	want := map[string]uint32{}
	for _, m := range c.Members {
		want[m.Name] = m.Offset.Bytes()
	}
	var a collectArgs
	got := map[string]uint32{
		"now": uint32(unsafe.Offsetof(a.Now)), "table": uint32(unsafe.Offsetof(a.Table)), "pressure": uint32(unsafe.Offsetof(a.Pressure)),
		"stage": uint32(unsafe.Offsetof(a.Stage)), "count": uint32(unsafe.Offsetof(a.Count)), "head": uint32(unsafe.Offsetof(a.Head)),
		"scanned": uint32(unsafe.Offsetof(a.Scanned)), "deleted": uint32(unsafe.Offsetof(a.Deleted)),
		"left": uint32(unsafe.Offsetof(a.Left)),
	}
	if diff := cmp.Diff(want, got); diff != "" || c.Size != uint32(unsafe.Sizeof(a)) {
		t.Errorf("size %d, want %d; offsets (-C +Go):\n%s", unsafe.Sizeof(a), c.Size, diff)
	}
}

// sweepNode has a pod with one UDP flow of each age, in seconds.
func sweepNode(t *testing.T, ages ...uint16) *Datapath {
	t.Helper()
	opts := isolated(t, attach.Auto)
	opts.SnatEntries = 16
	dp := mustLoad(t, opts)
	check(t, dp.Maps.Devices.Put(devices.Key{Ifindex: 7}, devices.Value{SnatFlows: uint32(len(ages))}))
	for _, age := range ages {
		forward := flowKey(age)
		forward.Proto = wire.UDP
		reverse := forward
		reverse.Src = addr("192.0.2.9")
		v := snat.Value{ToAddress: addr("192.0.2.9"), ToPort: forward.Sport, Ifindex: 7, State: flow.Packet,
			LastSeen: uint64(sweepNow - time.Duration(age)*time.Second)}
		check(t, dp.Maps.snat().Put(forward, v))
		v.ToAddress, v.State = forward.Src, 0
		check(t, dp.Maps.snatReverse().Put(reverse, v))
	}
	check(t, dp.Maps.Usage.Put(usage.Key{Table: usage.Snat}, usage.Value{Entries: uint64(len(ages))}))
	return dp
}

const sweepNow = time.Hour

// left returns the ages of the flows that are left, by either half.
func left(t *testing.T, dp *Datapath) (forward, reverse map[uint16]bool) {
	t.Helper()
	forward, reverse = map[uint16]bool{}, map[uint16]bool{}
	for e, err := range dp.Maps.snat().All() {
		check(t, err)
		forward[e.Key.Sport.Host()] = true
	}
	for e, err := range dp.Maps.snatReverse().All() {
		check(t, err)
		reverse[e.Key.Sport.Host()] = true
	}
	return forward, reverse
}

func TestSweepEndsWhatIsIdle(t *testing.T) {
	// An unanswered UDP flow lives 30 seconds, a quarter of it under pressure, which there is above seven tenths of 16.
	for _, c := range []struct {
		name  string
		ages  []uint16
		want  map[uint16]bool
		again time.Duration
	}{
		{"no pressure", []uint16{1, 2, 3, 4, 5, 6, 7, 20, 29, 31, 300}, map[uint16]bool{1: true, 2: true, 3: true, 4: true, 5: true, 6: true, 7: true, 20: true, 29: true}, sweepInterval},
		{"pressure", []uint16{1, 2, 3, 4, 5, 6, 7, 16, 20, 59, 61, 300}, map[uint16]bool{1: true, 2: true, 3: true, 4: true, 5: true, 6: true, 7: true}, pressureInterval},
	} {
		t.Run(c.name, func(t *testing.T) {
			dp := sweepNode(t, c.ages...)
			result, again, err := dp.SweepAt(sweepNow)
			check(t, err)
			deleted := len(c.ages) - len(c.want)
			if result.Snat.Scanned != uint64(len(c.ages)) || result.Snat.Deleted != uint64(deleted) || again != c.again {
				t.Errorf("%+v, again after %s", result, again)
			}
			forward, reverse := left(t, dp)
			if diff := cmp.Diff(c.want, forward); diff != "" {
				t.Errorf("forward halves (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.want, reverse); diff != "" {
				t.Errorf("reverse halves (-want +got):\n%s", diff)
			}
			used, err := dp.Maps.Usage.Get(usage.Key{Table: usage.Snat})
			check(t, err)
			if used.Entries != uint64(len(c.want)) {
				t.Errorf("%d flows are counted, want %d", used.Entries, len(c.want))
			}
			dev, err := dp.Maps.Devices.Get(devices.Key{Ifindex: 7})
			check(t, err)
			if dev.SnatFlows != uint32(len(c.want)) {
				t.Errorf("the pod holds %d flows, want %d", dev.SnatFlows, len(c.want))
			}
		})
	}
}

func TestSweepReadsTheClockOfThePrograms(t *testing.T) {
	dp := sweepNode(t)
	now, err := monotonic()
	check(t, err)
	v := snat.Value{Ifindex: 7, LastSeen: uint64(now)}
	check(t, dp.Maps.snat().Put(flowKey(1), v))
	result, _, err := dp.Sweep()
	check(t, err)
	if result.Snat.Scanned != 1 || result.Snat.Deleted != 0 {
		t.Errorf("a flow that was seen just now: %+v", result.Snat)
	}
}

// The flows of a container that has left all end, also while a sweep is under way: both use one map of candidates.
func TestFlowsEndBesideASweep(t *testing.T) {
	const flows, bridge = 1 << 14, 7
	opts := isolated(t, attach.Auto)
	opts.ConntrackEntries, opts.NodeConfig.Bridges = 2*flows, 1
	dp := mustLoad(t, opts)
	check(t, dp.Maps.Devices.Put(devices.Key{Ifindex: bridge}, devices.Value{}))
	now, err := monotonic()
	check(t, err)
	left, stays := addr("10.244.1.2"), addr("10.244.1.3")
	keys, values := make([]conntrack.Key, flows), make([]conntrack.Value, flows)
	for i := range keys {
		keys[i] = flowKey(uint16(i))
		if i%2 == 0 {
			keys[i].Src = stays
		}
		values[i] = conntrack.Value{Ifindex: bridge, LastSeen: uint64(now)}
	}
	check(t, dp.Maps.conntrack().PutAll(keys, values))
	ended, swept := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-ended:
				swept <- nil
				return
			default:
			}
			if _, err := dp.SweepTable(now, usage.Conntrack); err != nil {
				swept <- err
				return
			}
		}
	}()
	check(t, dp.EndFlows(func(on uint32, address wire.Addr) bool { return on == bridge && address == left }))
	close(ended)
	check(t, <-swept)
	of := map[wire.Addr]int{}
	for e, err := range dp.Maps.conntrack().All() {
		check(t, err)
		of[e.Key.Src]++
	}
	if want := map[wire.Addr]int{stays: flows / 2}; !maps.Equal(of, want) {
		t.Errorf("flows by container: %v, want %v", of, want)
	}
}

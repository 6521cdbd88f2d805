// The migration as a whole is tested where programs run, in pkg/datapath.
package migrate

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/counters"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/raw"
	"github.com/ebpf-cni/ebpf-cni/maps/registry"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// marks is what no time is below.
const marks = flow.Marks

func tableOf(d typed.Definition) *table { return &table{Definition: d, counters: d.Counters()} }

// TestWhatMoves names what a map made anew begins with.
func TestWhatMoves(t *testing.T) {
	got := make(map[string]string)
	for _, d := range registry.Pinned() {
		switch m := tableOf(d); {
		case m.empty():
			got[d.Name] = "nothing"
		case m.Flows != nil:
			got[d.Name] = "flows"
		case m.configured() && len(m.counters) > 0:
			got[d.Name] = "entries and counters"
		case m.configured():
			got[d.Name] = "entries"
		default:
			got[d.Name] = "counters"
		}
	}
	all := map[string]string{
		"config": "entries", "bridges": "entries", "destinations": "entries", "endpoints": "entries", "uplinks": "entries", "sources": "entries",
		"devices": "entries and counters", "drops": "counters", "traffic": "counters", "usage": "counters",
		"given_ports": "entries", "services": "entries", "sets": "entries", "set_names": "entries", "source_range": "entries", "backends": "entries", "slots": "entries", "hostports": "entries", "affinity": "nothing", "clients": "nothing", "sockets": "nothing",
		"snat": "flows", "snat_reverse": "flows", "conntrack": "flows",
		"fragments": "nothing", "ports": "nothing", "snat_journal": "nothing", "ct_journal": "nothing", "candidates": "nothing",
	}
	if len(got) != len(all) {
		t.Errorf("%d maps are expected, %d are known: %v", len(all), len(got), got)
	}
	for name, want := range all {
		if got[name] != want {
			t.Errorf("map %s begins with %s, want %s", name, got[name], want)
		}
	}
}

func TestCombineFlows(t *testing.T) {
	same := snat.Value{ToPort: wire.PortFrom(7), Ifindex: 3}
	flow := func(change func(*snat.Value)) []byte {
		v := same
		v.LastSeen = marks + 10
		change(&v)
		return raw.Encode(make([]byte, 48), v)
	}
	for _, c := range []struct {
		name               string
		have, theirs, want []byte
	}{
		{"the later one counts", flow(func(v *snat.Value) {}), flow(func(v *snat.Value) { v.LastSeen = marks + 20 }), flow(func(v *snat.Value) { v.LastSeen = marks + 20 })},
		{"the earlier one adds its bits", flow(func(v *snat.Value) { v.State = 1 }), flow(func(v *snat.Value) { v.LastSeen, v.State = marks+5, 4 }), flow(func(v *snat.Value) { v.State = 5 })},
		{"sequence numbers wrap", flow(func(v *snat.Value) { v.SeqEnd = 0xfffffff0 }), flow(func(v *snat.Value) { v.SeqEnd = 5 }), flow(func(v *snat.Value) { v.SeqEnd = 5 })},
		{"no number yet", flow(func(v *snat.Value) { v.Ack = 0xfffffff0 }), flow(func(v *snat.Value) {}), flow(func(v *snat.Value) { v.Ack = 0xfffffff0 })},
		{"an entry being removed is nothing", flow(func(v *snat.Value) {}), flow(func(v *snat.Value) { v.LastSeen, v.State = 0, 8 }), flow(func(v *snat.Value) {})},
		{"a marked entry is nothing", flow(func(v *snat.Value) {}), flow(func(v *snat.Value) { v.LastSeen, v.State = marks-1, 8 }), flow(func(v *snat.Value) {})},
		{"another owner's bits don't mix", flow(func(v *snat.Value) { v.State = 1 }), flow(func(v *snat.Value) { v.Ifindex, v.State, v.LastSeen = 4, 8, marks+20 }), flow(func(v *snat.Value) { v.Ifindex, v.State, v.LastSeen = 4, 8, marks+20 })},
		{"another owner that is older is nothing", flow(func(v *snat.Value) {}), flow(func(v *snat.Value) { v.Ifindex, v.LastSeen = 4, marks+9 }), flow(func(v *snat.Value) {})},
	} {
		got := tableOf(snat.Definition).combine(raw.Value{c.have}, raw.Value{c.theirs[:40]}, nil)
		if !bytes.Equal(got[0], c.want) {
			t.Errorf("%s:\n got %+v\nwant %+v", c.name, raw.Decode[snat.Value](got[0]), raw.Decode[snat.Value](c.want))
		}
	}
	ours := conntrack.Value{Ifindex: 3, FromPod: 1, PodAck: 5, WorldAck: 9, LastSeen: marks + 10}
	theirs := conntrack.Value{Ifindex: 3, FromPod: 2, FromWorld: 4, PodAck: 6, WorldAck: 8, LastSeen: marks + 20}
	got := tableOf(conntrack.Definition).combine(raw.Value{raw.Encode(make([]byte, 32), ours)}, raw.Value{raw.Encode(make([]byte, 48), theirs)}, nil)
	want := conntrack.Value{Ifindex: 3, FromPod: 3, FromWorld: 4, PodAck: 6, WorldAck: 9, LastSeen: marks + 20}
	if diff := cmp.Diff(want, raw.Decode[conntrack.Value](got[0]), cmp.AllowUnexported(conntrack.Value{})); diff != "" || len(got[0]) != 32 {
		t.Errorf("conntrack (-want +got):\n%s", diff)
	}
}

func TestCombineCounters(t *testing.T) {
	value := func(packets, bytes uint64) []byte {
		return raw.Encode(make([]byte, 16), counters.Value{Packets: packets, Bytes: bytes})
	}
	m := tableOf(drops.Definition)
	for _, c := range []struct {
		name               string
		have, theirs, base raw.Value
		want               raw.Value
	}{
		{"both have counted", raw.Value{value(5, 50), value(1, 1)}, raw.Value{value(7, 40), value(1, 2)}, raw.Value{value(4, 40), value(1, 1)}, raw.Value{value(8, 50), value(1, 2)}},
		{"since nobody knows when", raw.Value{value(5, 50)}, raw.Value{value(7, 40)}, nil, raw.Value{value(7, 50)}},
		{"from a smaller value", raw.Value{value(5, 50)}, raw.Value{value(7, 0)[:8]}, raw.Value{value(4, 0)[:8]}, raw.Value{value(8, 50)}},
		{"into a smaller value", raw.Value{value(5, 0)[:8]}, raw.Value{value(7, 9)}, raw.Value{value(5, 0)}, raw.Value{value(7, 0)[:8]}},
	} {
		if got := m.combine(c.have, c.theirs, c.base); !got.Equal(c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
	// What the agent wrote is the other's, what the programs counted is both's.
	dev := func(v devices.Value) raw.Value { return raw.Value{raw.Encode(make([]byte, 96), v)} }
	got := tableOf(devices.Definition).combine(
		dev(devices.Value{Addresses: wire.Addresses{wire.Addr{1}}, SnatFlows: 2, Packets: 9, ConntrackFlows: 3, AllowanceUntil: 1}),
		dev(devices.Value{Addresses: wire.Addresses{wire.Addr{2}}, SnatFlows: 4, Packets: 5, ConntrackFlows: 3, AllowanceUntil: 2}),
		dev(devices.Value{SnatFlows: 3, Packets: 4, ConntrackFlows: 5}),
	)
	want := devices.Value{Addresses: wire.Addresses{wire.Addr{2}}, SnatFlows: 3, Packets: 10, ConntrackFlows: 1, AllowanceUntil: 2}
	if diff := cmp.Diff(want, raw.Decode[devices.Value](got[0]), cmp.AllowUnexported(devices.Value{})); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

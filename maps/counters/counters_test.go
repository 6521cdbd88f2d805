package counters

import (
	"errors"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

func TestCountersAreSumsOverAllCPUs(t *testing.T) {
	priv.Require(t)
	const slots = 3
	raw, err := ebpf.NewMap(&ebpf.MapSpec{
		Name: "test", Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 16, MaxEntries: wire.DirectionSlots * slots,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	m := Of[letter](raw, "test")
	each := make([]Value, ebpf.MustPossibleCPU())
	var want Value
	for i := range each {
		each[i] = Value{Packets: uint64(i + 1), Bytes: 1 << 40}
		want.Packets += uint64(i + 1)
		want.Bytes += 1 << 40
	}
	for _, index := range []uint32{m.Index(wire.FromPod, 2), m.Index(wire.ToUplink, 0)} {
		if err := raw.Put(index, each); err != nil {
			t.Fatal(err)
		}
	}
	got, err := m.All()
	if all := []Counter[letter]{{wire.FromPod, 2, want}, {wire.ToUplink, 0, want}}; err != nil || !slices.Equal(got, all) {
		t.Errorf("%v, %v; want %v", got, err, all)
	}
	if got, err := m.Sum(wire.FromPod, 0); err != nil || got != (Value{}) {
		t.Errorf("the sum of nothing is %v, %v", got, err)
	}
	if _, err := m.Sum(wire.DirectionSlots, 0); !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Errorf("beyond the end: %v", err)
	}
	if i := m.Index(wire.ToUplink, 1); i != 2*slots+1 {
		t.Errorf("the second slot of the third direction has the index %d", i)
	}
	table, err := view[letter]{"letter"}.Show(raw, "test", 0)
	if err != nil || table.Len != 2 || table.Cells(0)[1] != "c" || table.Cells(0)[4] != "the letter c" || table.Columns[1].Name != "LETTER" {
		t.Errorf("%+v, %v", table, err)
	}
}

// letter is a slot.
type letter uint32

func (l letter) String() string  { return string(rune('a' + l)) }
func (l letter) Explain() string { return "the letter " + l.String() }

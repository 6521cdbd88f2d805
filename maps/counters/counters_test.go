package counters

import (
	"errors"
	"fmt"
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
		Name: "test", Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 16, MaxEntries: uint32(wire.Directions) * slots,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	m := Of(raw, "test", slots)
	each := make([]Value, ebpf.MustPossibleCPU())
	var want Value
	for i := range each {
		each[i] = Value{Packets: uint64(i + 1), Bytes: 1 << 40}
		want.Packets += uint64(i + 1)
		want.Bytes += 1 << 40
	}
	for _, index := range []uint32{2, uint32(wire.ToUplink) * slots} {
		if err := raw.Put(index, each); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	err = m.Each(func(d wire.Direction, slot uint32, v Value) { got = append(got, fmt.Sprint(d, slot, v)) })
	if all := []string{fmt.Sprint(wire.FromPod, 2, want), fmt.Sprint(wire.ToUplink, 0, want)}; err != nil || !slices.Equal(got, all) {
		t.Errorf("%v, %v; want %v", got, err, all)
	}
	if got, err := m.Sum(0); err != nil || got != (Value{}) {
		t.Errorf("the sum of nothing is %v, %v", got, err)
	}
	if _, err := m.Sum(raw.MaxEntries()); !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Errorf("beyond the end: %v", err)
	}
}

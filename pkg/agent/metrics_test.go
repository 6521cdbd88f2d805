package agent

import (
	"net/netip"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/counters"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

func TestCountPods(t *testing.T) {
	l := testLoop(t)
	for address, ifindex := range map[string]uint32{"10.244.1.2": 7, "fd00::2": 7, "10.244.1.3": 9} {
		key := endpoints.Key{Address: wire.AddrFrom(netip.MustParseAddr(address))}
		if err := l.dp.Maps.Endpoints.Put(key, endpoints.Value{Ifindex: ifindex}); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := countPods(l.dp.Maps.Endpoints); n != 2 || err != nil {
		t.Errorf("%d pods, error %v; want 2: one has two addresses", n, err)
	}
}

func TestAddUp(t *testing.T) {
	total := addUp([]drops.Counter{
		{Direction: wire.FromPod, Slot: drops.SnatExhausted, Value: counters.Value{Packets: 2, Bytes: 20}},
		{Direction: wire.ToUplink, Slot: drops.SnatExhausted, Value: counters.Value{Packets: 1, Bytes: 10}},
		{Direction: wire.FromPod, Slot: drops.PortLimit, Value: counters.Value{Packets: 6, Bytes: 60}},
		{Direction: wire.FromPod, Slot: drops.NotIP, Value: counters.Value{Packets: 4, Bytes: 40}},
		{Direction: wire.FromPod, Slot: drops.Slots - 1, Value: counters.Value{Packets: 8, Bytes: 80}},
	}, []traffic.Counter{
		{Direction: wire.FromPod, Slot: traffic.Forwarded, Value: counters.Value{Packets: 100, Bytes: 1000}},
		{Direction: wire.FromPod, Slot: traffic.SnatAllocated, Value: counters.Value{Packets: 3, Bytes: 7}},
		{Direction: wire.ToUplink, Slot: traffic.SnatRetried, Value: counters.Value{Packets: 5, Bytes: 7}},
	})
	if total.drops[drops.SnatExhausted] != 3 || total.failures() != 9 || total.allocations != 3 || total.retries != 5 {
		t.Errorf("%+v", total)
	}
	// Each packet once: passed, and dropped for whatever reason.
	if got := total.packets[wire.FromPod]; got != 120 {
		t.Errorf("%d packets from pods, want 120", got)
	}
	if got := total.bytes[wire.FromPod]; got != 1200 {
		t.Errorf("%d bytes from pods, want 1200", got)
	}
}

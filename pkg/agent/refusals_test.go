package agent

import (
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/counters"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// A limit is a problem from the first flow that it refuses until it has refused none for minutes.
func TestRefusals(t *testing.T) {
	t.Parallel()
	c, now := &refusalController{}, time.Now()
	of := func(d wire.Direction, r drops.Reason, packets uint64) drops.Counter {
		return drops.Counter{Direction: d, Slot: r, Value: counters.Value{Packets: packets}}
	}
	for _, step := range []struct {
		after   time.Duration
		counted []drops.Counter
		want    string
	}{
		{0, []drops.Counter{of(wire.FromPod, drops.PortLimit, 7)}, ""}, // from before this agent
		{10 * time.Second, []drops.Counter{of(wire.FromPod, drops.PortLimit, 7), of(wire.FromPod, drops.TooBig, 9)}, ""},
		{10 * time.Second, []drops.Counter{of(wire.FromPod, drops.PortLimit, 8)}, "port_limit pods"},
		{2 * time.Minute, []drops.Counter{of(wire.FromPod, drops.PortLimit, 8), of(wire.FromTunnel, drops.SnatLimit, 1), of(wire.FromUplink, drops.SnatLimit, 1)}, "port_limit pods, snat_limit clients outside"},
		{time.Minute, []drops.Counter{of(wire.FromPod, drops.PortLimit, 8), of(wire.FromUplink, drops.SnatLimit, 2)}, "snat_limit clients outside"},
		{time.Minute, []drops.Counter{of(wire.FromPod, drops.PortLimit, 9), of(wire.ToUplink, drops.SnatExhausted, 1), of(wire.FromUplink, drops.SnatLimit, 2)}, "port_limit pods, snat_exhausted pods, snat_limit clients outside"},
		{10 * time.Minute, []drops.Counter{of(wire.FromPod, drops.PortLimit, 1)}, ""}, // other maps
		{time.Minute, []drops.Counter{of(wire.FromPod, drops.PortLimit, 2)}, "port_limit pods"},
	} {
		now = now.Add(step.after)
		var got []string
		for _, r := range c.note(now, step.counted) {
			p := r.problem()
			got = append(got, p.Subject())
			if p.Remedy == "" || strings.Contains(p.Text, "%!") {
				t.Errorf("%+v", p)
			}
		}
		if diff := cmp.Diff(step.want, strings.Join(got, ", ")); diff != "" {
			t.Errorf("after %v: -want +got:\n%s", step.after, diff)
		}
	}
}

// The counters are read of the map, and what has grown is told.
func TestRefusalsAreTold(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	now := time.Now()
	l.complaints.now = func() time.Time { return now }
	for _, step := range []struct {
		after   time.Duration
		counter uint64
		reason  string
	}{
		{0, 0, ""}, {refusalsInterval, 0, ""}, {refusalsInterval, 1, portLimit}, {refusalsLast - time.Second, 1, portLimit}, {refusalsInterval, 1, ""},
	} {
		now = now.Add(step.after)
		each := make([]counters.Value, ebpf.MustPossibleCPU())
		each[0].Packets = step.counter
		if err := l.dp.Maps.Drops.Put(l.dp.Maps.Drops.Index(wire.FromPod, drops.PortLimit), each); err != nil {
			t.Fatal(err)
		}
		l.inspect(t.Context())
		l.judge()
		l.expectNetworkProblems(t, "after "+step.after.String(), strings.Fields(step.reason)...)
	}
}

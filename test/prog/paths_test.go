package prog

import (
	"fmt"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// For a moment a program goes by what it found out about an address; then it sees every change.
func TestPathsAreKeptForAMoment(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		const life = 50 * time.Millisecond
		b := newBed(t, f, withPaths(life))
		b.stayOnCPU()
		l := b.pods[podA]
		turnInto := func(what string, v destinations.Value) {
			must(t, b.destinations.Put(b.key(what), v))
		}
		behind := func(node string) destinations.Value { return b.behind(node, b.uplink.index) }
		for _, c := range []struct {
			to          string
			mend, spoil func()
		}{
			{
				remote,
				func() { turnInto("10.244.2.0/24", behind(node2IP)) },
				func() { turnInto("10.244.2.0/24", destinations.Value{Kind: destinations.Host}) },
			},
			{
				node2IP,
				func() { turnInto(node2IP+"/32", destinations.Value{Kind: destinations.Node}) },
				func() { turnInto(node2IP+"/32", destinations.Value{Kind: destinations.Host}) },
			},
			{
				beyond,
				func() { turnInto("10.244.5.0/24", b.byTunnel(destinations.PodCIDR)) },
				func() { turnInto("10.244.5.0/24", destinations.Value{Kind: destinations.Host}) },
			},
			{
				world,
				func() { b.uplink1(nodeIP) },
				func() { must(t, b.uplinks.Delete(uplinks.Key{Ifindex: uint32(b.uplink.index)})) },
			},
		} {
			p := udp(podA, 50000, c.to, 80)
			p.macTo, p.macFrom = l.mac, l.peer
			frame := p.bytes(b.family)
			b.fromPod(udp(podB, 50000, c.to, 80)).is("forwarded") // another pod's path is another
			var found, kept uint32
			b.within(life, func() {
				c.mend()
				b.outlast(life)
			}, func() {
				found = b.act(wire.FromPod, l.index, frame)
				c.spoil()
				kept = b.act(wire.FromPod, l.index, frame)
			})
			if found != actRedirect || kept != actRedirect {
				t.Errorf("to %s: action %d, then %d, though the path was found just now", c.to, int32(found), int32(kept))
			}
			b.outlast(life)
			b.fromPod(p).is("stack")
		}
	})
}

// What the source of a packet is, and whether one leaves for the world, is asked for each time.
func TestKindsAreNotKept(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPaths(time.Second))
		b.stayOnCPU()
		b.fromUplink(udp(remote, 5000, podA, 53)).is("delivered")
		b.toUplink(udp(podA, 50000, world2, 53)).is("stack").flow("udp " + nodeIP + ":50000 > " + world2 + ":53")
		must(t, b.destinations.Put(b.key(remote+"/32"), destinations.Value{Kind: destinations.Host}))
		must(t, b.destinations.Put(b.key(world2+"/32"), destinations.Value{Kind: destinations.Native}))
		b.fromUplink(udp(remote, 5000, podA, 53)).is("drop SPOOFED_SOURCE")
		b.toUplink(udp(podA, 50000, world2, 53)).is("stack").flow("udp " + podA + ":50000 > " + world2 + ":53")
	})
}

// stayOnCPU has the rest of the test run on one processor, since each has paths of its own.
func (b *bed) stayOnCPU() {
	b.Helper()
	var before, one unix.CPUSet
	must(b, unix.SchedGetaffinity(0, &before))
	for cpu := 0; one.Count() == 0; cpu++ {
		if before.IsSet(cpu) {
			one.Set(cpu)
		}
	}
	must(b, unix.SchedSetaffinity(0, &one))
	b.Cleanup(func() { must(b, unix.SchedSetaffinity(0, &before)) })
}

// Two addresses that share a slot, and one address asked for by two pods and two protocols, are never taken for each other.
func TestPathsAreNotConfused(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPaths(time.Second))
		b.stayOnCPU()
		rule := netlink.NewRule()
		rule.Src, rule.Table, rule.Family, rule.IPProto = f.ipNet(podA+"/32"), 77, f.netlink(), unix.IPPROTO_UDP
		must(t, netlink.RuleAdd(rule))
		must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: b.other.index, Dst: f.ipNet("0.0.0.0/0"), Gw: f.netIP(otherGateIP), Table: 77}))
		for range 2 {
			b.fromPod(udp(podA, 50000, world, 53)).is("forwarded").flow("udp " + nodeOtherIP + ":50000 > " + world + ":53")
			b.fromPod(tcp(podA, 50000, world, 53, syn)).is("forwarded").flow("tcp " + nodeIP + ":50000 > " + world + ":53")
			b.fromPod(udp(podB, 50000, world, 53)).is("forwarded").flow("udp " + nodeIP + ":50000 > " + world + ":53")
		}
		// More addresses than slots, the world's and this node's own in turn, so that they push each other out.
		for i := range 2048 {
			if i%2 == 0 {
				must(t, b.destinations.Put(b.hostKey(fmt.Sprintf("100.64.%d.%d", i>>8, i&0xff)), destinations.Value{Kind: destinations.Host}))
			}
		}
		l := b.pods[podB]
		for i := range 2 * 2048 {
			i %= 2048
			// What cannot be masqueraded is dropped on its way to the world, and left to the stack on its way to the node.
			p := packet{proto: 47, src: podB, dst: fmt.Sprintf("100.64.%d.%d", i>>8, i&0xff), payload: make([]byte, 28)}
			p.macTo, p.macFrom = l.mac, l.peer
			if got := b.act(wire.FromPod, l.index, p.bytes(b.family)); (got == actUnspec) != (i%2 == 0) {
				t.Fatalf("to %s: action %d", p.dst, int32(got))
			}
		}
	})
}

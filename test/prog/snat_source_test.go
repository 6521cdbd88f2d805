package prog

import (
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/sources"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
)

// from has an uplink masquerade packets to a prefix to another address than its own.
func (b *bed) from(l veth, prefix, address string) {
	b.Helper()
	must(b, b.sources.Put(sources.KeyFrom(uint32(l.index), b.prefix(prefix)), sources.Value{Address: b.addr(address)}))
}

// held has the node have an address, on an uplink or, with 0, on none.
func (b *bed) held(address string, index int) {
	b.Helper()
	must(b, b.destinations.Put(b.hostKey(address), destinations.Value{Kind: destinations.Host, Ifindex: uint32(index)}))
}

// The source depends on the destination, by the longest prefix, on the uplink that the packet leaves by alone.
func TestMasqueradeAddressByDestination(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.held(vip, 0)
		b.from(b.uplink, stated+"/32", nodeOtherIP)
		b.from(b.uplink, world+"/32", vip)
		b.from(b.other, world2+"/32", nodeIP)
		for to, want := range map[string]string{world: vip, stated: nodeOtherIP, world2: nodeIP} {
			b.fromPod(udp(podA, 50000, to, 53)).is("forwarded").flow("udp " + want + ":50000 > " + to + ":53").valid()
		}
		b.toUplink(udp(podB, 50001, world, 53)).is("stack").flow("udp " + vip + ":50001 > " + world + ":53").valid()
	})
}

// A flow keeps an address that its uplink has, or none, and ends when its route leads over another uplink.
func TestFlowWhoseRouteMoves(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, c := range map[string]struct {
			index func(*bed) int
			ends  bool
		}{
			"same uplink":    {func(b *bed) int { return b.uplink.index }, false},
			"no uplink":      {func(*bed) int { return 0 }, false},
			"another uplink": {func(b *bed) int { return b.other.index }, true},
		} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f)
				openers[0].established(b)
				b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
				b.held(nodeIP, c.index(b))
				b.uplink1(nodeOtherIP)
				b.age(2 * time.Second)
				want := map[bool]string{false: nodeIP, true: nodeOtherIP}[c.ends]
				b.fromPod(udp(podA, 50000, world, 53)).is("forwarded").flow("udp " + want + ":50000 > " + world + ":53").valid()
				segment := b.fromPod(tcp(podA, 50000, world, 80, ack))
				if !c.ends {
					segment.is("forwarded").flow("tcp " + nodeIP + ":50000 > " + world + ":80")
					return
				}
				segment.is("drop NO_MAPPING").refuses(2000, 0, rst)
				b.count(1, 0)
			})
		}
	})
}

// A route that moves to an uplink without an address ends no flow.
func TestFlowWhoseRouteMovesToNoAddress(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromPod(udp(podA, 50000, world, 53)).is("forwarded")
		b.held(nodeIP, b.other.index)
		must(t, b.uplinks.Put(uplinks.Key{Ifindex: uint32(b.uplink.index)}, uplinks.Value{}))
		b.age(2 * time.Second)
		b.fromPod(udp(podA, 50000, world, 53)).is("forwarded").flow("udp " + nodeIP + ":50000 > " + world + ":53")
	})
}

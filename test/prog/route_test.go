package prog

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// What the kernel's routes say of the world is done, or left to the kernel.
func TestWorldByRoute(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		to := func(dst string) string { b.Helper(); return b.fromPod(udp(podA, 50000, dst, 53)).what }
		for kind, dst := range map[int]string{unix.RTN_BLACKHOLE: "203.0.113.65", unix.RTN_UNREACHABLE: "203.0.113.66",
			unix.RTN_PROHIBIT: "203.0.113.67"} {
			must(t, netlink.RouteAdd(&netlink.Route{Dst: f.ipNet(dst + "/32"), Type: kind}))
			if got := to(dst); got != "stack" {
				t.Errorf("route of type %d: outcome %q", kind, got)
			}
			// What would be dropped on its way out of an uplink is the stack's where no uplink is in question.
			gre := packet{proto: 47, src: podA, dst: dst, payload: make([]byte, 64)}
			b.fromPod(gre).is("stack")
			b.fromPod(gre.with(func(p *packet) { p.proto, p.fragment = 17, 8 })).is("stack")
		}
		if got := to(each(f, "172.16.0.255", "172.16.0.0")); got != "stack" {
			t.Errorf("broadcast, or any router, of the uplink: outcome %q", got)
		}
	})
}

// A policy rule by source, as multi-homed nodes have, decides for pods too.
func TestWorldByRule(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		rule := netlink.NewRule()
		rule.Src, rule.Table, rule.Family = f.ipNet(podA+"/32"), 77, f.netlink()
		must(t, netlink.RuleAdd(rule))
		must(t, netlink.RouteAdd(&netlink.Route{
			LinkIndex: b.other.index, Dst: f.ipNet("0.0.0.0/0"), Gw: f.netIP(otherGateIP), Table: 77,
		}))
		b.fromPod(udp(podA, 50000, world, 53)).is("forwarded").flow("udp " + nodeOtherIP + ":50000 > " + world + ":53")
		b.fromPod(udp(podB, 50000, world, 53)).is("forwarded").flow("udp " + nodeIP + ":50000 > " + world + ":53")
	})
}

// A rule by mark is about packets with mark 0, as pods' are: it matches them never, or always.
func TestWorldByRuleByMark(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: b.other.index, Dst: f.ipNet("0.0.0.0/0"), Gw: f.netIP(otherGateIP), Table: 77}))
		bits := uint32(0xff0000)
		for i, c := range []struct {
			mark uint32
			mask *uint32
			not  bool
			want string
		}{
			{0xca6c, nil, false, nodeIP},
			{0x80000, &bits, false, nodeIP},
			{0xca6c, nil, true, nodeOtherIP},
			{0x80000, &bits, true, nodeOtherIP},
			{0, &bits, false, nodeOtherIP},
		} {
			rule := netlink.NewRule()
			rule.Mark, rule.Mask, rule.Invert, rule.Table, rule.Family = c.mark, c.mask, c.not, 77, f.netlink()
			must(t, netlink.RuleAdd(rule))
			flow := fmt.Sprintf("udp %s:%d > %s:53", c.want, 50000+i, world)
			b.fromPod(udp(podA, uint16(50000+i), world, 53)).is("forwarded").flow(flow)
			must(t, netlink.RuleDel(rule))
		}
	})
}

// A packet that stands for many is judged by the segments that it will become, not by its own length.
func TestSegmentsFit(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.fromPod(tcp(podA, 50000, world, 80, syn)).is("forwarded")
		send := func(p packet, segment uint32) string {
			b.Helper()
			l := b.pods[podA]
			p.macTo, p.macFrom, p.payload = l.mac, l.peer, make([]byte, 3000)
			return b.run(wire.FromPod, l.index, p.bytes(b.family), map[int]uint32{skbGSOSize: segment}).what
		}
		tooBig := each(f, "stack", "drop TOO_BIG") // IPv4 without DF may be fragmented
		for _, to := range []string{world, remote, native} {
			for _, c := range []struct {
				name    string
				p       packet
				segment uint32
				want    string
			}{
				{"TCP that fits", tcp(podA, 50000, to, 80, ack), uint32(mtu - f.header() - 20), "forwarded"},
				{"TCP too large", tcp(podA, 50000, to, 80, ack), uint32(mtu - f.header() - 19), tooBig},
				{"UDP that fits", udp(podA, 50000, to, 80), uint32(mtu - f.header() - 8), "forwarded"},
				{"UDP too large", udp(podA, 50000, to, 80), uint32(mtu - f.header() - 7), tooBig},
				{"not segmented", udp(podA, 50000, to, 80), 0, tooBig},
			} {
				b.answers = c.want == "drop TOO_BIG"
				if got := send(c.p, c.segment); got != c.want {
					t.Errorf("%s, to %s: outcome %q, want %q", c.name, to, got, c.want)
				}
			}
		}
		b.answers = false
		// On the same node every link is as wide as the pod's own.
		if got := send(tcp(podA, 50000, podB, 80, ack), 9000); got != "delivered" {
			t.Errorf("same node: outcome %q", got)
		}
	})
}

// Of neighbours that do not answer, the stack asks for few on behalf of one pod: their table is the whole host's. Routers
// and other nodes are asked for always, and so are those for whom another pod asks.
func TestSilentNeighbours(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for network, first := range map[string]string{"172.16.0.": "forwarded", "172.19.0.": "stack"} { // of the uplink, and of a link without our programs
			b := newBed(t, f)
			began, asked := time.Now(), 0
			for i := range 150 {
				r := b.fromPod(udp(podA, 5000, network+strconv.Itoa(100+i), 53))
				if r.what == first {
					asked++
				} else {
					r.is("drop NEIGHBOUR_LIMIT")
				}
			}
			const burst, perSecond = 100, 20
			// The programs' clock moves in ticks, so that it may be one further on.
			if most := burst + 2 + int(time.Since(began).Seconds()*perSecond); asked < burst || asked > most {
				t.Errorf("%sX: %d neighbours asked for, want %d to %d", network, asked, burst, most)
			}
			b.fromPod(udp(podA, 5000, gatewayIP, 53)).is("forwarded")
			b.fromPod(udp(podA, 5000, world, 53)).is("forwarded")
			b.fromPod(udp(podA, 5000, mute, 53)).is("forwarded") // to a pod of a node that does not answer
			b.fromPod(udp(podB, 5000, network+"99", 53)).is(first)
			must(t, b.destinations.Put(b.key(network+"98/32"), f.node(network+"98")))
			b.fromPod(udp(podA, 5000, network+"98", 53)).is(first) // to another node
		}
	})
}

// However much a pod sends to one neighbour that is down, it costs no more than a try: others can still be asked for.
func TestStreamToOneSilentNeighbour(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.stayOnCPU() // paths are each processor's
		for range 500 {
			b.fromPod(udp(podA, 5000, silentIP, 514)).is("forwarded")
			b.leftToStack("the next", b.fromPod(udp(podA, 5000, silentIP, 514)))
		}
		b.fromPod(tcp(podA, 5000, "172.16.0.99", 80, syn)).is("forwarded")
	})
}

// As soon as a neighbour resolves, the next flow to it goes past the stack, however long a path may be used: one that began in the
// stack stays there for good.
func TestNeighbourThatHasResolved(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for to, neighbour := range map[string]string{mute: silentIP, silentIP: silentIP, "172.16.0.99": "172.16.0.99"} {
			b := newBed(t, f, withPaths(time.Minute))
			b.stayOnCPU() // paths are each processor's
			b.fromPod(tcp(podA, 5000, to, 80, syn)).is("forwarded")
			f.neighbour(t, b.uplink, neighbour)
			for port := range uint16(4) {
				b.fromPod(tcp(podA, 5001+port, to, 80, syn)).is("forwarded")
			}
		}
	})
}

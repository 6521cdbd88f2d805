package prog

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// path is one way of a packet through one program.
type path struct {
	name    string
	d       wire.Direction
	prepare func(b *bed) (packet, veth) // the packet and where it is seen, with its flow under way
	want    string
	mark    uint32
	fresh   bool // every packet is a new flow's
	frame   func(b *bed) []byte
	options []option // beside those of all
	nodes   int      // so many more nodes than two
}

// asked has the programs ask for the path of each packet.
var asked = []option{withPaths(0)}

var paths = []path{
	{name: "from_pod/same_node", d: wire.FromPod, want: "delivered", prepare: func(b *bed) (packet, veth) {
		return udp(podA, 40000, podB, 80), b.pods[podA]
	}},
	{name: "from_pod/other_node", d: wire.FromPod, want: "forwarded", prepare: func(b *bed) (packet, veth) {
		return udp(podA, 40000, remote, 80), b.pods[podA]
	}},
	{name: "from_pod/other_node_asked", d: wire.FromPod, want: "forwarded", options: asked, prepare: func(b *bed) (packet, veth) {
		return udp(podA, 40000, remote, 80), b.pods[podA]
	}},
	{name: "from_pod/other_node_asked_5000", d: wire.FromPod, want: "forwarded", options: asked, nodes: 4998, prepare: func(b *bed) (packet, veth) {
		return udp(podA, 40000, remote, 80), b.pods[podA]
	}},
	{name: "from_pod/other_node_netfilter", d: wire.FromPod, want: "forwarded", options: []option{besideNetfilter}, prepare: func(b *bed) (packet, veth) {
		return udp(podA, 40000, remote, 80), b.pods[podA]
	}},
	{name: "from_pod/to_node", d: wire.FromPod, want: "forwarded", prepare: func(b *bed) (packet, veth) {
		return udp(podA, 40000, node2IP, 80), b.pods[podA]
	}},
	{name: "from_pod/to_host", d: wire.FromPod, want: "stack", prepare: func(b *bed) (packet, veth) {
		return udp(podA, 40000, nodeIP, 80), b.pods[podA]
	}},
	{name: "from_pod/tunnel", d: wire.FromPod, want: "forwarded", prepare: func(b *bed) (packet, veth) {
		return udp(podA, 40000, beyond, 80), b.pods[podA]
	}},
	{name: "from_pod/tunnel_asked", d: wire.FromPod, want: "forwarded", options: asked, prepare: func(b *bed) (packet, veth) {
		return udp(podA, 40000, beyond, 80), b.pods[podA]
	}},
	{name: "from_tunnel/pod", d: wire.FromTunnel, want: "delivered", prepare: func(b *bed) (packet, veth) {
		return udp(beyond, 40000, podA, 80), veth{index: b.tunnel}
	}},
	{name: "from_tunnel/host", d: wire.FromTunnel, want: "stack", prepare: func(b *bed) (packet, veth) {
		return udp(beyond, 40000, nodeIP, 80), veth{index: b.tunnel}
	}},
	{name: "to_tunnel/marked", d: wire.ToTunnel, want: "stack", mark: mark, prepare: func(b *bed) (packet, veth) {
		return udp(podA, 40000, beyond, 80), veth{index: b.tunnel}
	}},
	{name: "to_tunnel/host", d: wire.ToTunnel, want: "stack", prepare: func(b *bed) (packet, veth) {
		return udp(nodeIP, 40000, beyond, 80), veth{index: b.tunnel}
	}},
	{name: "from_pod/snat_established", d: wire.FromPod, want: "forwarded", prepare: func(b *bed) (packet, veth) {
		b.fromPod(tcp(podA, 40000, world, 80, syn))
		return tcp(podA, 40000, world, 80, ack), b.pods[podA]
	}},
	{name: "from_pod/snat_established_asked", d: wire.FromPod, want: "forwarded", options: asked, prepare: func(b *bed) (packet, veth) {
		b.fromPod(tcp(podA, 40000, world, 80, syn))
		return tcp(podA, 40000, world, 80, ack), b.pods[podA]
	}},
	{name: "from_pod/snat_new", d: wire.FromPod, want: "forwarded", fresh: true, prepare: func(b *bed) (packet, veth) {
		return tcp(podA, 40000, world, 80, syn), b.pods[podA]
	}},
	{name: "from_pod/reply_to_world", d: wire.FromPod, want: "forwarded", prepare: func(b *bed) (packet, veth) {
		b.fromUplink(tcp(world, 4000, podA, 80, syn))
		return tcp(podA, 80, world, 4000, ack), b.pods[podA]
	}},
	{name: "from_pod/gateway", d: wire.FromPod, want: "answered", prepare: func(b *bed) (packet, veth) {
		return packet{}, b.pods[podA]
	}, frame: func(b *bed) []byte { return b.question(podA, gateway) }},
	{name: "from_uplink/other_node", d: wire.FromUplink, want: "delivered", prepare: func(b *bed) (packet, veth) {
		return udp(remote, 40000, podA, 80), b.uplink
	}},
	{name: "from_uplink/other_node_netfilter", d: wire.FromUplink, want: "delivered", options: []option{besideNetfilter}, prepare: func(b *bed) (packet, veth) {
		return udp(remote, 40000, podA, 80), b.uplink
	}},
	{name: "from_uplink/snat_reply", d: wire.FromUplink, want: "delivered", prepare: func(b *bed) (packet, veth) {
		p := tcp(podA, 40000, world, 80, syn)
		return answer(b.fromPod(p), p).with(func(p *packet) { p.flags = ack }), b.uplink
	}},
	{name: "from_uplink/world_recorded", d: wire.FromUplink, want: "delivered", prepare: func(b *bed) (packet, veth) {
		b.fromUplink(tcp(world, 4000, podA, 80, syn))
		return tcp(world, 4000, podA, 80, ack), b.uplink
	}},
	{name: "from_uplink/world_new", d: wire.FromUplink, want: "delivered", fresh: true, prepare: func(b *bed) (packet, veth) {
		return tcp(world, 4000, podA, 80, syn), b.uplink
	}},
	{name: "from_uplink/to_host", d: wire.FromUplink, want: "stack", prepare: func(b *bed) (packet, veth) {
		return tcp(world, 4000, nodeIP, 22, ack), b.uplink
	}},
	{name: "to_uplink/marked", d: wire.ToUplink, want: "stack", mark: mark, prepare: func(b *bed) (packet, veth) {
		return udp(nodeIP, 50000, world, 80), b.uplink
	}},
	{name: "to_uplink/host", d: wire.ToUplink, want: "stack", prepare: func(b *bed) (packet, veth) {
		return tcp(nodeIP, 40000, world, 80, ack), b.uplink
	}},
	{name: "to_uplink/host_in_range", d: wire.ToUplink, want: "stack", prepare: func(b *bed) (packet, veth) {
		return tcp(nodeIP, 50000, world, 80, ack), b.uplink
	}},
	{name: "to_uplink/pod", d: wire.ToUplink, want: "stack", prepare: func(b *bed) (packet, veth) {
		b.toUplink(tcp(podA, 40000, world, 80, syn))
		return tcp(podA, 40000, world, 80, ack), b.uplink
	}},
	{name: "to_uplink/pod_new", d: wire.ToUplink, want: "stack", fresh: true, prepare: func(b *bed) (packet, veth) {
		return tcp(podA, 40000, world, 80, syn), b.uplink
	}},
}

// BenchmarkPath gives the run time of each program per packet on each path, in ns/packet. A run changes its packet, so a
// small program writes it anew before each and calls ours; what that takes is measured in turn with it and taken off.
func BenchmarkPath(b *testing.B) {
	for _, p := range slices.Concat(paths, servicePaths) {
		for _, f := range []family{inIPv4, inIPv6} {
			b.Run(p.name+each(f, "", "/ipv6"), func(b *testing.B) {
				options := []option{withTables(262144, 262144), withPaths(10 * time.Millisecond)}
				p.measure(newBed(b, f, append(options, p.options...)...), b)
			})
		}
	}
}

func (p path) measure(n *bed, b *testing.B) {
	n.farNodes(p.nodes)
	what, l := p.prepare(n)
	what.macTo, what.macFrom = l.mac, l.peer
	var frame []byte
	if p.frame != nil {
		frame = p.frame(n)
	} else {
		frame = what.bytes(n.family)
	}
	n.run(p.d, l.index, frame, map[int]uint32{skbMark: p.mark}).is(p.want)
	nothing := n.nothing()
	ours := n.repeater(n.program(p.d), frame, p.mark, p.fresh)
	if p.d == wire.FromTunnel {
		nothing = n.farEnd(nothing)
	}
	base := n.repeater(nothing, frame, p.mark, p.fresh)
	var with, without []float64
	for left := b.N; left > 0; left -= chunk {
		some := min(left, chunk)
		without = append(without, n.repeat(base, l, frame, some))
		with = append(with, n.repeat(ours, l, frame, some))
		if p.fresh && len(with)%16 == 0 {
			n.sweep(usage.Snat, 2*day, false)
			n.sweep(usage.Conntrack, 2*day, false)
		}
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(with)-median(without), "ns/packet")
	moved := n.counters(p.d)[p.want].Packets
	if moved < uint64(b.N) {
		b.Fatalf("%d of %d packets took the path", moved, b.N)
	}
}

// farNodes adds podCIDRs of so many more nodes.
func (b *bed) farNodes(count int) {
	b.Helper()
	for i := range count {
		podCIDR := b.key(fmt.Sprintf("10.%d.%d.0/24", 100+i>>8, i&0xff))
		must(b, b.destinations.Put(podCIDR, b.behind(node2IP, b.uplink.index)))
	}
}

// chunk is how many packets make one measurement. Medians of many short ones leave out those that something else on the
// machine has disturbed; 16 of them make fewer flows than one pod may hold.
const chunk = 4096

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

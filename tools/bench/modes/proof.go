package modes

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// Traffic is what a generator says that went between client and server from one count to the next.
type Traffic struct {
	// Forth packets went from client to server, Back from server to client: datagrams to the packet with Exact, of TCP at least so many.
	Forth, Back uint64
	Exact       bool
	// Bytes were a TCP stream's payload from client to server. How many packets that is, is the kernel's to choose.
	Bytes uint64
	// Flows were new: connections, or datagrams of which each is a flow.
	Flows uint64
	// Served says that the client sent to the Service, and not to the server.
	Served bool
}

// proof says how the counters of a network tell that traffic took a path.
type proof struct {
	// through rise by every packet from client to server, both by every packet of either direction.
	through, both []string
	// opened rise by every new flow.
	opened []string
	// few are moved by neighbour discovery and the like, not by the traffic.
	few []string
	// none begin the names of what must not happen at all.
	none []string
	// held are numbers of things that the traffic leaves: connections tracked.
	held []string
}

// proof of a path: the links on the way, and what stands between them. served: the client sends to the Service of which the server is the endpoint.
func (n *Network) proof(path string, served bool) proof {
	p := proof{none: []string{linkDrops}}
	switch path {
	case result.SameNode:
		p.through = []string{"client eth0 tx", "server eth0 rx"}
		p.few = []string{"n1 eth0 tx"}
	case result.AcrossNodes:
		p.through = []string{"client eth0 tx", "n1 eth0 tx", "n2 eth0 rx", "remote eth0 rx"}
	case result.Inbound: // by the first node's one link in and out, there and back
		p.through, p.both = []string{"n2 eth0 rx", "remote eth0 rx"}, []string{"n1 eth0 rx", "n1 eth0 tx"}
	case result.InboundLocal:
		p.through = []string{"n1 eth0 rx", "server eth0 rx"}
	case result.FromNode:
		p.through = []string{"n1 eth0 tx", "n2 eth0 rx", "remote eth0 rx"}
	default:
		p.through = []string{"client eth0 tx", "n1 eth0 tx"}
		p.few = []string{"n2 eth0 rx"}
	}
	if n.Mode == result.Direct && path != result.SameNode { // which begins and ends at the nodes
		p.through = slices.DeleteFunc(p.through, func(name string) bool { return !strings.HasPrefix(name, "n") })
		p.few = append(p.few, "client eth0 tx")
	}
	if n.setup.tunnel != "" && path == result.AcrossNodes {
		p.through = append(p.through, "n1 "+n.setup.tunnel+" tx", "n2 "+n.setup.tunnel+" rx")
	}
	if n.setup.agent {
		n.programs(&p, path, served)
	}
	if n.setup.plugin != "" {
		n.netfilter(&p, path, served)
	}
	switch {
	case served && path == result.FromNode && n.setup.services: // the socket is translated, and no packet of it
		p.few = append(p.few, n.translations())
	case served && path == result.Inbound && n.setup.services: // each flow has got a port of the node's
		p.opened = append(p.opened, carriedName("n1", wire.FromUplink, traffic.SnatAllocated))
	case served:
		p.opened = append(p.opened, n.translations())
	}
	return p
}

// translations is the counter that tells a flow to the Service from one that goes straight to the server: of the flows that the programs have in their table
// where they serve Services, and else of netfilter's rules.
func (n *Network) translations() string {
	if n.setup.services {
		return "n1 " + heldFlows
	}
	return "n1 " + translated
}

// programs adds what this project's programs count. Beside kube-proxy what leaves goes by the stack, and is masqueraded on its way out.
func (n *Network) programs(p *proof, path string, served bool) {
	p.none = append(p.none, droppedName("n1"), droppedName("n2"))
	event := func(direction wire.Direction, event traffic.Event) string { return carriedName("n1", direction, event) }
	delivered, sent, stack := event(wire.FromPod, traffic.Delivered), event(wire.FromPod, traffic.Forwarded), event(wire.FromPod, traffic.Stack)
	switch {
	case served && n.setup.rules != "" && path == result.SameNode: // netfilter translates, so both directions are the stack's
		p.both = append(p.both, stack)
		p.few = append(p.few, delivered, event(wire.FromUplink, traffic.Stack))
	case served && n.setup.rules != "":
		p.through = append(p.through, stack, event(wire.ToUplink, traffic.Stack), carriedName("n2", wire.FromUplink, traffic.Delivered))
		p.few = append(p.few, sent, carriedName("n2", wire.FromPod, traffic.Stack), carriedName("n2", wire.FromUplink, traffic.Stack))
	case path == result.Inbound:
		p.both = append(p.both, event(wire.FromUplink, traffic.Forwarded))
		p.through = append(p.through, carriedName("n2", wire.FromUplink, traffic.Delivered))
		p.few = append(p.few, sent, stack, event(wire.FromUplink, traffic.Stack))
	case path == result.InboundLocal:
		p.through = append(p.through, event(wire.FromUplink, traffic.Delivered))
		p.few = append(p.few, stack, delivered, event(wire.FromUplink, traffic.Stack))
	case path == result.FromNode:
		p.through = append(p.through, event(wire.ToUplink, traffic.Stack), carriedName("n2", wire.FromUplink, traffic.Delivered))
		p.few = append(p.few, sent, stack, event(wire.ToUplink, traffic.Forwarded))
	case path == result.SameNode:
		p.both = append(p.both, delivered)
		p.few = append(p.few, stack, event(wire.FromUplink, traffic.Stack))
	case path == result.AcrossNodes && n.setup.tunnel != "": // whose outer packets are the stack's, which has the device
		p.through = append(p.through, sent, carriedName("n2", wire.FromUplink, traffic.Stack), carriedName("n2", wire.FromTunnel, traffic.Delivered))
		p.few = append(p.few, stack, event(wire.FromTunnel, traffic.Stack), carriedName("n2", wire.FromPod, traffic.Stack), carriedName("n2", wire.FromTunnel, traffic.Stack))
	case path == result.AcrossNodes:
		p.through = append(p.through, sent, carriedName("n2", wire.FromUplink, traffic.Delivered))
		p.few = append(p.few, stack, event(wire.FromUplink, traffic.Stack), carriedName("n2", wire.FromPod, traffic.Stack), carriedName("n2", wire.FromUplink, traffic.Stack))
	case n.setup.rules == "":
		p.through = append(p.through, sent)
		p.opened = append(p.opened, event(wire.FromPod, traffic.SnatAllocated))
		p.few = append(p.few, stack, event(wire.FromUplink, traffic.Stack))
	default:
		p.through = append(p.through, stack, event(wire.ToUplink, traffic.Stack))
		p.opened = append(p.opened, event(wire.ToUplink, traffic.SnatAllocated))
		p.few = append(p.few, sent, delivered)
	}
	if n.setup.rules != "" {
		p.none = append(p.none, trackingFaults("n1"), trackingFaults("n2"))
	}
}

// netfilter adds what the classical networks count. Every new flow met the FORWARD chain (also between ports of a bridge) and is tracked since. Where its
// rules count, so did every packet.
func (n *Network) netfilter(p *proof, path string, served bool) {
	nodes := []string{"n1", "n2"}
	switch path {
	case result.SameNode, result.Egress, result.InboundLocal:
		nodes = nodes[:1]
	case result.FromNode: // what a node sends itself is not forwarded there
		nodes = nodes[1:]
	}
	if n.setup.bridged() && (path == result.AcrossNodes || path == result.Egress) {
		p.through = append(p.through, "n1 "+bridge+" rx")
	}
	for _, node := range nodes {
		if node == "n2" || !served || !inbound(path) { // there kube-proxy's mark lets the first packets pass before
			p.opened = append(p.opened, node+" "+opened)
		}
		p.held = append(p.held, node+" tracked")
		p.none = append(p.none, trackingFaults(node))
		if n.setup.rules == iptables {
			p.both = append(p.both, node+" "+forwarded)
			p.few = append(p.few, node+" "+invalid)
		}
	}
}

// stray is how many packets beside the path are neighbour discovery's, a node's own, or a flow's first ones.
func stray(packets uint64) uint64 { return 50 + packets/1000 }

// least is how many packets must have gone all of the way: a flow's first ones may wait in the stack for a neighbour.
func least(packets uint64) uint64 {
	const first = 5
	if packets <= first {
		return 1
	}
	return packets - max(first, packets/1000)
}

// band is by how much a counter may rise.
type band struct{ low, high uint64 }

func (b band) hold(name string, before, after uint64) error {
	if rose := after - before; rose < b.low || rose > b.high {
		if b.high == unbounded {
			return fmt.Errorf("%q rose by %d, want at least %d", name, rose, b.low)
		}
		return fmt.Errorf("%q rose by %d, want %d to %d", name, rose, b.low, b.high)
	}
	return nil
}

const unbounded = ^uint64(0)

// packets is the band of so many packets.
func (t Traffic) packets(n uint64) band {
	if t.Exact {
		return band{least(n), n + stray(n)}
	}
	return band{least(n), unbounded}
}

// octets is the band of a stream's bytes on a link: payload, and headers, of which a segment has 66 bytes to 1 448, twelve in a hundred with
// VXLAN's outside of them, acknowledgements the other way and what was sent again.
func (t Traffic) octets() band {
	const handshake = 64 << 10
	return band{t.Bytes - t.Bytes/1000, t.Bytes + t.Bytes*12/100 + handshake}
}

// judge compares two counts.
func (p proof) judge(before, after Counters, t Traffic) error {
	expected := map[string]band{}
	for _, name := range p.through {
		expected[name] = t.packets(t.Forth)
	}
	for _, name := range p.both {
		expected[name] = t.packets(t.Forth + t.Back)
	}
	if t.Bytes > 0 {
		for _, name := range slices.Concat(p.through, p.both) {
			expected[bytesOf(name)] = t.octets()
		}
	}
	for _, name := range p.opened {
		expected[name] = band{least(t.Flows), t.Flows + stray(t.Flows)}
	}
	for _, name := range p.few {
		expected[name] = band{0, stray(t.Forth + t.Back)}
	}
	for _, name := range p.held {
		expected[name] = band{1, unbounded}
	}
	return errors.Join(within(expected, before, after), p.intact(before, after))
}

// intact is an error when anything happened that must not.
func (p proof) intact(before, after Counters) error {
	expected := map[string]band{}
	for name := range after {
		if slices.ContainsFunc(p.none, func(prefix string) bool { return strings.HasPrefix(name, prefix) }) {
			expected[name] = band{}
		}
	}
	return within(expected, before, after)
}

// within is an error for each counter that did not rise as expected.
func within(expected map[string]band, before, after Counters) error {
	var wrong []error
	for _, name := range slices.Sorted(maps.Keys(expected)) {
		if _, known := after[name]; !known || after[name] < before[name] {
			wrong = append(wrong, fmt.Errorf("counter %q went from %d to %d: it began anew, or is not there", name, before[name], after[name]))
			continue
		}
		wrong = append(wrong, expected[name].hold(name, before[name], after[name]))
	}
	return errors.Join(wrong...)
}

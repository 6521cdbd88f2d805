// Package shapes has one table of packets of every shape that networks tend to treat in ways of their own: too big,
// fragmented, with options, of rare protocols, to groups. It sends them along every path of a cluster and says what
// has become of each, so that ours and other networks can be held to the same table.
package shapes

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// Who takes part. Names of parties are what outcomes are told with.
const (
	Pod       = "pod"
	NearPod   = "near pod" // of the pod's node
	FarPod    = "far pod"  // of the other node
	Node      = "node"
	OtherNode = "other node"
	Outside   = "outside"
	Router    = "router" // takes no part, but may answer
)

// Kind is one of the paths.
type Kind int

// The paths of the table.
const (
	SameNode Kind = iota
	Across
	ToNode
	FromNode
	ToOtherNode
	ToWorld
	FromWorld
	Answer  // of the pod to the world, after FromWorld
	Reply   // of the world to a masqueraded flow
	ToGroup // from a pod, to many
	kinds
)

var ends = [kinds]struct{ name, from, to string }{
	SameNode:    {"pod to pod", Pod, NearPod},
	Across:      {"pod to pod of another node", Pod, FarPod},
	ToNode:      {"pod to its node", Pod, Node},
	FromNode:    {"node to its pod", Node, Pod},
	ToOtherNode: {"pod to another node", Pod, OtherNode},
	ToWorld:     {"pod to the world", Pod, Outside},
	FromWorld:   {"world to a pod", Outside, Pod},
	Answer:      {"answer to the world", Pod, Outside},
	Reply:       {"reply of the world", Outside, Pod},
	ToGroup:     {"pod to a group", Pod, Node},
}

// Network is what the table is tried on. Its outside host has routes to the pods.
type Network struct {
	Families []wire.Family
	Parties  map[string]*lab.Namespace
	// Names are further addresses by which parties and routers answer.
	Names map[netip.Addr]string
	// Hops are who counts down hops on a path, in their order.
	Hops [kinds][]string
	// Width is how large a packet may be on a path.
	Width func(Kind, wire.Family) Width
	// ByTunnel says whether nodes pass on by a tunnel what goes along a path; nil: nothing.
	ByTunnel func(Kind, wire.Family) bool
	// Broadcast is the broadcast address of the nodes' link.
	Broadcast netip.Addr
	// Bridged: the pods of a node share a link.
	Bridged bool
	// Masqueraded are the paths on which the receiver sees the node's address.
	Masqueraded []Kind
	// Style is whose outcomes are to be expected.
	Style Style
	// Drops are the counters of all nodes; nil for a network that counts nothing.
	Drops func() (map[drops.Reason]uint64, error)
}

// Width is how large a packet may be, and who answers one that is larger; nobody if the sender's own interface does not take it.
type Width struct {
	MTU  int
	Says string
}

// Style is a way of carrying packets whose outcomes differ from others'.
type Style int

// The styles of the table.
const (
	Programs  Style = iota // our programs alone
	Beside                 // our programs beside netfilter's translation
	Classical              // the kernel's forwarding and netfilter
)

// NewNetwork is one whose nodes are on one link, and route. The caller changes what is otherwise.
func NewNetwork(parties map[string]*lab.Namespace, families []wire.Family) Network {
	n := Network{Parties: parties, Families: families, Masqueraded: []Kind{ToWorld}, Names: map[netip.Addr]string{}}
	for name, party := range parties {
		for _, addr := range party.Addrs() {
			n.Names[addr] = name
		}
	}
	one := []string{Node}
	n.Hops = [kinds][]string{SameNode: one, Across: {Node, OtherNode}, ToOtherNode: one, ToWorld: one, FromWorld: one, Answer: one, Reply: one}
	return n
}

// path is a path in one family.
type path struct {
	kind     Kind
	family   wire.Family
	from     *lab.Namespace
	sent     [2]netip.AddrPort // from and to, as sent
	received [2]netip.AddrPort // and as received; of a masqueraded flow the port is anything
	network  *Network
}

// Where datagrams go, and come from.
const fromPort, toPort = 5005, 4004

func (n *Network) path(kind Kind, family wire.Family) path {
	end := ends[kind]
	from := netip.AddrPortFrom(n.Parties[end.from].AddrOf(family), fromPort)
	to := netip.AddrPortFrom(n.Parties[end.to].AddrOf(family), toPort)
	p := path{kind: kind, family: family, from: n.Parties[end.from], sent: [2]netip.AddrPort{from, to}, network: n}
	if kind == Answer {
		p.sent[0], p.sent[1] = netip.AddrPortFrom(from.Addr(), toPort), netip.AddrPortFrom(to.Addr(), fromPort)
	}
	p.received = p.sent
	if slices.Contains(n.Masqueraded, kind) {
		p.received[0] = netip.AddrPortFrom(n.Parties[Node].AddrOf(family), 0)
	}
	return p
}

func (p path) width() Width { return p.network.Width(p.kind, p.family) }

func (p path) byTunnel() bool {
	return p.network.ByTunnel != nil && p.network.ByTunnel(p.kind, p.family)
}

func (p path) String() string { return fmt.Sprintf("%s, %v", ends[p.kind].name, p.family) }

// hop is who gets a packet when it has no hops left; empty where that is its receiver.
func (p path) hop(ttl int) string {
	if hops := p.network.Hops[p.kind]; ttl <= len(hops) {
		return hops[ttl-1]
	}
	return ""
}

// outcome is what has become of a packet, or should.
type outcome struct {
	// what in words: arrived, lost, or an error and whose.
	what string
	// counted is why our programs have dropped it, or its pieces.
	counted drops.Reason
	packets uint64
}

const (
	arrived = "arrives"
	lost    = "lost"
)

// arrives is at the path's end, whole and unharmed.
var arrives = outcome{what: arrived}

func dropped(reason drops.Reason, packets uint64) outcome {
	return outcome{what: lost, counted: reason, packets: packets}
}

// isLost is without a counter: a stack's decision.
var isLost = outcome{what: lost}

// answered is with an ICMP error from somebody.
func answered(what, from string) outcome { return outcome{what: what + " from " + from} }

// shape is a row of the table.
type shape struct {
	name string
	// family is the only one that has such packets; nil: both.
	family *wire.Family
	// kinds are the paths that it is sent along.
	kinds []Kind
	// Either packet makes what is sent, with payload in it, or exchange sends something and waits for the same to come back.
	packet   func(p path, payload []byte) packet
	exchange func(ctx context.Context, p path) error
	// want is what our programs make of it, and the others too unless they have an outcome of their own.
	want      func(p path) outcome
	beside    func(p path) outcome
	classical func(p path) outcome
	// why they differ.
	why string
}

func (s shape) wanted(p path) outcome {
	other := map[Style]func(path) outcome{Beside: s.beside, Classical: s.classical}[p.network.Style]
	if other == nil {
		other = s.want
	}
	if other == nil {
		return arrives
	}
	o := other(p)
	if p.network.Drops == nil {
		o.counted, o.packets = drops.None, 0
	}
	return o
}

// paths are those of a network that the shape is sent along.
func (s shape) paths(n *Network) (all []path) {
	for _, family := range n.Families {
		if s.family != nil && *s.family != family {
			continue
		}
		for _, kind := range s.kinds {
			all = append(all, n.path(kind, family))
		}
	}
	return all
}

// Package plan turns the cluster's Nodes and the facts of this node into what
// the maps and the kernel's routing table should contain.
//
// It is pure: no map access, no netlink, no clock. The same Input gives the same
// Result, and a Result is complete: what is not in it should not exist.
//
//	r := plan.Make(plan.Input{Self: "n1", Nodes: nodes, Facts: facts, Before: previous})
//
// Nodes are judged one by one; whatever is wrong with one of them shows up as a
// Problem of that node and leaves the others as they are.
package plan

import (
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/maps/bridges"
	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/sources"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Link is an interface that leads out of the node.
type Link struct {
	Index uint32
	Name  string
	MTU   uint32
	// Bit is its number in the masks of destinations.
	Bit uint32
	// VRF is the index of the VRF device that the link belongs to; 0: none.
	VRF uint32
	// Bare says that packets on it have no Ethernet header.
	Bare bool
	// Away says that no route leads over it any more, perhaps only for a moment.
	Away bool
}

// Entry is what map uplinks has of the link before its addresses are known.
func (l Link) Entry() uplinks.Value {
	v := uplinks.Value{Bit: l.Bit}
	if l.Bare {
		v.Flags = uplinks.Bare
	}
	return v
}

// KernelRoute is a route that is not ours: how the kernel reaches a prefix.
type KernelRoute struct {
	Dst   netip.Prefix
	Index uint32
	// OnLink says that there is no gateway: the destination is on that link.
	OnLink bool
	// Unreachable says that packets are answered with an ICMP error.
	Unreachable bool
	// Via is the gateway, if there is one.
	Via netip.Addr
	// MTU is that of the route itself, in bytes of IP packet; 0: it has none.
	MTU uint32
	// Src is the source of this node's own packets; invalid: the kernel chooses one.
	Src netip.Addr
	// Hops are the interfaces of a route with several next hops, HopVias their gateways.
	Hops    []uint32
	HopVias []netip.Addr
	// Table is the one that a rule leads to; 0: the main table.
	Table int
}

// Policy is an IPsec policy of the host's that protects or blocks packets by source
// and destination: those that leave (Out), or those that are forwarded. Required says
// that what has not been protected does not pass.
type Policy struct {
	Src, Dst      netip.Prefix
	Out, Required bool
}

// Facts are this node's network as it is now.
type Facts struct {
	// Local lists what the kernel takes for this node itself (its local table).
	Local []netip.Prefix
	// Holders names the link that has each address, for messages.
	Holders map[netip.Addr]string
	Uplinks []Link
	// NotEthernet are the links without an Ethernet header, by index, be they uplinks or not. The tunnel's outer packets may go by them, no
	// packets of pods to other nodes.
	NotEthernet map[uint32]Link
	// Bridges are those whose containers are treated as pods.
	Bridges []Bridge
	Routes  []KernelRoute
	// Others are the routes of other tables.
	Others []KernelRoute
	// Sources are, of tables that rules lead to by a packet's source alone, the sources.
	Sources map[int][]netip.Prefix
	// InPart are the tables that rules lead only a part of the host's own packets to, such as those with a mark.
	InPart map[int]bool
	// Addresses are those that packets can have as their source, by link, and as the kernel has them there.
	Addresses []Address
	// Recent are those that flows keep for a moment, unless the uplink has another of the family.
	Recent []Recent
	// Broadcast are the addresses of everybody on a link of this node.
	Broadcast []netip.Prefix
	// Policies are the host's IPsec policies.
	Policies []Policy
	// RoutesToStack says that routes depend on more than the programs can ask for.
	RoutesToStack bool
	// Endpoints are the addresses of this node's pods.
	Endpoints []netip.Addr
	// Tunnel is the index of the tunnel device; 0: there is none that works.
	Tunnel uint32
	// Lacks are families that the kernel does not have.
	Lacks FamilySet
}

// Standing is what was in force before: it outlives a restart of the agent.
type Standing struct {
	// Own are this node's podCIDRs, at most one per family, in the order in which the Node has them.
	Own []netip.Prefix
	// NodeIPs are this node's InternalIPs, at most one per family, in the same way.
	NodeIPs []netip.Addr
	// Claims says by which node address each podCIDR of another node is reached.
	Claims map[netip.Prefix]netip.Addr
	// Aliases has, for such an address, the same node's one of the other family.
	Aliases map[netip.Addr]netip.Addr
	// MACs are what inner frames to the node with such an address are addressed to; of one without, any is taken.
	MACs map[netip.Addr]wire.MAC
	// Ways are those that the MTU was planned for.
	Ways Ways
}

// RoutingMode says how packets get to the pods of other nodes. A node understands those in any mode.
type RoutingMode string

// The modes.
const (
	RouteDirect RoutingMode = "direct" // to nodes on the link of an uplink, and to no others
	RouteVXLAN  RoutingMode = "vxlan"  // encapsulated
	RouteAuto   RoutingMode = "auto"   // direct where that is possible, else encapsulated
)

// Input is everything that Make looks at.
type Input struct {
	Self string
	Mode RoutingMode
	// Known says that Nodes is a complete list; without one, what stands stays.
	Known bool
	Nodes []Node
	Facts Facts
	// Before is what stood before; the zero value on a node that is new.
	Before Standing
	// Service are the ranges of Services' addresses, which --service-cidr or ServiceCIDRs name; Native
	// is what --non-masquerade-cidr and --cluster-cidr name.
	Service []netip.Prefix
	Native  []netip.Prefix
	// Services says that the programs serve Services, and Served that the maps have them: in those ranges is nobody else.
	Services, Served bool
	// SnatAddresses are what --snat-address names.
	SnatAddresses []SnatAddress
	// MTU is what --mtu gives pods, in bytes; 0: what fits the uplinks.
	MTU int
	// Tunnelled says that pods' packets leave room for the tunnel whichever nodes there are, as in flannel's network.
	Tunnelled bool
}

// Reason says in one word what is wrong with a Node.
type Reason string

// The reasons; the metric node_problems is labelled with them.
const (
	OffLink         Reason = "off_link"
	PodCIDRConflict Reason = "podcidr_conflict"
	Refused         Reason = "refused"
)

// Reasons are all of them.
func Reasons() []Reason { return []Reason{OffLink, PodCIDRConflict, Refused} }

// Problem is one thing that is wrong with a Node.
type Problem struct {
	Node   string
	Reason Reason
	// Text is a sentence for people.
	Text string
}

// Route is a kernel route that should exist.
type Route struct {
	Dst netip.Prefix
	// Via is the gateway; invalid: there is none.
	Via netip.Addr
	// Src is the address that the host's own packets get; may be invalid.
	Src netip.Addr
	// Index is the egress link; 0 makes the route an unreachable one.
	Index uint32
	// MTU is in bytes of IP packet; 0: the link's.
	MTU uint32
}

// Peer is another node as it is reached.
type Peer struct {
	Name    string
	Address netip.Addr
	// Others are InternalIPs by which other podCIDRs of its are reached.
	Others []netip.Addr
	// Way is the worst of those to its podCIDRs, which may differ by family.
	Way      destinations.Way
	PodCIDRs []netip.Prefix
}

// Result is what should be.
type Result struct {
	// NotReady says why this node can't carry a pod; empty: it can.
	NotReady string
	// Missing says why pods get no address of a family that the cluster has; empty: they get one, or nobody does.
	Missing [wire.Families]string

	// PodCIDRs are those that new pods get addresses from, in the order in which the Node has them.
	PodCIDRs []netip.Prefix
	// MTU of pods that are made from now on, in bytes of IP packet.
	MTU          int
	Config       config.Value
	Destinations map[destinations.Key]destinations.Value
	Uplinks      map[uplinks.Key]uplinks.Value
	// Exceptions are destinations that are not masqueraded to the uplink's own address.
	Exceptions map[sources.Key]sources.Value
	Bridges    map[bridges.Key]bridges.Value
	Routes     []Route
	Peers      []Peer
	// Crossed are the uplinks, by name, on whose links nodes are that are reached by tunnel nevertheless: what those send
	// directly does not arrive by the interface that leads back.
	Crossed  map[string]bool
	Problems []Problem
	// Notes are sentences that are no problem but worth a line in the log.
	Notes []string
	// Sources are what the host's own packets to pods get as their source: the family's
	// InternalIP; invalid while that is on no interface, since the kernel refuses a
	// route with it then.
	Sources wire.Addresses
	// Standing is the Before of the next Make.
	Standing Standing
}

// PodCIDR returns this node's podCIDR of a family, or an invalid prefix.
func (s Standing) PodCIDR(f wire.Family) netip.Prefix {
	for _, p := range s.Own {
		if wire.FamilyOf(p.Addr()) == f {
			return p
		}
	}
	return netip.Prefix{}
}

// NodeIP returns this node's InternalIP of a family, or an invalid address.
func (s Standing) NodeIP(f wire.Family) netip.Addr { return firstOf(f, s.NodeIPs) }

// firstOf returns the first address of a family, or an invalid one.
func firstOf(f wire.Family, all []netip.Addr) netip.Addr {
	for _, a := range all {
		if wire.FamilyOf(a) == f {
			return a
		}
	}
	return netip.Addr{}
}

// Package drops is the per-CPU array that counts packets which did not get
// through, by direction and reason. The programs write it.
package drops

import (
	"strconv"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/counters"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Name is the map's name in the object and below the pin directory.
const Name = "drops"

// Slots is how many reasons each direction has room for: DROP_SLOTS.
const Slots = 64

// Reason says why a packet did not get through: enum drop_reason.
type Reason uint32

// The reasons, in the order of enum drop_reason.
const (
	None Reason = iota
	Invalid
	NotIP
	IPv6Unsupported
	SpoofedSource
	NoEndpoint
	NodeOffLink
	UnknownProtocol
	NoMapping
	SnatExhausted
	SnatLimit
	SnatFull
	ConntrackLimit
	ConntrackFull
	FlowCollision
	FragmentUnknown
	NoSnatAddress
	WriteFailed
	IPsecPolicy
	ForgedError
	ICMPRedirect
	TableBusy
	BadOffload
	WrongUplink
	PortLimit
	Reasons
)

// text holds a reason's name and its explanation for people.
var text = [Reasons][2]string{
	None:            {"NONE", "not a drop"},
	Invalid:         {"INVALID", "malformed or truncated headers"},
	NotIP:           {"NOT_IP", "neither IP nor a question for the gateway's address"},
	IPv6Unsupported: {"IPV6_UNSUPPORTED", "IPv6, which this version does not carry"},
	SpoofedSource:   {"SPOOFED_SOURCE", "source is not an address that the sender can have"},
	NoEndpoint:      {"NO_ENDPOINT", "no pod has this address (answered: host unreachable)"},
	NodeOffLink:     {"NODE_OFF_LINK", "the pod's node is on no link of ours (answered: host unreachable)"},
	UnknownProtocol: {"UNKNOWN_PROTOCOL", "a protocol that cannot be masqueraded"},
	NoMapping:       {"NO_MAPPING", "belongs to no masqueraded flow and cannot open one"},
	SnatExhausted:   {"SNAT_EXHAUSTED", "no free port towards this destination"},
	SnatLimit:       {"SNAT_LIMIT", "the pod holds its share of the snat table"},
	SnatFull:        {"SNAT_FULL", "the snat table is full"},
	ConntrackLimit:  {"CONNTRACK_LIMIT", "the pod holds its share of the conntrack table"},
	ConntrackFull:   {"CONNTRACK_FULL", "the conntrack table is full"},
	FlowCollision:   {"FLOW_COLLISION", "the world opens a flow whose tuple another one has"},
	FragmentUnknown: {"FRAGMENT_UNKNOWN", "a later fragment whose first was not seen (from an uplink: left to the stack)"},
	NoSnatAddress:   {"NO_SNAT_ADDRESS", "no address to masquerade to: the uplink has none, or the node has lost the flow's"},
	WriteFailed:     {"WRITE_FAILED", "the kernel refused a change to the packet"},
	IPsecPolicy:     {"IPSEC_POLICY", "masqueraded it would fall under an IPsec policy of the host, in clear"},
	ForgedError:     {"FORGED_ERROR", "an ICMP error that quotes a packet between others"},
	ICMPRedirect:    {"ICMP_REDIRECT", "an ICMP redirect, which no pod may send or follow"},
	TableBusy:       {"TABLE_BUSY", "the kernel would not write to a flow table at this moment"},
	BadOffload:      {"BAD_OFFLOAD", "asks for a checksum to be written where none belongs"},
	WrongUplink:     {"WRONG_UPLINK", "source is not reached through the uplink that it came by"},
	PortLimit:       {"PORT_LIMIT", "the pod holds its share of the ports towards this destination"},
}

// String is the name of the reason, such as "SPOOFED_SOURCE".
func (r Reason) String() string {
	if r < Reasons {
		return text[r][0]
	}
	return strconv.Itoa(int(r))
}

// Explain is one line for people, the comment of enum drop_reason.
func (r Reason) Explain() string {
	if r < Reasons {
		return text[r][1]
	}
	return "unknown to this version"
}

// Index is the key of a counter.
func Index(d wire.Direction, r Reason) uint32 { return uint32(d)*Slots + uint32(r) }

// Value is one counter.
type Value = counters.Value

// Counter is the sum over all CPUs for one direction and reason.
type Counter struct {
	Direction wire.Direction
	Reason    Reason
	Value
}

// Map is the open map.
type Map struct{ *counters.Map }

// Open opens the map pinned at path.
func Open(path string) (*Map, error) {
	m, err := counters.Open(path, Slots)
	return &Map{m}, err
}

// Of wraps a map that is open already.
func Of(m *ebpf.Map) *Map { return &Map{counters.Of(m, Name, Slots)} }

// All returns the counters that are not zero, by direction, then reason.
func (m *Map) All() (out []Counter, err error) {
	err = m.Each(func(d wire.Direction, slot uint32, v Value) { out = append(out, Counter{d, Reason(slot), v}) })
	return out, err
}

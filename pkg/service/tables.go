package service

import (
	"net/netip"
	"slices"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/pkg/guard"
)

// Grace is for how long a number or a slot that nothing names any more stays unused: far longer than a program runs, so that
// none that has just read it meets another.
const Grace = 2 * time.Second

// Options is what a State depends on beside the objects.
type Options struct {
	// NodeName and Zone are this node's; Zone is empty when its Node has none.
	NodeName, Zone string
	// HeldAddresses are the node's own: a ClusterIP among them is left to whoever listens there.
	HeldAddresses map[netip.Addr]bool
	// OwnAddresses are those of the node's own on which host ports answer, NodeAddresses those of them on which NodePorts do.
	OwnAddresses, NodeAddresses map[netip.Addr]bool
	// HostPorts are what this node's pods have of NodePorts' keys, in words. There a NodePort does not answer.
	HostPorts map[services.Key]string
	// ExternalIPs says that externalIPs are served.
	ExternalIPs bool
	// APIServers are where this node reaches API servers, Guarded the ports of its own processes.
	APIServers []netip.AddrPort
	Guarded    guard.Ports
	// Broadcast are the addresses of everybody on a link of the node.
	Broadcast map[netip.Addr]bool
	// Capacities are those of the maps.
	Capacities Capacities
}

// Capacities are the maps' numbers of entries, as they have been made.
type Capacities struct {
	Services, Ranges, Sets, Backends, Slots uint32
}

// Content is what the maps hold. The index in Sets, Backends and Slots is the number.
type Content struct {
	Services map[services.Key]services.Value
	Ranges   map[services.RangeKey]services.Range
	Names    map[services.SetKey]services.ServiceName
	Sets     []services.Set
	Backends []backends.Value
	Slots    []backends.Slot
}

// Batch is a list of entries to write to one map, in order of the keys.
type Batch[K, V any] struct {
	Keys   []K
	Values []V
}

// Gone is what a hash has to lose, in order of the keys.
type Gone[K any] []K

// Writes is what has to be written, in the order of its fields: packets find each thing complete as soon as they find it, and
// nothing goes that they can still find.
type Writes struct {
	Backends Batch[backends.Key, backends.Value]
	Slots    Batch[backends.SlotKey, backends.Slot]
	Sets     Batch[services.SetKey, services.Set]
	Names    Batch[services.SetKey, services.ServiceName]
	Ranges   Batch[services.RangeKey, services.Range]
	Services Batch[services.Key, services.Value]

	GoneServices Gone[services.Key]
	GoneRanges   Gone[services.RangeKey]
	GoneNames    Gone[services.SetKey]
	// EmptiedSets are those of Services that are gone, Retired the backends that no set names any more.
	EmptiedSets Batch[services.SetKey, services.Set]
	Retired     Batch[backends.Key, backends.Value]
}

// Empty says that there is nothing to write.
func (w Writes) Empty() bool { return w.Len() == 0 }

// Len is how many entries the writes are about.
func (w Writes) Len() int {
	return len(w.Backends.Keys) + len(w.Slots.Keys) + len(w.Sets.Keys) + len(w.Names.Keys) + len(w.Ranges.Keys) + len(w.Services.Keys) +
		len(w.GoneServices) + len(w.GoneRanges) + len(w.GoneNames) + len(w.EmptiedSets.Keys) + len(w.Retired.Keys)
}

// HasNodePorts says whether any are about NodePorts.
func (w Writes) HasNodePorts() bool {
	return slices.ContainsFunc(w.Services.Keys, services.Key.IsNodePort) || slices.ContainsFunc(w.GoneServices, services.Key.IsNodePort)
}

// Reason is why a Service is not served, or not as it says: a word for Events and metrics.
type Reason string

// The reasons.
const (
	Malformed   Reason = "Malformed"   // what of the object could not be read
	Unsupported Reason = "Unsupported" // a port asks for what can't be done
	Taken       Reason = "Taken"       // an older Service has the address and the port, or the address is another's ClusterIP, or the API server's
	Full        Reason = "Full"        // a map has no room
	HealthCheck Reason = "HealthCheck" // this node can't answer its load balancer's health checks
	HostPort    Reason = "HostPort"    // a pod of this node has a NodePort as its host port
)

// Reasons are all of them.
func Reasons() []Reason { return []Reason{Malformed, Unsupported, Taken, Full, HealthCheck, HostPort} }

// Problem is what is wrong with a Service, and what to do about it.
type Problem struct {
	Service Name
	Reason  Reason
	Text    string
}

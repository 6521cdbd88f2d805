package service

import (
	"net/netip"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
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
	// ExternalIPs says that externalIPs are served.
	ExternalIPs bool
	// Capacities are those of the maps.
	Capacities Capacities
}

// Capacities are the maps' numbers of entries, as they have been made.
type Capacities struct {
	Services, Sets, Backends, Slots uint32
}

// Content is what the maps hold. The index in Sets, Backends and Slots is the number.
type Content struct {
	Services map[services.Key]services.Value
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
	Services Batch[services.Key, services.Value]

	GoneServices Gone[services.Key]
	GoneNames    Gone[services.SetKey]
	// EmptiedSets are those of Services that are gone, Retired the backends that no set names any more.
	EmptiedSets Batch[services.SetKey, services.Set]
	Retired     Batch[backends.Key, backends.Value]
}

// Empty says that there is nothing to write.
func (w Writes) Empty() bool {
	return len(w.Backends.Keys)+len(w.Slots.Keys)+len(w.Sets.Keys)+len(w.Names.Keys)+len(w.Services.Keys)+
		len(w.GoneServices)+len(w.GoneNames)+len(w.EmptiedSets.Keys)+len(w.Retired.Keys) == 0
}

// Reason is why a Service is not served, or not as it says: a word for Events and metrics.
type Reason string

// The reasons.
const (
	Malformed   Reason = "Malformed"   // what of the object could not be read
	Unsupported Reason = "Unsupported" // a port asks for what can't be done
	Taken       Reason = "Taken"       // an older Service has the address and the port, or the address is another's ClusterIP
	Full        Reason = "Full"        // a map has no room
)

// Reasons are all of them.
func Reasons() []Reason { return []Reason{Malformed, Unsupported, Taken, Full} }

// Problem is what is wrong with a Service, and what to do about it.
type Problem struct {
	Service Name
	Reason  Reason
	Text    string
}

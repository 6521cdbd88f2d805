package service

import (
	"net/netip"
	"time"
)

// Change is one of an object.
type Change struct {
	// Noticed is when the source heard of it.
	Noticed time.Time
	// Triggered is when a pod became ready, or a Service was made, of which an EndpointSlice tells since, by the clock of who wrote
	// that; zero: nobody says.
	Triggered time.Time
}

// MostChanges bounds how many are remembered for whoever measures how long they take: of more, those that have waited longest count.
const MostChanges = 10_000

// Update is one element of the stream of Services that a source delivers. The first one that has no Err is Complete: nothing
// is known of Services before all of them and all EndpointSlices are.
type Update struct {
	// Complete says that Services and Slices are all there are. Otherwise they are those that are new or have changed.
	Complete bool
	Services []Service
	Slices   []Slice
	// GoneServices and GoneSlices have been deleted; empty when Complete.
	GoneServices, GoneSlices []Name
	// CIDRs are the ranges of Services' addresses, always all of them; nil: the API does not tell.
	CIDRs []netip.Prefix
	// Changes are those that have led to this, the oldest first. Of all that comes with whole lists there is one.
	Changes []Change
	// Err says why no newer state can be had; what was delivered before stays valid. An update with one has no
	// objects, and one without says that all can be read, unless it is Faulty: then the last Err still holds.
	Err    error
	Faulty bool
}

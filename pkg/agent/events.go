package agent

import (
	"bytes"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gaissmai/bart"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// reason is why a pass is called for; 0: it is not.
type reason uint32

const (
	// casual is a change that others have made to what is theirs. They may go on with that all the time.
	casual reason = 1 << iota
	// urgent is a change of what is ours, of an uplink, or of what decides on every packet's way.
	urgent
	// ofPods is a change of something that a pod of this node needs.
	ofPods
)

// outline is what decides whether an event calls for a pass: what the newest look has found, and what is planned for
// that. Nothing in it changes once it is in force.
type outline struct {
	links   map[int]device.Link
	uplinks map[int]bool
	// addresses are those of uplinks.
	addresses map[device.Address]bool
	// pods are the links of endpoints, podAddresses whose an address is.
	pods         map[int]bool
	podAddresses map[netip.Addr]endpoint.ID
	// released reports whether the plugin is taking an endpoint away, or has.
	released func(endpoint.ID) bool
	// tables are those that rules lead to, but for the usual ones.
	tables map[int]bool
	*intent
	// told says that the kernel tells when a program is taken away.
	told bool
	// old says that the node is being looked at, and whatever an event is about may already be in that look or not.
	old bool
}

// weigh decides on an event. While there is no outline, because the node is being looked at, all of them count.
func (o *outline) weigh(e device.Event) reason {
	switch e.Kind {
	case device.Lost:
		return urgent | ofPods
	case device.PolicyEvent:
		return urgent
	case device.RuleEvent:
		return casual
	}
	if o == nil {
		return casual | ofPods
	}
	if o.old {
		current := *o
		current.old = false
		return casual | ofPods | current.weigh(e)
	}
	switch e.Kind {
	case device.LinkEvent:
		return o.weighLink(e.Link, e.Gone)
	case device.AddressEvent:
		return o.weighAddress(e.Address, e.Gone)
	case device.RouteEvent:
		return o.weighRoute(e.Route, e.Gone)
	case device.SettingEvent:
		return o.weighOwn(e.Index)
	case device.FilterEvent:
		if o.told && e.Gone {
			return o.weighOwn(e.Index)
		}
	}
	return 0
}

// weighOwn is for what we have set on a link: only on pods' and uplinks.
func (o *outline) weighOwn(index int) reason {
	switch {
	case o.pods[index]:
		return urgent | ofPods
	case o.uplinks[index]:
		return urgent
	}
	return 0
}

// weighLink ignores pods' links that come: pods are known by their state files.
func (o *outline) weighLink(l device.Link, gone bool) reason {
	have, known := o.links[l.Index]
	switch {
	case known && !gone && sameLink(have, l), !known && (gone || endpoint.IsHostLinkName(l.Name)):
		return 0
	case o.uplinks[l.Index]:
		return urgent
	case o.pods[l.Index]: // as with each DEL
		return casual | ofPods
	}
	return casual
}

// sameLink compares what we go by.
func sameLink(a, b device.Link) bool {
	return a.Name == b.Name && a.MTU == b.MTU && a.Up() == b.Up() && a.Master == b.Master && bytes.Equal(a.MAC, b.MAC)
}

func (o *outline) weighAddress(a device.Address, gone bool) reason {
	switch {
	case !a.Prefix.Addr().Is4(), !gone && o.addresses[a]: // a lease was renewed
		return 0
	case o.uplinks[a.Index]:
		return urgent
	}
	return casual
}

func (o *outline) weighRoute(r device.Route, gone bool) reason {
	host := r.Dst.IsSingleIP()
	pod, ofPod := o.podAddresses[r.Dst.Addr()]
	ofPod = ofPod && host
	switch {
	case r.Table == 0 && r.Protocol == device.Protocol:
		switch {
		case !gone: // nobody else writes any
			return 0
		case ofPod && o.released(pod): // as with each DEL
			return casual | ofPods
		case ofPod:
			return urgent | ofPods
		case o.routes[r.Dst]:
			return urgent
		}
		return 0
	case !r.Dst.Addr().Is4(), r.Table != 0 && r.Table != unix.RT_TABLE_LOCAL && !o.tables[r.Table]:
		return 0
	case r.Table != 0:
		return casual
	case ofPod:
		return urgent | ofPods
	case r.Dst.Bits() == 0, o.routes[r.Dst] && r.Priority == 0: // in the place of ours
		return urgent
	case host && r.TOS == 0 && !o.concerns(r.Dst.Addr()) && !o.concerns(r.Gateway):
		return 0
	}
	return casual
}

// intent is what of a plan decides on events.
type intent struct {
	// routes are the prefixes of the routes that we want.
	routes map[netip.Prefix]bool
	// destinations are the prefixes that are not simply the world; made when first asked for.
	destinations func() *bart.Lite
}

// newIntent may be asked by another goroutine than the one that plans, so it keeps the plan that it was given.
func newIntent(p plan.Result) *intent {
	i := &intent{routes: make(map[netip.Prefix]bool, len(p.Routes)), destinations: sync.OnceValue(func() *bart.Lite {
		t := &bart.Lite{}
		for key := range p.Destinations {
			t.Insert(key.Netip())
		}
		return t
	})}
	for _, r := range p.Routes {
		i.routes[r.Dst] = true
	}
	return i
}

// concerns reports whether an address is in the cluster, or is to be treated as if it were.
func (i *intent) concerns(a netip.Addr) bool { return i.destinations().Contains(a) }

// newOutline makes the outline of a view and what is planned for it.
func newOutline(v *view, i *intent, told bool, released func(endpoint.ID) bool) *outline {
	o := &outline{
		links: make(map[int]device.Link, len(v.links)), uplinks: map[int]bool{}, addresses: map[device.Address]bool{},
		pods: make(map[int]bool, len(v.endpoints)), podAddresses: make(map[netip.Addr]endpoint.ID, len(v.endpoints)),
		tables: v.tables(), intent: i, told: told, released: released,
	}
	maps.Copy(o.links, v.links) // which repairs write to
	for _, l := range v.uplinks {
		o.uplinks[int(l.Index)] = true
	}
	for _, a := range v.addresses {
		if o.uplinks[a.Index] {
			o.addresses[a] = true
		}
	}
	for _, e := range v.endpoints {
		o.pods[e.HostIndex] = true
		for _, a := range e.Addresses {
			o.podAddresses[a] = e.ID
		}
	}
	return o
}

// alarm is by what events of the network call for passes. An event that does not, or only for the reasons of others
// before it, wakes nobody.
type alarm struct {
	outline atomic.Pointer[outline] // nil: the node is being looked at
	reasons atomic.Uint32           // since the newest pass began
	rings   chan struct{}
}

func newAlarm() *alarm { return &alarm{rings: make(chan struct{}, 1)} }

// hear takes an event. Any goroutine may call it.
func (a *alarm) hear(e device.Event) { a.ring(a.outline.Load().weigh(e)) }

func (a *alarm) ring(r reason) {
	if before := a.reasons.Or(uint32(r)); before|uint32(r) == before {
		return
	}
	select {
	case a.rings <- struct{}{}:
	default: // it rings already
	}
}

// called is what has called for a pass since the newest one began.
func (a *alarm) called() reason { return reason(a.reasons.Load()) }

// begin is called when a pass begins. It returns what has called for it.
func (a *alarm) begin() reason {
	if o := a.outline.Load(); o != nil {
		old := *o
		old.old = true
		a.outline.Store(&old)
	}
	return reason(a.reasons.Swap(0))
}

const (
	// Passes for such reasons take at most one part in so many of a processor.
	casualShare, urgentShare = 50, 10
	// maxUrgentPause is how long what is ours may be gone although passes take long.
	maxUrgentPause = 700 * time.Millisecond
)

// pause is how long after a pass that cost so much processor time another one may begin.
func (r reason) pause(cost time.Duration) time.Duration {
	if r&urgent != 0 {
		return min(max(minPassInterval, urgentShare*cost), maxUrgentPause)
	}
	return min(max(minPassInterval, casualShare*cost), resync)
}

// tables are those that rules lead to, but for the usual ones.
func (v *view) tables() map[int]bool {
	tables := map[int]bool{}
	for _, r := range v.rules {
		if !slices.Contains([]int{unix.RT_TABLE_UNSPEC, unix.RT_TABLE_LOCAL, unix.RT_TABLE_MAIN, unix.RT_TABLE_DEFAULT}, r.Table) {
			tables[r.Table] = true
		}
	}
	return tables
}

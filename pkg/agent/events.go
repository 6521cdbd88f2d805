package agent

import (
	"bytes"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gaissmai/bart"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// trigger is why a pass is called for; 0: it is not.
type trigger uint32

const (
	// casual is a change that others have made to what is theirs. They may go on with that all the time.
	casual trigger = 1 << iota
	// urgent is a change of what is ours, of an uplink, or of what decides on every packet's way.
	urgent
	// ofPods is a change of something that a pod of this node needs.
	ofPods
	// lost is a loss of events on a node with very many routes, where their changes alone may be too many.
	lost
)

// outline is what decides whether an event calls for a pass: what the newest look has found, and what is planned for
// that. Nothing in it changes once it is in force.
type outline struct {
	links   map[int]device.Link
	uplinks map[int]bool
	// bridges are those whose containers are treated as pods, bridgeNames those that are or may come.
	bridges     map[int]bool
	bridgeNames []string
	// addresses are those of uplinks.
	addresses map[device.Address]bool
	// pods says whose a link is, podAddresses whose an address is.
	pods         map[int]endpoint.ID
	podAddresses map[netip.Addr]endpoint.ID
	// released reports whether the plugin is taking an endpoint away, or has.
	released func(endpoint.ID) bool
	// tables are those that rules lead to, but for the usual ones.
	tables map[int]bool
	*intent
	// used are the families that were looked at.
	used plan.FamilySet
	// many is set where there are very many routes.
	many *routeFilter
	// told says that the kernel tells when a program is taken away, at least one of those that see what is sent to pods.
	told bool
}

// weigh decides on an event. While there is no outline all of them count.
func (o *outline) weigh(e device.Event) trigger {
	switch e.Kind {
	case device.Lost:
		if o != nil && o.many != nil {
			return lost | ofPods
		}
		return urgent | ofPods
	case device.PolicyEvent:
		return urgent
	}
	if o == nil {
		return casual | ofPods
	}
	switch e.Kind {
	case device.RuleEvent:
		if o.used[familyOf(e.Family)] {
			return casual
		}
	case device.LinkEvent:
		return o.weighLink(e.Link, e.Gone)
	case device.AddressEvent:
		return o.weighAddress(e.Address, e.Gone)
	case device.RouteEvent:
		return o.weighRoute(e.Route, e.Gone)
	case device.SettingEvent:
		if e.Family == device.IPv6 {
			return o.weighForwarding(e.Settings)
		}
		return o.weighSettings(e.Settings)
	case device.FilterEvent:
		if o.told { // a filter may also be replaced
			return o.weighOwn(e.Index)
		}
	}
	return 0
}

// weighOwn is for what we have set on a link: only on pods' and uplinks.
func (o *outline) weighOwn(index int) trigger {
	if pod, ofPod := o.pods[index]; ofPod {
		return o.weighPod(pod)
	}
	if o.uplinks[index] || o.bridges[index] {
		return urgent
	}
	return 0
}

// weighSettings calls for a pass when settings are not what we have them be.
func (o *outline) weighSettings(s device.Settings) trigger {
	differs := func(value int) bool { return value != 1 && value != device.Untold }
	_, ofPod := o.pods[s.Index]
	// On an uplink any value but the loose one counts, since that of all links may make it strict.
	altered := o.uplinks[s.Index] && s.RPFilter != looseRPFilter && s.RPFilter != device.Untold || s.Index == device.AllLinks && s.RPFilter == strictRPFilter
	switch {
	case !altered && !differs(s.Forwarding) && (!ofPod || !differs(s.RPFilter)):
		return 0
	case s.Index == device.AllLinks:
		return urgent
	}
	return o.weighOwn(s.Index)
}

// weighForwarding is for settings of IPv6, where that of all links alone decides on forwarding.
func (o *outline) weighForwarding(s device.Settings) trigger {
	if o.used[wire.IPv6] && s.Index == device.AllLinks && s.Forwarding == 0 {
		return urgent
	}
	return 0
}

// weighPod is for what was taken from a pod: each DEL takes all.
func (o *outline) weighPod(pod endpoint.ID) trigger {
	if o.released(pod) {
		return casual | ofPods
	}
	return urgent | ofPods
}

// weighLink ignores pods' links that come: pods are known by their state files.
func (o *outline) weighLink(l device.Link, gone bool) trigger {
	have, known := o.links[l.Index]
	pod, ofPod := o.pods[l.Index]
	switch {
	case known && !gone && sameLink(have, l), !known && (gone || endpoint.IsHostLinkName(l.Name)):
		return 0
	case o.uplinks[l.Index], o.bridges[l.Index], slices.Contains(o.bridgeNames, l.Name):
		return urgent
	case o.bridges[l.Master], o.bridges[have.Master]: // a container comes or goes
		return urgent
	case ofPod:
		return o.weighPod(pod)
	}
	return casual
}

// sameLink compares what we go by.
func sameLink(a, b device.Link) bool {
	return a.Name == b.Name && a.MTU == b.MTU && a.Up() == b.Up() && a.NoARP == b.NoARP && a.Master == b.Master && bytes.Equal(a.MAC, b.MAC)
}

func (o *outline) weighAddress(a device.Address, gone bool) trigger {
	switch {
	case !o.used[wire.FamilyOf(a.Prefix.Addr())], isOfLink(a.Prefix.Addr()), !gone && o.addresses[a]: // a lease was renewed
		return 0
	case o.uplinks[a.Index], o.bridges[a.Index]:
		return urgent
	}
	return casual // without a route the link is no way out
}

func (o *outline) weighRoute(r device.Route, gone bool) trigger {
	host := r.Dst.IsSingleIP()
	pod, ofPod := o.podAddresses[r.Dst.Addr()]
	ofPod = ofPod && host
	switch {
	case r.Table == 0 && r.Protocol == device.Protocol:
		switch {
		case !gone: // nobody else writes any
			return 0
		case ofPod:
			return o.weighPod(pod)
		case o.routes[r.Dst]:
			return urgent
		}
		return 0
	case !o.used[wire.FamilyOf(r.Dst.Addr())], isOfLink(r.Dst.Addr()), r.Table != 0 && r.Table != unix.RT_TABLE_LOCAL && !o.tables[r.Table]:
		return 0
	case r.Table != 0:
		return casual
	case ofPod:
		return urgent | ofPods
	case r.Dst.Bits() == 0, o.routes[r.Dst] && r.HasUsualPriority(): // in the place of ours
		return urgent
	case o.many.ignores(r, gone):
		return 0
	case !host && !gone && o.isNewWay(r): // which needs programs before pods' packets take it
		return urgent
	case host && r.TOS == 0 && !r.Source.IsValid() && !o.concerns(r.Dst.Addr()) && (isOfLink(r.Gateway) || !o.concerns(r.Gateway)):
		return 0
	}
	return casual
}

// isNewWay reports whether a route leads over a link that may become an uplink.
func (o *outline) isNewWay(r device.Route) bool {
	return slices.ContainsFunc(append([]int{r.Index}, r.Hops...), func(index int) bool {
		l, known := o.links[index]
		return index != 0 && !o.uplinks[index] && (!known || leadsOut(l))
	})
}

// intent is what of a plan decides on events.
type intent struct {
	planned map[destinations.Key]destinations.Value
	// routes are the prefixes of the routes that we want.
	routes map[netip.Prefix]bool
	// destinations are the prefixes that are not simply the world; made when first asked for.
	destinations func() *bart.Lite
}

// newIntent may be asked by another goroutine than the one that plans, so it keeps the plan that it was given.
func newIntent(p plan.Result) *intent {
	i := &intent{planned: p.Destinations, routes: make(map[netip.Prefix]bool, len(p.Routes)), destinations: sync.OnceValue(func() *bart.Lite {
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

// same reports whether two, of which the other one may be nil, decide on events in the same way.
func (i *intent) same(o *intent) bool {
	if o == nil || len(i.planned) != len(o.planned) || !maps.Equal(i.routes, o.routes) {
		return false
	}
	for key := range i.planned {
		if _, there := o.planned[key]; !there {
			return false
		}
	}
	return true
}

// concerns reports whether an address is in the cluster, or is to be treated as if it were.
func (i *intent) concerns(a netip.Addr) bool { return i.destinations().Contains(a) }

// newOutline makes the outline of a view and what is planned for it.
func newOutline(v *view, i *intent, told bool, released func(endpoint.ID) bool) *outline {
	o := &outline{
		links: make(map[int]device.Link, len(v.links)), uplinks: map[int]bool{}, addresses: map[device.Address]bool{},
		pods: make(map[int]endpoint.ID, len(v.endpoints)), podAddresses: make(map[netip.Addr]endpoint.ID, len(v.endpoints)),
		used: v.used, many: v.many, tables: v.tables(), intent: i, told: told, released: released,
	}
	maps.Copy(o.links, v.links) // which repairs write to
	for _, l := range v.uplinks {
		o.uplinks[int(l.Index)] = true
	}
	if v.tunnel != 0 { // as urgent as one
		o.uplinks[v.tunnel] = true
	}
	for _, a := range v.addresses {
		if o.uplinks[a.Index] {
			o.addresses[a] = true
		}
	}
	for _, e := range v.endpoints {
		o.pods[e.HostIndex] = e.ID
		for _, a := range e.Addresses {
			o.podAddresses[a] = e.ID
		}
	}
	return o
}

// withBridges adds the bridges whose containers are treated as pods.
func (o *outline) withBridges(all []plan.Bridge, names []string) *outline {
	o.bridges, o.bridgeNames = map[int]bool{}, names
	for _, b := range all {
		o.bridges[int(b.Index)] = true
	}
	return o
}

// alarm is by what events of the network call for passes. An event that does not, or only for what others before it have
// called for, wakes nobody.
type alarm struct {
	outline  atomic.Pointer[outline] // nil: the node has not been looked at yet
	triggers atomic.Uint32           // since the newest pass began
	ignored  atomic.Bool             // since then, an event about a route called for none
	rings    chan struct{}

	mu      sync.Mutex
	looking bool           // a look has begun that has brought no outline yet
	kept    []device.Event // that came during the look, and that the outline in force ignores
}

// mostKept is how many events are kept for the outline that a look is about to bring.
const mostKept = 256

func newAlarm() *alarm { return &alarm{rings: make(chan struct{}, 1)} }

// hear takes an event. Any goroutine may call it.
func (a *alarm) hear(e device.Event) {
	looking := a.underWay() // asked first: a look that begins now sees the event
	o := a.outline.Load()
	if o == nil && !looking {
		return // the first look, which is still to come, sees it
	}
	t := o.weigh(e)
	switch {
	case t != 0:
	case e.Kind == device.RouteEvent && e.Route.Protocol != device.Protocol:
		a.ignored.Store(true)
	default:
		t = a.keep(e)
	}
	a.ring(t)
}

// underWay reports whether a look has begun that has brought no outline yet.
func (a *alarm) underWay() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.looking
}

// keep is for an event that agrees with the outline in force: the look under way may just have found something else. If it
// has not, the event calls for nothing, or else events that come all the time would have one pass follow the other.
func (a *alarm) keep(e device.Event) trigger {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case !a.looking: // perhaps since a moment ago
		return a.outline.Load().weigh(e)
	case len(a.kept) == mostKept:
		return casual
	}
	a.kept = append(a.kept, e)
	return 0
}

func (a *alarm) ring(t trigger) {
	if before := a.triggers.Or(uint32(t)); before|uint32(t) == before {
		return
	}
	select {
	case a.rings <- struct{}{}:
	default: // it rings already
	}
}

// called is what has called for a pass since the newest one began.
func (a *alarm) called() trigger { return trigger(a.triggers.Load()) }

// begin is called when a pass begins. It returns what has called for it. Until there is another outline, events are weighed by
// the one in force.
func (a *alarm) begin() trigger {
	a.ignored.Store(false)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.looking, a.kept = true, nil
	return trigger(a.triggers.Swap(0))
}

// found puts an outline in force.
func (a *alarm) found(o *outline) {
	a.mu.Lock()
	kept, former := a.kept, a.outline.Load()
	a.outline.Store(o)
	a.looking, a.kept = false, nil
	a.mu.Unlock()
	for _, e := range kept {
		a.ring(o.weigh(e))
	}
	if former != nil && former.many != nil && a.ignored.Load() && !former.many.ignoresLike(o.many) { // during the look
		a.ring(casual)
	}
}

// planned is called when there is another plan. An event that was ignored by the one before may matter to it.
func (a *alarm) planned() {
	if a.ignored.Load() {
		a.ring(urgent)
	}
}

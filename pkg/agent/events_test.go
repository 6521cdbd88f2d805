package agent

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// Links of testOutline.
const (
	anUplink = 2
	aPod     = 5
	another  = 6
	leaving  = 8
	unknown  = 99
)

// testOutline is of a node with the pod 10.244.1.5, the pod 10.244.1.7 that is being released, and the peer 172.18.0.12, which has 10.244.2.0/24.
func testOutline() *outline {
	v := testView()
	v.uplinks = v.findUplinks(nil, nil)
	leaves := endpoint.ID{ContainerID: "leaves", IfName: "eth0"}
	v.links[leaving] = device.Link{Index: leaving, Name: leaves.HostLinkName(), MTU: 1500, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}}
	v.endpoints = []endpoint.Endpoint{
		{HostIndex: aPod, Addresses: []netip.Addr{netip.MustParseAddr("10.244.1.5")}},
		{ID: leaves, HostIndex: leaving, Addresses: []netip.Addr{netip.MustParseAddr("10.244.1.7")}},
	}
	v.rules = []device.Rule{{Table: unix.RT_TABLE_MAIN}, {Table: 77}}
	p := plan.Result{Destinations: map[destinations.Key]destinations.Value{}}
	for _, prefix := range []string{"10.244.1.0/24", "10.244.2.0/24", "172.18.0.12/32", "172.18.0.11/32", "fe80::/10"} {
		p.Destinations[destinations.KeyFrom(netip.MustParsePrefix(prefix))] = destinations.Value{}
	}
	for _, prefix := range []string{"10.244.1.0/24", "10.244.2.0/24"} {
		p.Routes = append(p.Routes, plan.Route{Dst: netip.MustParsePrefix(prefix)})
	}
	return newOutline(v, newIntent(p), true, func(id endpoint.ID) bool { return id == leaves })
}

func route(dst string, protocol int) device.Event {
	return device.Event{Kind: device.RouteEvent, Route: device.Route{Dst: netip.MustParsePrefix(dst), Index: anUplink, Protocol: protocol}}
}

func (o *outline) link(index int) device.Event {
	l := o.links[index]
	l.Index = index
	return device.Event{Kind: device.LinkEvent, Link: l}
}

func addressOf(index int, prefix string) device.Event {
	return device.Event{Kind: device.AddressEvent, Address: device.Address{Index: index, Prefix: netip.MustParsePrefix(prefix)}}
}

const untold = device.Untold

func settingsOf(index, forwarding, rpFilter int) device.Event {
	return device.Event{Kind: device.SettingEvent, Settings: device.Settings{Index: index, Forwarding: forwarding, RPFilter: rpFilter}}
}

func ofIPv6(e *device.Event) { e.Family = device.IPv6 }

func about(kind device.EventKind, index int) device.Event {
	return device.Event{Kind: kind, Index: index}
}

func TestWhichEventsCallForAPass(t *testing.T) {
	o := testOutline()
	const ours, foreign = device.Protocol, 186
	// event changes one; gone says that what it is about was deleted.
	event := func(e device.Event, change func(*device.Event)) device.Event { change(&e); return e }
	gone := func(e device.Event) device.Event { e.Gone = true; return e }
	table := func(e device.Event, table int) device.Event { e.Route.Table = table; return e }
	newPod := device.Event{Kind: device.LinkEvent, Link: device.Link{
		Index: unknown, Name: endpoint.ID{ContainerID: "new", IfName: "eth0"}.HostLinkName(), MAC: net.HardwareAddr{2, 0, 0, 0, 0, 9},
	}}
	for _, tt := range []struct {
		what  string
		event device.Event
		want  trigger
	}{
		{"events were lost", device.Event{}, urgent | ofPods},
		{"IPsec policy", about(device.PolicyEvent, 0), urgent},
		{"rule", about(device.RuleEvent, 0), casual},

		{"our route written", route("10.244.2.0/24", ours), 0},
		{"our route gone", gone(route("10.244.2.0/24", ours)), urgent},
		{"a route of ours gone that we don't want", gone(route("10.244.9.0/24", ours)), 0},
		{"our route replaced", route("10.244.2.0/24", foreign), urgent},
		{"foreign route beside ours", event(route("10.244.2.0/24", foreign), func(e *device.Event) { e.Route.Priority = 5 }), casual},
		{"a pod's route written", route("10.244.1.5/32", ours), 0},
		{"a pod's route gone", gone(route("10.244.1.5/32", ours)), urgent | ofPods},
		{"a pod's route gone with the pod", gone(route("10.244.1.7/32", ours)), casual | ofPods},
		{"a pod's route gone that the look has not seen", gone(route("10.244.1.6/32", ours)), 0},
		{"a pod's route replaced", route("10.244.1.5/32", foreign), urgent | ofPods},
		{"default route", route("0.0.0.0/0", foreign), urgent},
		{"default route gone", gone(route("0.0.0.0/0", foreign)), urgent},
		{"foreign route", route("198.18.0.0/24", foreign), casual},
		{"foreign route gone", gone(route("198.18.0.0/24", foreign)), casual},
		{"foreign route over a link that is no uplink", event(route("198.18.0.0/24", foreign), func(e *device.Event) { e.Route.Index = another }), urgent},
		{"the same for one of several hops", event(route("198.18.0.0/24", foreign), func(e *device.Event) { e.Route.Index, e.Route.Hops = 0, []int{anUplink, another} }), urgent},
		{"foreign route over a new link", event(route("198.18.0.0/24", foreign), func(e *device.Event) { e.Route.Index = unknown }), urgent},
		{"foreign route over a pod's link", event(route("198.18.0.0/24", foreign), func(e *device.Event) { e.Route.Index = aPod }), casual},
		{"foreign route to one address", route("198.18.0.1/32", foreign), 0},
		{"foreign route to one address gone", gone(route("198.18.0.1/32", foreign)), 0},
		{"foreign route to a node", route("172.18.0.12/32", foreign), casual},
		{"foreign route into a podCIDR", route("10.244.2.9/32", foreign), casual},
		{"foreign route by a gateway in a podCIDR", event(route("198.18.0.1/32", foreign), func(e *device.Event) { e.Route.Gateway = netip.MustParseAddr("10.244.2.9") }), casual},
		{"foreign route by a gateway on the link", event(route("198.18.0.1/32", foreign), func(e *device.Event) { e.Route.Gateway = netip.MustParseAddr("fe80::9") }), 0},
		{"foreign route for a TOS", event(route("198.18.0.1/32", foreign), func(e *device.Event) { e.Route.TOS = 8 }), casual},
		{"foreign route of a table that a rule leads to", table(route("198.18.0.1/32", foreign), 77), casual},
		{"foreign route of another table", table(route("0.0.0.0/0", foreign), 78), 0},
		{"address of this host", table(route("172.18.0.77/32", unix.RTPROT_KERNEL), unix.RT_TABLE_LOCAL), casual},
		{"IPv6 route", route("2001:db8::/64", foreign), 0},

		{"uplink told again", o.link(anUplink), 0},
		{"uplink with another MTU", event(o.link(anUplink), func(e *device.Event) { e.Link.MTU++ }), urgent},
		{"uplink up", event(o.link(anUplink), func(e *device.Event) { e.Link.Flags ^= net.FlagUp }), urgent},
		{"uplink gone", gone(o.link(anUplink)), urgent},
		{"a pod's link told again", o.link(aPod), 0},
		{"a pod's end went down", event(o.link(aPod), func(e *device.Event) { e.Link.Running = !e.Link.Running }), 0},
		{"a pod's link down", event(o.link(aPod), func(e *device.Event) { e.Link.Flags ^= net.FlagUp }), urgent | ofPods},
		{"a pod's link gone", gone(o.link(aPod)), urgent | ofPods},
		{"a pod's link gone with the pod", gone(o.link(leaving)), casual | ofPods},
		{"a new pod's link", newPod, 0},
		{"another link", event(o.link(another), func(e *device.Event) { e.Link.Master = 3 }), casual},
		{"a new link", o.link(unknown), casual},

		{"rule of IPv6", event(about(device.RuleEvent, 0), ofIPv6), 0},
		{"forwarding off in IPv6", event(settingsOf(device.AllLinks, 0, untold), ofIPv6), 0},

		{"address told again", addressOf(anUplink, "172.18.0.11/24"), 0},
		{"address gone", gone(addressOf(anUplink, "172.18.0.11/24")), urgent},
		{"address new", addressOf(anUplink, "172.18.0.12/24"), urgent},
		{"address elsewhere", addressOf(another, "10.0.0.1/32"), casual},
		{"IPv6 address", addressOf(anUplink, "2001:db8::1/64"), 0},

		{"a pod's forwarding off", settingsOf(aPod, 0, untold), urgent | ofPods},
		{"a pod's rp_filter off", settingsOf(aPod, untold, 0), urgent | ofPods},
		{"a pod's rp_filter as it should be", settingsOf(aPod, untold, 1), 0},
		{"the forwarding off of a pod that leaves", settingsOf(leaving, 0, untold), casual | ofPods},
		{"an uplink's forwarding off", settingsOf(anUplink, 0, untold), urgent},
		{"an uplink's forwarding on", settingsOf(anUplink, 1, untold), 0},
		{"an uplink's rp_filter, loose", settingsOf(anUplink, untold, 2), 0},
		{"an uplink's rp_filter, strict", settingsOf(anUplink, untold, 1), urgent},
		{"an uplink's rp_filter, that of all links", settingsOf(anUplink, untold, 0), urgent},
		{"another link's forwarding off", settingsOf(another, 0, 0), 0},
		{"forwarding off", settingsOf(device.AllLinks, 0, untold), urgent},
		{"forwarding on", settingsOf(device.AllLinks, 1, untold), 0},
		{"rp_filter of all links", settingsOf(device.AllLinks, untold, 0), 0},
		{"rp_filter of all links, strict", settingsOf(device.AllLinks, untold, 1), urgent},
		{"forwarding of new links off", settingsOf(device.AllLinks-1, 0, untold), 0},
		{"a pod's filter replaced", about(device.FilterEvent, aPod), urgent | ofPods},
		{"a new pod's filter", about(device.FilterEvent, unknown), 0},
		{"a pod's filter gone", gone(about(device.FilterEvent, aPod)), urgent | ofPods},
		{"an uplink's filter gone", gone(about(device.FilterEvent, anUplink)), urgent},
		{"another link's filter gone", gone(about(device.FilterEvent, another)), 0},
	} {
		if got := o.weigh(tt.event); got != tt.want {
			t.Errorf("%s: %b, want %b", tt.what, got, tt.want)
		}
		if early := (*outline)(nil).weigh(tt.event); early&tt.want != tt.want && early != casual|ofPods {
			t.Errorf("%s, while the node is looked at: %b", tt.what, early)
		}
	}
	o.used[wire.IPv6] = true
	for _, tt := range []struct {
		what  string
		event device.Event
		want  trigger
	}{
		{"IPv6 route", route("2001:db8::/64", foreign), casual},
		{"default route of IPv6", route("::/0", foreign), urgent},
		{"an uplink's IPv6 address", addressOf(anUplink, "2001:db8::1/64"), urgent},
		{"a link-local address", addressOf(anUplink, "fe80::1/64"), 0},
		{"a link's own prefix", route("fe80::/64", foreign), 0},
		{"a multicast route", table(route("ff00::/8", foreign), unix.RT_TABLE_LOCAL), 0},
		{"rule of IPv6", event(about(device.RuleEvent, 0), ofIPv6), casual},
		{"forwarding off in IPv6", event(settingsOf(device.AllLinks, 0, untold), ofIPv6), urgent},
		{"forwarding on in IPv6", event(settingsOf(device.AllLinks, 1, untold), ofIPv6), 0},
		{"an uplink's forwarding off in IPv6", event(settingsOf(anUplink, 0, untold), ofIPv6), 0},
	} {
		if got := o.weigh(tt.event); got != tt.want {
			t.Errorf("%s, where IPv6 is used: %b, want %b", tt.what, got, tt.want)
		}
	}
	o.told = false
	if got := o.weigh(gone(about(device.FilterEvent, aPod))); got != 0 {
		t.Errorf("a filter gone where programs are attached by tcx: %b", got)
	}
}

// An agent that starts is told first that it may have missed something. That calls for no pass before the first one, but for
// another one if that is at work.
func TestNothingIsMissedBeforeTheFirstLook(t *testing.T) {
	a := newAlarm()
	a.hear(device.Event{Kind: device.Lost})
	if called := a.begin(); called != 0 || len(a.rings) != 0 {
		t.Errorf("before the first look: called for %b", called)
	}
	a.hear(device.Event{Kind: device.Lost})
	if called := a.called(); called != urgent|ofPods {
		t.Errorf("during the first look: called for %b", called)
	}
}

// What was no uplink when it lost its forwarding may be found to be one.
func TestSettingsThatChangeDuringALook(t *testing.T) {
	for _, becomes := range []bool{false, true} {
		a := newAlarm()
		a.begin()
		a.found(testOutline())
		a.begin()
		a.hear(settingsOf(another, 0, untold))
		o, want := testOutline(), trigger(0)
		if becomes {
			o.uplinks[another], want = true, urgent
		}
		a.found(o)
		if called := a.called(); called != want {
			t.Errorf("found to be an uplink %v: called for %b, want %b", becomes, called, want)
		}
	}
}

// What is taken from a pod that the look under way is the first to find is missed by nobody.
func TestNewPodLosesSomethingDuringALook(t *testing.T) {
	own := route("10.244.1.5/32", device.Protocol)
	for what, event := range map[string]device.Event{
		"its route": {Kind: own.Kind, Route: own.Route, Gone: true}, "its filter": {Kind: device.FilterEvent, Index: aPod, Gone: true},
	} {
		a, before := newAlarm(), testOutline()
		before.pods, before.podAddresses = nil, nil
		a.begin()
		a.found(before)
		a.begin()
		a.hear(event)
		a.found(testOutline())
		if called := a.called(); called != urgent|ofPods {
			t.Errorf("%s: called for %b", what, called)
		}
	}
}

// A flood of events rings once, and once more for a better reason.
func TestAlarmRingsOnceForAReason(t *testing.T) {
	a := newAlarm()
	a.begin()
	a.outline.Store(testOutline())
	rung := func() (n int) {
		for {
			select {
			case <-a.rings:
				n++
			default:
				return n
			}
		}
	}
	for _, step := range []struct {
		event device.Event
		rings int
	}{
		{route("198.18.0.1/32", 186), 0},
		{route("198.18.0.0/24", 186), 1},
		{route("198.18.1.0/24", 186), 0},
		{route("0.0.0.0/0", 186), 1},
		{route("198.18.0.0/24", 186), 0},
	} {
		for range 100 {
			a.hear(step.event)
		}
		if got := rung(); got != step.rings {
			t.Errorf("%v rings %d times, want %d", step.event.Route.Dst, got, step.rings)
		}
	}
	if called := a.begin(); called != casual|urgent {
		t.Errorf("called for %b", called)
	}
	a.hear(route("198.18.0.0/24", 186)) // during the look
	if got := rung(); got != 1 {
		t.Errorf("after the pass has begun: %d rings", got)
	}
}

func TestPausesGrowWithWhatPassesCost(t *testing.T) {
	for _, tt := range []struct {
		trigger             trigger
		cost, reading, want time.Duration
	}{
		{casual, 0, 0, minPassInterval},
		{casual, 40 * time.Millisecond, 0, 2 * time.Second},
		{casual, time.Minute, 0, maxCasualPause},
		{casual, time.Minute, time.Second, readingShare * time.Second},
		{urgent | casual, time.Millisecond, 0, minPassInterval},
		{urgent, 40 * time.Millisecond, 0, 400 * time.Millisecond},
		{urgent, time.Minute, 0, maxUrgentPause},
		{urgent | lost, time.Minute, time.Second, maxUrgentPause},
		{lost | ofPods, 40 * time.Millisecond, 0, 400 * time.Millisecond},
		{lost | ofPods, time.Minute, time.Second, readingShare * time.Second},
	} {
		if got := tt.trigger.pause(tt.cost, tt.reading); got != tt.want {
			t.Errorf("%b after %v: %v, want %v", tt.trigger, tt.cost, got, tt.want)
		}
	}
}

// Events bring a pass forward, and nothing puts one off.
func TestScheduleOnlyBringsForward(t *testing.T) {
	s := newSchedule(time.Hour)
	defer s.timer.Stop()
	s.within(10 * time.Minute)
	s.called(casual)
	if left := time.Until(s.next); left > time.Second {
		t.Errorf("called for, the next pass is in %v", left)
	}
	if s.begin() {
		t.Error("an event's pass is one over the whole node")
	}
	s.end(resync)
	if left := time.Until(s.next); left > resync || s.next != s.whole {
		t.Errorf("the pass over the whole node is in %v", left)
	}
	s.within(0)
	time.Sleep(time.Until(s.next))
	if !s.begin() {
		t.Error("what is due is not one over the whole node")
	}
	s.end(time.Minute)
	if left := time.Until(s.whole); left < resync/2 || left > resync {
		t.Errorf("the next one over the whole node is in %v", left)
	}
}

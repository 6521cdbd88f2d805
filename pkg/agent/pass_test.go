package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// What is said of a problem at its end is what there was.
func TestEachFindingCountsOnce(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	l.dp.Maps.Destinations = small(t, l.dp.Maps.Destinations, destinations.Name, 2)
	l.pass(t.Context())
	l.inspect(t.Context())
	if n := l.complaints.current["cluster/pass"].times; n != 1 {
		t.Errorf("found %d times by one pass", n)
	}
}

func TestOneProblemIsOneComplaint(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	log := logged(l)
	unforward(t, l)
	l.pass(t.Context())
	l.inspect(t.Context())
	if n := strings.Count(log.String(), "problem, trying again"); n != 1 {
		t.Errorf("told %d times:\n%s", n, log)
	}
}

func TestWhatIsNoObstacleAnyMoreDegrades(t *testing.T) {
	c := newComplaints(slog.New(slog.DiscardHandler))
	full := errors.New("map uplinks is full")
	c.note("uplinks/pass", hinder(full))
	c.note("uplinks/pass", full)
	if len(c.degraded()) != 1 {
		t.Error("not degraded")
	}
	c.note("uplinks/pass", hinder(full))
	if len(c.degraded()) != 0 {
		t.Error("degraded by an obstacle")
	}
}

func TestWhatIsUrgentIsSoDuringALook(t *testing.T) {
	a := newAlarm()
	a.outline.Store(testOutline())
	gone := route("10.244.2.0/24", device.Protocol)
	gone.Gone = true
	a.begin()
	a.begin() // the look before has failed
	a.hear(gone)
	if a.called()&urgent == 0 {
		t.Errorf("%b", a.called())
	}
}

// What an outline ignores may matter to what is found or planned next.
func TestWhatIsIgnoredIsNotForgotten(t *testing.T) {
	o, bare := testOutline(), testOutline()
	bare.links, bare.addresses = nil, nil
	for _, tt := range []struct {
		what  string
		event device.Event
		finds *outline // what a look finds during which the event comes; nil: there is none
		want  trigger
	}{
		{"link as before", o.link(anUplink), nil, 0},
		{"link as before, during a look that finds the same", o.link(anUplink), o, 0},
		{"link as before, during a look that finds another state", o.link(anUplink), bare, urgent},
		{"address as before, during a look that finds the same", addressOf(anUplink, "172.18.0.11/24"), o, 0},
		{"address as before, during a look that does not find it", addressOf(anUplink, "172.18.0.11/24"), bare, urgent},
		{"IPv6 address during a look", addressOf(anUplink, "2001:db8::1/64"), o, 0},
		{"route to an address that nobody has yet", route("198.51.100.9/32", 186), nil, 0},
		{"the same during a look", route("198.51.100.9/32", 186), o, 0},
		{"a route of ours", route("10.244.2.0/24", device.Protocol), nil, 0},
	} {
		a := newAlarm()
		a.begin()
		a.found(o)
		if tt.finds != nil {
			a.begin()
		}
		for range 2 * mostKept / 3 {
			a.hear(tt.event)
		}
		if tt.finds != nil {
			if got := a.called(); got != 0 {
				t.Errorf("%s: %b calls for a pass before the look has ended", tt.what, got)
			}
			a.found(tt.finds)
		}
		if got := a.called(); got != tt.want {
			t.Errorf("%s: %b calls for a pass, want %b", tt.what, got, tt.want)
		}
		if tt.event.Kind == device.RouteEvent && tt.event.Route.Protocol != device.Protocol {
			tt.want = urgent
		}
		a.planned() // another plan
		if got := a.called(); got != tt.want {
			t.Errorf("%s, then another plan: %b, want %b", tt.what, got, tt.want)
		}
		a.begin()
		if a.planned(); a.called() != 0 {
			t.Errorf("%s: it calls for passes for ever", tt.what)
		}
	}
}

// Of a flood during a look not everything is kept: what is not calls for a pass.
func TestFloodDuringALook(t *testing.T) {
	o := testOutline()
	a := newAlarm()
	a.begin()
	a.found(o)
	a.begin()
	for range mostKept + 1 {
		a.hear(o.link(anUplink))
	}
	if a.called() != casual {
		t.Errorf("%b calls for a pass, want %b", a.called(), casual)
	}
}

func TestSamePlanBesideManyTables(t *testing.T) {
	l := testLoop(t)
	link, err := netlink.LinkByName("uplink")
	must(t, err)
	for i := range 3 {
		_, dst, _ := net.ParseCIDR(fmt.Sprintf("198.18.%d.0/24", i))
		must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: dst, Table: 77 + i, Scope: netlink.SCOPE_LINK}))
		r := netlink.NewRule()
		r.Table, r.Priority = 77+i, 100+i
		must(t, netlink.RuleAdd(r))
	}
	ready(t, l)
	l.pass(t.Context())
	for range 10 {
		before := l.planned
		if l.pass(t.Context()); l.planned != before {
			t.Fatal("planned anew although nothing has changed")
		}
	}
}

// A pass that events have called for leaves out only what they can't have been about.
func TestPassAfterEvents(t *testing.T) {
	l := testLoop(t)
	must(t, os.MkdirAll(endpoint.Dir(l.cfg.State), 0o700))
	sideUplink(t)
	ready(t, l)
	short := func() { t.Helper(); l.passOver(t.Context(), false) }

	short()
	l.accept(list(n1(), n2(), plan.Node{Name: "n3", PodCIDRs: []string{"10.244.3.0/24"}, InternalIPs: []string{"172.18.0.13"}}))
	l.replan(t.Context())
	if _, there := l.destination(t, "10.244.3.0/24"); !there {
		t.Error("a new Node's podCIDR is not written")
	}

	l.inspect(t.Context())
	if l.alarm.called() != 0 {
		t.Errorf("called for %b", l.alarm.called())
	}
	must(t, os.WriteFile(filepath.Join(endpoint.Dir(l.cfg.State), "c1:eth0.json"), []byte("{"), 0o600))
	if l.inspect(t.Context()); l.alarm.called()&ofPods == 0 {
		t.Error("a pod's file calls for nothing")
	}
	if short(); len(l.complaints.degraded()) != 1 {
		t.Errorf("pods were not looked at: degraded by %v", l.complaints.degraded())
	}

	side, err := netlink.LinkByName("side")
	must(t, err)
	if on, err := l.dp.Attached(side.Attrs().Index, attach.FromUplink); !on || err != nil {
		t.Fatal(on, err)
	}
	l.cfg.Uplinks = []string{"uplink"}
	short()
	if on, err := l.dp.Attached(side.Attrs().Index, attach.FromUplink); on || err != nil {
		t.Errorf("a former uplink keeps its program: %v, %v", on, err)
	}
}

package agent

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

func TestLoopTellsServicesWhereTheyAre(t *testing.T) {
	l := testServices(t)
	self := n1()
	self.Zone = "west"
	l.accept(list(self, n2()))
	l.pass(t.Context())
	l.pass(t.Context()) // now the tunnel has its address
	select {
	case s := <-l.services.around:
		if s.zone != "west" || !slices.Contains(s.held, netip.MustParseAddr("172.18.0.11")) || slices.Contains(s.held, netip.MustParseAddr("172.18.0.0")) {
			t.Errorf("told %+v", s)
		}
	default:
		t.Fatal("nothing was told")
	}
	l.pass(t.Context())
	select {
	case s := <-l.services.around:
		t.Errorf("told again: %+v", s)
	default:
	}
	for _, zone := range []string{"south", "east"} { // the newest counts, and nobody waits for who takes it
		self.Zone = zone
		l.accept(list(self, n2()))
		l.replan(t.Context())
	}
	if s := <-l.services.around; s.zone != "east" {
		t.Errorf("told of the zone %q", s.zone)
	}
}

func TestServicesAndReadiness(t *testing.T) {
	l := testServices(t)
	l.accept(list(n1(), n2()))
	l.pass(t.Context())
	if why := l.status.reason(); !strings.Contains(why, "list of Services") {
		t.Errorf("not ready because %q", why)
	}
	l.services.accept(service.Update{Err: errors.New("forbidden")})
	l.judge()
	if why := l.status.reason(); !strings.Contains(why, "forbidden") {
		t.Errorf("not ready because %q", why)
	}
	if d := l.complaints.degraded(); len(d) > 0 {
		t.Errorf("degraded as well: %v", d)
	}
	l.services.place(<-l.services.around)
	l.services.accept(complete([]string{"10.244.2.7"}))
	l.judge()
	if why := l.status.reason(); why != "" {
		t.Errorf("not ready: %s", why)
	}
	l.services.accept(service.Update{Err: errors.New("forbidden")})
	l.judge()
	if d := l.complaints.degraded(); l.status.reason() != "" || !strings.Contains(d["services/source"], "forbidden") {
		t.Errorf("not ready %q, degraded %v", l.status.reason(), d)
	}
	// What of the rest changes meanwhile is applied, and changes nothing about that.
	u := complete([]string{"10.244.2.8"})
	u.Faulty = true
	l.services.accept(u)
	assertFound(t, l, "10.96.0.1", "10.244.2.8:8080")
	if d := l.complaints.degraded(); !strings.Contains(d["services/source"], "forbidden") || l.services.read().fault == nil {
		t.Errorf("degraded %v", d)
	}
	// An agent that is restarted without an API goes by what it finds.
	restartServices(t, l)
	l.services.accept(service.Update{Err: errors.New("forbidden")})
	l.judge()
	if why := l.status.reason(); why != "" {
		t.Errorf("after a restart: %s", why)
	}
}

// A kind without which Services are served, and that can't be read from the start on, keeps no pod from being carried. It is told
// for as long as it lasts.
func TestFaultFromTheStart(t *testing.T) {
	l := testServices(t)
	l.accept(list(n1(), n2()))
	l.pass(t.Context())
	l.services.place(<-l.services.around)
	l.services.accept(service.Update{Err: errors.New("forbidden")})
	u := complete([]string{"10.244.2.7"})
	u.Faulty = true
	l.services.accept(u)
	l.judge()
	if told := l.readTold(t); told.NotReady != "" || !slices.ContainsFunc(told.Degraded, func(d observe.Degraded) bool { return d.About == "services/source" }) {
		t.Errorf("not ready %q, degraded %v", told.NotReady, told.Degraded)
	}
	u.Faulty = false
	l.services.accept(u)
	l.judge()
	if told := l.readTold(t); told.NotReady != "" || len(told.Degraded) > 0 {
		t.Errorf("then: not ready %q, degraded %v", told.NotReady, told.Degraded)
	}
}

// Ranges are destinations once the maps hold the Services: before, what is there is served by others or not at all.
func TestRangesOfServices(t *testing.T) {
	l := testServices(t)
	l.cfg.Service = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}
	isService := func(prefix string) bool {
		v, there := l.destination(t, prefix)
		return there && v.Kind == destinations.Service
	}
	l.accept(list(n1(), n2()))
	l.pass(t.Context())
	if isService("10.96.0.0/16") {
		t.Error("packets to Services are dropped before the maps hold them")
	}
	u := complete([]string{"10.244.2.7"})
	u.CIDRs = []netip.Prefix{netip.MustParsePrefix("10.100.0.0/16"), netip.MustParsePrefix("10.244.3.0/24")}
	l.services.place(<-l.services.around)
	l.services.accept(u)
	<-l.services.changes()
	if l.rangesOfServices().equal(l.plannedRanges()) {
		t.Error("the loop sees no other ranges")
	}
	l.accept(list(n1(), n2(), plan.Node{Name: "n3", PodCIDRs: []string{"10.244.3.0/24"}, InternalIPs: []string{"172.18.0.13"}}))
	l.replan(t.Context())
	if !isService("10.96.0.0/16") || !isService("10.100.0.0/16") || !isService("10.244.3.0/24") {
		t.Error("the ranges are no destinations")
	}
	// A restarted agent keeps those of the API until it knows better.
	restartServices(t, l)
	l.planned = nil
	l.pass(t.Context())
	if !isService("10.100.0.0/16") {
		t.Error("a restart took away a range of the API")
	}
	u.CIDRs, u.Faulty = nil, true
	l.services.place(<-l.services.around)
	l.services.accept(u)
	l.replan(t.Context())
	if !isService("10.100.0.0/16") {
		t.Error("ranges that can't be read are taken away")
	}
	u.Faulty = false
	l.services.accept(u)
	l.replan(t.Context())
	if !isService("10.96.0.0/16") || isService("10.100.0.0/16") || isService("10.244.3.0/24") {
		t.Error("a range that the API no longer has stays")
	}
}

// Where netfilter translates too, that is said once, and pods are served all the same.
func TestServicesBesideNetfilter(t *testing.T) {
	l := testServices(t)
	l.services.place(here())
	l.services.accept(complete([]string{"10.244.2.7"}))
	ready(t, l)
	if told := l.readTold(t).Services; !strings.Contains(told, "by the programs") || strings.Contains(told, "netfilter") {
		t.Errorf("ebpfctl is told %q", told)
	}
	said := logged(l)
	l.mode.level, l.cfg.KubeProxy = netfilter.Translates, KubeProxyOn
	l.mode.report()
	l.judge()
	l.pass(t.Context())
	if told := l.readTold(t).Services; l.mode.where() == "" || !strings.Contains(told, "netfilter") {
		t.Errorf("ebpfctl is told %q", told)
	}
	if n := strings.Count(said.String(), "Services are served by the programs all the same"); n != 1 {
		t.Errorf("said %d times:\n%s", n, said)
	}
	assertFound(t, l, "10.96.0.1", "10.244.2.7:8080")
	l.cfg.Services, l.services = ServicesOff, nil
	l.judge()
	if told := l.readTold(t); told.Services != "" {
		t.Errorf("without Services ebpfctl is told %q", told.Services)
	}
}

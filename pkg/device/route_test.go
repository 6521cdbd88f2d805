package device

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestRoutes(t *testing.T) {
	p := newPair(t)
	must(t, p.host.AddAddress(p.link.Index, netip.MustParsePrefix("192.0.2.1/24")))
	dst := netip.MustParsePrefix("10.9.0.7/32")
	direct := Route{Dst: dst, Index: p.link.Index, Source: netip.MustParseAddr("192.0.2.1")}
	via := Route{Dst: netip.MustParsePrefix("10.9.1.0/24"), Index: p.link.Index, Gateway: netip.MustParseAddr("192.0.2.9"), MTU: 1300}
	closed := Route{Dst: netip.MustParsePrefix("10.9.0.0/24"), Unreachable: true}
	foreign := Route{Dst: netip.MustParsePrefix("10.8.0.0/24"), Index: p.link.Index, Foreign: true}
	v6 := Route{Dst: netip.MustParsePrefix("fd00::7/128"), Index: p.link.Index, Priority: 1024}
	for range 2 { // writing again changes nothing
		for _, r := range []Route{direct, via, closed, foreign, v6} {
			must(t, p.host.ReplaceRoute(r))
		}
	}
	got, err := p.host.OwnRoutes()
	must(t, err)
	if diff := cmp.Diff(stamped(closed, direct, via, v6), got, cmp.Comparer(sameRoute)); diff != "" {
		t.Errorf("own routes (-want +got):\n%s", diff)
	}
	all, err := p.host.Routes()
	must(t, err)
	if !hasRoute(all, foreign.Dst) {
		t.Errorf("Routes misses the foreign route: %+v", all)
	}

	must(t, p.host.DeleteRoute(foreign)) // not ours: stays
	if all, err = p.host.Routes(); err != nil || !hasRoute(all, foreign.Dst) {
		t.Errorf("DeleteRoute took away a foreign route (%v)", err)
	}
	for range 2 {
		for _, r := range []Route{{Dst: dst}, via, closed, v6} {
			must(t, p.host.DeleteRoute(r))
		}
	}
	if got, err = p.host.OwnRoutes(); err != nil || len(got) != 0 {
		t.Errorf("after deleting: %+v, %v", got, err)
	}
}

func TestDeleteRouteKeepsAnotherLinksRoute(t *testing.T) {
	p := newPair(t)
	r := Route{Dst: netip.MustParsePrefix("10.9.0.7/32"), Index: p.link.Index}
	must(t, p.host.ReplaceRoute(r))
	must(t, p.host.DeleteRoute(Route{Dst: r.Dst, Index: p.link.Index + 1000}))
	if got, err := p.host.OwnRoutes(); err != nil || !hasRoute(got, r.Dst) {
		t.Errorf("the route of link %d is gone: %+v, %v", r.Index, got, err)
	}
}

func stamped(routes ...Route) []Route {
	for i := range routes {
		routes[i].Protocol = Protocol
	}
	return routes
}

func sameRoute(a, b Route) bool {
	return a.Dst == b.Dst && (a.Index == b.Index || a.Unreachable) && a.Gateway == b.Gateway && a.Source == b.Source &&
		a.Protocol == b.Protocol && a.Priority == b.Priority && a.MTU == b.MTU && a.Unreachable == b.Unreachable
}

func hasRoute(routes []Route, dst netip.Prefix) bool {
	for _, r := range routes {
		if r.Dst == dst {
			return true
		}
	}
	return false
}

// Whoever's the route is that stands there, AddRoute leaves it.
func TestAddRouteTakesNothing(t *testing.T) {
	p := newPair(t)
	must(t, p.host.SetUp(1)) // lo
	for _, dst := range []netip.Prefix{netip.MustParsePrefix("10.9.0.7/32"), netip.MustParsePrefix("fd00::7/128")} {
		if _, found, err := p.host.RouteTo(dst); found || err != nil {
			t.Errorf("a route to %s before there is one: %v", dst, err)
		}
		theirs := Route{Dst: dst, Index: p.link.Index, Foreign: true}
		must(t, p.host.AddRoute(theirs))
		if err := p.host.AddRoute(Route{Dst: dst, Index: 1}); !errors.Is(err, unix.EEXIST) {
			t.Errorf("a second route to %s: %v", dst, err)
		}
		if got, found, err := p.host.RouteTo(dst); err != nil || !found || got.Index != p.link.Index || got.Protocol == Protocol {
			t.Errorf("the route to %s is now %+v, %v", dst, got, err)
		}
	}
}

func TestCheckName(t *testing.T) {
	for _, good := range []string{"eth0", "net1.2", "e", "a_b-c", "é", "fifteen-letters"} {
		if err := CheckName(good); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
	for _, bad := range []string{"", ".", "..", "all", "default", "eth%d", "100%", "a b", "a/b", "a:1", "a\x7f", "à", "sixteen-letters!"} {
		if CheckName(bad) == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

package agent

import (
	"bytes"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// rivals are two living pods with one address, the second of which took it from the first.
func rivals(t *testing.T, address string) (l *loop, first, second endpoint.Endpoint, log *bytes.Buffer) {
	t.Helper()
	l = testLoop(t)
	ready(t, l)
	log = logged(l)
	first, second = addPodOf(t, l, "first", address), addPodOf(t, l, "second", address)
	for i, e := range []*endpoint.Endpoint{&first, &second} {
		e.Created = time.Unix(int64(1000+i), 0).UTC()
		if err := endpoint.Write(l.cfg.State, *e); err != nil {
			t.Fatal(err)
		}
	}
	key := endpoints.Key{Address: wire.AddrFrom(first.Addresses[0])}
	if err := l.dp.Maps.Endpoints.Put(key, second.Entry()); err != nil {
		t.Fatal(err)
	}
	return l, first, second, log
}

func (l *loop) owner(t *testing.T, address string) (entry, route int) {
	t.Helper()
	a := netip.MustParseAddr(address)
	v, err := l.dp.Maps.Endpoints.Get(endpoints.Key{Address: wire.AddrFrom(a)})
	if err != nil {
		t.Fatal(err)
	}
	way, _, err := l.host.RouteTo(netip.PrefixFrom(a, a.BitLen()))
	if err != nil {
		t.Fatal(err)
	}
	return int(v.Ifindex), way.Index
}

// conflicts is the metric.
func (l *loop) conflictsTold(t *testing.T) float64 {
	t.Helper()
	all, err := newRegistry(l.node).Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range all {
		if family.GetName() == "ebpf_cni_endpoint_conflicts" {
			return family.GetMetric()[0].GetGauge().GetValue()
		}
	}
	t.Fatal("there is no metric ebpf_cni_endpoint_conflicts")
	return 0
}

func TestTwoPodsWithOneAddressAreNotFoughtOver(t *testing.T) {
	for _, address := range []string{"10.244.1.9", "10.9.9.9"} { // inside the podCIDR and not
		l, first, second, log := rivals(t, address)
		for range 4 {
			l.pass(t.Context())
			l.assertReady(t)
			if entry, route := l.owner(t, address); entry != second.HostIndex || route != second.HostIndex {
				t.Fatalf("entry %d, route %d: want those of the one whose entry stood, %d", entry, route, second.HostIndex)
			}
		}
		if n := strings.Count(log.String(), "container first"); n != 0 {
			t.Errorf("the holder is told as if it were in the way:\n%s", log)
		}
		if n := strings.Count(log.String(), "taken by interface eth0 of container second"); n != 1 {
			t.Errorf("told %d times, want once:\n%s", n, log)
		}
		if n := strings.Count(log.String(), "endpoint repaired"); n > 20 {
			t.Errorf("repaired again and again:\n%s", log)
		}
		if got := l.conflictsTold(t); got != 1 {
			t.Errorf("the metric says %v, want 1", got)
		}

		// The holder's end is the other's turn.
		if err := l.cfg.releaser().Release(t.Context(), second.ID, second.Network); err != nil {
			t.Fatal(err)
		}
		l.pass(t.Context())
		if entry, route := l.owner(t, address); entry != first.HostIndex || route != first.HostIndex {
			t.Errorf("entry %d, route %d: want those of the one that is left, %d", entry, route, first.HostIndex)
		}
		if got := l.conflictsTold(t); got != 0 {
			t.Errorf("the metric says %v, want 0", got)
		}
	}
}

// Every pod that has lost its address names who has it: a pass must not read all state files for each.
func TestHolderIsNamedFromTheView(t *testing.T) {
	l, first, second, _ := rivals(t, "10.244.1.9")
	l.pass(t.Context())
	if err := endpoint.Remove(l.cfg.State, second.ID); err != nil {
		t.Fatal(err)
	}
	err := l.view.owner(l.endpoints.work(&l.state, first), first.Addresses[0])
	if taken, ok := errors.AsType[*endpoint.TakenError](err); !ok || taken.Holder != second.Name() {
		t.Errorf("the holder is %v; want %q", err, second.Name())
	}
}

// Where no entry stands, who came first has it.
func TestTheOlderPodKeepsAnAddress(t *testing.T) {
	l, first, second, _ := rivals(t, "10.244.1.9")
	if err := l.dp.Maps.Endpoints.Delete(endpoints.Key{Address: wire.AddrFrom(first.Addresses[0])}); err != nil {
		t.Fatal(err)
	}
	if err := l.host.ReplaceRoute(l.endpoints.work(&l.state, second).Route(second.Addresses[0])); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		l.pass(t.Context())
		if entry, route := l.owner(t, "10.244.1.9"); entry != first.HostIndex || route != first.HostIndex {
			t.Errorf("entry %d, route %d: want those of the older one, %d", entry, route, first.HostIndex)
		}
	}
}

// A route of somebody else's in the place of a pod's cuts the host off from a living pod: it goes. One beside it does
// nobody harm: it stays. Neither is a second owner of the address.
func TestRouteOfSomebodyElse(t *testing.T) {
	for command, left := range map[string]int{
		"ip route replace " + podRoute + " dev uplink":                      1,
		"ip route replace " + podRoute + " via 172.18.0.1 dev uplink":       1,
		"ip route replace unreachable " + podRoute:                          1,
		"ip route add " + podRoute + " dev uplink metric 500":               2,
		"ip route add " + podRoute + " dev uplink proto static metric 1000": 2,
	} {
		t.Run(command, func(t *testing.T) {
			l, e := withPod(t)
			log := logged(l)
			run(t, command)
			for range 2 {
				l.pass(t.Context())
				l.assertReady(t)
				if entry, route := l.owner(t, e.Addresses[0].String()); entry != e.HostIndex || route != e.HostIndex {
					t.Errorf("entry %d, route %d: want the pod's, %d", entry, route, e.HostIndex)
				}
				if got := l.conflictsTold(t); got != 0 {
					t.Errorf("the metric says %v, want 0", got)
				}
			}
			n := 0
			for _, way := range l.view.routes {
				if way.Dst.String() == podRoute {
					n++
				}
			}
			if n != left {
				t.Errorf("%d routes to the pod are left, want %d", n, left)
			}
			if n, want := strings.Count(log.String(), "endpoint repaired"), 2-left; n != want || strings.Contains(log.String(), "taken by") {
				t.Errorf("repaired %d times, want %d:\n%s", n, want, log)
			}
		})
	}
}

package agent

import (
	"errors"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// histogramOf is how many durations a histogram without labels has seen, and their sum in seconds.
func histogramOf(t *testing.T, l *loop, name string) (count uint64, sum float64) {
	t.Helper()
	families, err := registered(l).Gather()
	must(t, err)
	for _, f := range families {
		if f.GetName() == prefix+name {
			h := f.GetMetric()[0].GetHistogram()
			return h.GetSampleCount(), h.GetSampleSum()
		}
	}
	t.Fatalf("there is no %s", name)
	return 0, 0
}

// How long a change takes ends when packets find it: not while the node's whereabouts are unknown, nor while a write fails.
func TestChangesTakeUntilPacketsFindThem(t *testing.T) {
	l := testServices(t)
	assert := func(when string, want uint64, atLeast float64) {
		t.Helper()
		count, sum := histogramOf(t, l, "service_sync_duration_seconds")
		if count != want || sum < atLeast || sum > atLeast+60 {
			t.Errorf("%s: %d changes took %v s, want %d and %v s or a little more", when, count, sum, want, atLeast)
		}
	}
	ago := func(d time.Duration) service.Change { return service.Change{Noticed: time.Now().Add(-d)} }
	u := complete([]string{"10.244.2.7"})
	u.Changes = []service.Change{ago(time.Hour)}
	l.services.accept(u)
	assert("before the node was looked at", 0, 0)
	l.services.place(here())
	assert("written", 1, 3600)

	room := l.dp.Maps.Services
	l.dp.Maps.Services = small(t, room, services.Name, 1)
	change := func(i int, changes ...service.Change) {
		s, slice := webService(i, "10.244.2.8")
		l.services.accept(service.Update{Services: []service.Service{s}, Slices: []service.Slice{slice}, Changes: changes})
	}
	change(2, ago(2*time.Hour))
	change(3, ago(time.Hour), ago(time.Hour))
	l.services.accept(service.Update{Err: errors.New("forbidden")})
	assert("while writes fail", 1, 3600)
	l.dp.Maps.Services = room
	l.services.again()
	assert("written at last", 4, 5*3600)
	l.services.again()
	assert("once", 4, 5*3600)

	l.services.failed = true
	change(4, make([]service.Change, service.MostChanges+5)...)
	change(5, ago(0))
	if n := len(l.services.unsynced); n != service.MostChanges {
		t.Errorf("%d changes wait, want %d", n, service.MostChanges)
	}
}

// What EndpointSlices say of when their pods became ready is taken as kube-proxy takes it: not of before this agent.
func TestChangesTakeFromWhatTriggeredThem(t *testing.T) {
	l := testServices(t)
	l.services.place(here())
	l.services.accept(complete([]string{"10.244.2.7"}))
	began, now := l.status.began, time.Now()
	l.status.servicesSynced([]service.Change{
		{Noticed: now}, {Noticed: now, Triggered: began.Add(-time.Second)}, {Noticed: now, Triggered: time.Now().Add(time.Hour)},
	})
	l.status.began = began.Add(-time.Hour)
	l.status.servicesSynced([]service.Change{{Noticed: now, Triggered: now.Add(-time.Minute)}})
	if count, sum := histogramOf(t, l, "network_programming_duration_seconds"); count != 2 || sum < 60 || sum > 120 {
		t.Errorf("%d changes took %v s, want two, one of which a minute: the other's clock goes ahead", count, sum)
	}
}

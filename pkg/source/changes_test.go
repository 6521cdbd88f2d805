package source

import (
	"fmt"
	"net/http"
	"runtime"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/rest"

	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// Each change says when it was heard of and what for, so that how long it took can be told. What comes with a whole list says only
// the first.
func TestChangesSayWhen(t *testing.T) {
	f, srv := newFakeServices(t)
	since := func(text string, addresses ...string) *discoveryv1.EndpointSlice {
		s := apiSlice("a", addresses...)
		s.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: text}
		return s
	}
	f.change("ADDED", apiService("a", "10.96.0.1"))
	f.change("ADDED", since("2026-01-02T03:04:04Z", "10.244.0.5"))
	updates := servicesOf(t, srv)
	expect := func(what string, triggered time.Time, began time.Time) {
		t.Helper()
		u := nextServices(t, updates)
		for u.Err == nil && len(u.Changes) == 0 { // that a fault is over may be told before what was missed meanwhile
			u = nextServices(t, updates)
		}
		if len(u.Changes) != 1 || !u.Changes[0].Triggered.Equal(triggered) || u.Changes[0].Noticed.Before(began) || time.Since(u.Changes[0].Noticed) < 0 {
			t.Errorf("%s: %+v, want one, triggered %v, noticed since %v", what, u.Changes, triggered, began)
		}
	}
	expect("the first lists", time.Time{}, time.Time{})
	f.watched(t, "services", "endpointslices", "servicecidrs")
	for text, want := range map[string]time.Time{
		"2026-01-02T03:04:05Z":           time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		"2026-01-02T03:04:05.123456789Z": time.Date(2026, 1, 2, 3, 4, 5, 123456789, time.UTC),
		"yesterday":                      {},
	} {
		began := time.Now()
		f.change("MODIFIED", since(text, "10.244.0.5", "10.244.1.7"))
		expect(text, want, began)
		f.change("MODIFIED", since(text, "10.244.0.5", "10.244.1.7")) // which changes nothing
		f.change("DELETED", apiSlice("a"))
		expect("deleted", time.Time{}, began)
	}

	f.refuse("list endpointslices", http.StatusServiceUnavailable)
	f.forget("endpointslices")
	f.change("MODIFIED", since("2026-01-02T03:04:09Z", "10.244.0.8"))
	expectFault(t, updates)
	began := time.Now()
	f.refuse("list endpointslices", 0)
	expect("a list that was read again", time.Time{}, began)
}

// expectFault waits until the consumer has been told that something can't be read.
func expectFault(t *testing.T, updates <-chan service.Update) {
	t.Helper()
	if u := nextServices(t, updates); u.Err == nil || len(u.Changes) > 0 {
		t.Fatalf("got %q, %+v, want an error", summary(u), u.Changes)
	}
}

// What is known of a Service with 3 600 endpoints takes no more memory after all of them were replaced twenty times than after twice.
func TestReplacedEndpointsAreForgotten(t *testing.T) {
	const slices, each, times = 36, 100, 20
	p := newPending()
	p.services.listed, p.cidrs.listed = true, true
	k := &kept[service.Slice, *discoveryv1.EndpointSlice]{pending: p, table: &p.slices, reach: p.reach(&rest.Config{}, sliceResource, kindSlice), read: new(interner).sliceOf}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	slice := func(roll, i int) *discoveryv1.EndpointSlice {
		var addresses []string
		for j := range each {
			addresses = append(addresses, fmt.Sprintf("10.%d.%d.%d", roll, i, j))
		}
		s := apiSlice("web", addresses...)
		s.Name = fmt.Sprintf("web-%d-%d", roll, i)
		for j := range s.Endpoints {
			s.Endpoints[j].NodeName = new(fmt.Sprint("node-", j))
		}
		return s
	}
	replace := func(roll int) {
		for i := range slices {
			check(k.Add(slice(roll, i)))
			p.take()
			check(k.Delete(slice(roll-1, i)))
			p.take()
		}
	}
	memory := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	check(k.Replace(nil, ""))
	replace(1)
	replace(2)
	before := memory()
	for roll := 3; roll <= times; roll++ {
		replace(roll)
	}
	if grown := memory() - before; grown > 256<<10 || len(p.slices.have) != slices || len(p.changes) > 0 {
		t.Errorf("memory grew by %d bytes; %d slices are known, and %d changes wait", grown, len(p.slices.have), len(p.changes))
	}
	runtime.KeepAlive(k)
}

// A consumer that takes nothing for long costs no more memory for each further change.
func TestChangesThatWaitAreBounded(t *testing.T) {
	p := &pending{begun: true}
	for n := range service.MostChanges + 5 {
		p.note(service.Change{Noticed: time.Unix(int64(n), 0)})
	}
	if n := len(p.changes); n != service.MostChanges || !p.changes[0].Noticed.Equal(time.Unix(0, 0)) {
		t.Errorf("%d changes wait, the first of %v", n, p.changes[0].Noticed)
	}
}

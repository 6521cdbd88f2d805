package source

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"

	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// followServices runs Services until the test ends.
func followServices(t *testing.T, srv *httptest.Server, deliver func(service.Update)) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	s := Services{Config: &rest.Config{Host: srv.URL}, Log: slog.New(slog.DiscardHandler), absence: 100 * time.Millisecond}
	go func() { done <- s.Run(ctx, deliver) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Run ended with %v", err)
		}
	})
}

func servicesOf(t *testing.T, srv *httptest.Server) <-chan service.Update {
	t.Helper()
	updates := make(chan service.Update, 100)
	followServices(t, srv, func(u service.Update) { updates <- u })
	return updates
}

func nextServices(t *testing.T, updates <-chan service.Update) service.Update {
	t.Helper()
	select {
	case u := <-updates:
		return u
	case <-time.After(20 * time.Second):
		t.Fatal("no update")
		panic("unreachable")
	}
}

func noServices(t *testing.T, updates <-chan service.Update, d time.Duration, what string) {
	t.Helper()
	select {
	case u := <-updates:
		t.Fatalf("%s: %+v", what, u)
	case <-time.After(d):
	}
}

// summary says what an update consists of.
func summary(u service.Update) string {
	var s []string
	if u.Complete {
		s = append(s, "all")
	}
	for _, o := range u.Services {
		s = append(s, fmt.Sprint(o.Name.Name, "=", o.ClusterIPs))
	}
	for _, o := range u.Slices {
		text := o.Name.Name + "="
		for _, e := range o.Endpoints {
			text += e.Address.String() + ","
		}
		s = append(s, text)
	}
	for _, n := range append(u.GoneServices, u.GoneSlices...) {
		s = append(s, "-"+n.Name)
	}
	if u.CIDRs != nil {
		s = append(s, fmt.Sprint(u.CIDRs))
	}
	if u.Err != nil {
		s = append(s, "error")
	}
	return strings.Join(s, " ")
}

func expectServices(t *testing.T, updates <-chan service.Update, want string) {
	t.Helper()
	if u := nextServices(t, updates); summary(u) != want {
		t.Fatalf("got %q, error %v, want %q", summary(u), u.Err, want)
	}
}

func TestServicesListsThenFollows(t *testing.T) {
	f, srv := newFakeServices(t)
	f.change("ADDED", apiService("b", "10.96.0.2"))
	f.change("ADDED", apiService("a", "10.96.0.1"))
	f.change("ADDED", apiService("none", "None"))
	f.change("ADDED", apiSlice("a", "10.244.0.5"))
	f.change("ADDED", apiCIDR("kubernetes", "10.96.0.0/16"))
	updates := servicesOf(t, srv)
	const ranges = " [10.96.0.0/16]"
	expectServices(t, updates, "all a=[10.96.0.1] b=[10.96.0.2] a-1=10.244.0.5,"+ranges)
	f.watched(t, "services", "endpointslices", "servicecidrs")
	f.change("MODIFIED", apiSlice("a", "10.244.0.5", "10.244.1.7"))
	expectServices(t, updates, "a-1=10.244.0.5,10.244.1.7,"+ranges)
	relabelled := apiService("a", "10.96.0.1")
	relabelled.Annotations["heavy"] = "changed"
	f.change("MODIFIED", relabelled)
	f.change("MODIFIED", apiSlice("a", "10.244.0.5", "10.244.1.7"))
	f.change("DELETED", apiService("b", "10.96.0.2"))
	expectServices(t, updates, "-b"+ranges) // and not what changed nothing
	external := apiService("a", "")
	external.Spec.Type, external.Spec.ClusterIPs, external.Spec.ExternalName = corev1.ServiceTypeExternalName, nil, "example.org"
	f.change("MODIFIED", external)
	expectServices(t, updates, "-a"+ranges)
	f.change("DELETED", apiSlice("a"))
	expectServices(t, updates, "-a-1"+ranges)
	f.change("ADDED", apiCIDR("more", "10.97.0.0/16", "fd00:97::/112", "10.96.0.0/16"))
	expectServices(t, updates, "[10.96.0.0/16 10.97.0.0/16 fd00:97::/112]")
}

// Nothing is known before both lists are, whichever is late.
func TestServicesWaitForBothLists(t *testing.T) {
	for _, late := range []string{"services", "endpointslices"} {
		t.Run(late, func(t *testing.T) {
			f, srv := newFakeServices(t)
			f.change("ADDED", apiService("a", "10.96.0.1"))
			f.change("ADDED", apiSlice("a", "10.244.0.5"))
			f.refuse("list "+late, http.StatusServiceUnavailable)
			updates := servicesOf(t, srv)
			expectServices(t, updates, "error")
			noServices(t, updates, 300*time.Millisecond, "before the lists")
			f.refuse("list "+late, 0)
			expectServices(t, updates, "all a=[10.96.0.1] a-1=10.244.0.5,")
		})
	}
}

// Newer API servers stream their lists.
func TestServicesAreStreamed(t *testing.T) {
	f, srv := newFakeServices(t)
	f.streams = true
	f.change("ADDED", apiService("a", "10.96.0.1"))
	f.change("ADDED", apiService("none", "None"))
	f.change("ADDED", apiSlice("a", "10.244.0.5"))
	f.change("ADDED", apiSlice("b", "10.244.0.6"))
	f.change("ADDED", apiCIDR("kubernetes", "10.96.0.0/16"))
	updates := servicesOf(t, srv)
	expectServices(t, updates, "all a=[10.96.0.1] a-1=10.244.0.5, b-1=10.244.0.6, [10.96.0.0/16]")
	f.change("MODIFIED", apiSlice("b", "10.244.0.7"))
	expectServices(t, updates, "b-1=10.244.0.7, [10.96.0.0/16]")
	f.forget("endpointslices")
	f.change("DELETED", apiSlice("b"))
	expectServices(t, updates, "all a=[10.96.0.1] a-1=10.244.0.5, [10.96.0.0/16]")
	if f.mu.Lock(); f.listed != 0 {
		t.Errorf("%d lists were not streamed", f.listed)
	}
	f.mu.Unlock()
}

// What a list that had to be read again brings is told as a whole; that it is the same as before is not told.
func TestServicesAreListedAgain(t *testing.T) {
	f, srv := newFakeServices(t)
	f.change("ADDED", apiService("a", "10.96.0.1"))
	f.change("ADDED", apiSlice("a", "10.244.0.5"))
	updates := servicesOf(t, srv)
	expectServices(t, updates, "all a=[10.96.0.1] a-1=10.244.0.5,")
	f.watched(t, "services", "endpointslices")
	f.forget("endpointslices")
	f.change("ADDED", apiSlice("b", "10.244.0.6")) // while nobody watches
	f.change("DELETED", apiSlice("a"))
	expectServices(t, updates, "all a=[10.96.0.1] b-1=10.244.0.6,")
	f.watched(t, "endpointslices")
	f.forget("services")
	f.watched(t, "services")
	f.change("MODIFIED", apiService("a", "10.96.0.9"))
	expectServices(t, updates, "a=[10.96.0.9]")
}

// However much happens while the consumer is busy, it is told at once afterwards, and as it is then.
func TestServicesPileUp(t *testing.T) {
	f, srv := newFakeServices(t)
	f.change("ADDED", apiService("a", "10.96.0.1"))
	f.change("ADDED", apiSlice("a", "10.244.0.5"))
	updates, goOn := make(chan service.Update), make(chan struct{})
	followServices(t, srv, func(u service.Update) {
		updates <- u
		<-goOn
	})
	expectServices(t, updates, "all a=[10.96.0.1] a-1=10.244.0.5,")
	f.watched(t, "services", "endpointslices")
	began := time.Now()
	for i := range 1000 {
		f.change("MODIFIED", apiSlice("a", fmt.Sprintf("10.244.%d.%d", i/250, i%250)))
	}
	f.change("ADDED", apiService("b", "10.96.0.2"))
	f.change("DELETED", apiService("a", "10.96.0.1"))
	f.change("MODIFIED", apiSlice("a", "10.244.9.9"))
	time.Sleep(500 * time.Millisecond) // all of it arrives
	arrived := time.Now()
	goOn <- struct{}{}
	u := nextServices(t, updates)
	goOn <- struct{}{}
	if got := summary(u); got != "b=[10.96.0.2] a-1=10.244.9.9, -a" {
		t.Errorf("got %q", got)
	}
	if len(u.Changes) != 1003 {
		t.Fatalf("%d changes have led to it, want 1003", len(u.Changes))
	}
	first := u.Changes[0].Noticed
	if late := arrived.Sub(first); first.Before(began) || late < 400*time.Millisecond {
		t.Errorf("the change that has waited longest was %v ago, which began %v ago", late, arrived.Sub(began))
	}
	noServices(t, updates, 100*time.Millisecond, "after everything")
}

// An API without ServiceCIDRs is as good as another, and is asked again for them.
func TestServiceCIDRsMayBeAbsent(t *testing.T) {
	f, srv := newFakeServices(t)
	f.refuse("list servicecidrs", http.StatusNotFound)
	f.refuse("watch servicecidrs", http.StatusNotFound)
	f.change("ADDED", apiCIDR("kubernetes", "10.96.0.0/16"))
	updates := servicesOf(t, srv)
	expectServices(t, updates, "all")
	noServices(t, updates, 500*time.Millisecond, "while there are none")
	f.refuse("watch servicecidrs", 0)
	f.refuse("list servicecidrs", 0)
	expectServices(t, updates, "all [10.96.0.0/16]")
	f.watched(t, "servicecidrs")
	f.change("MODIFIED", apiCIDR("kubernetes", "10.96.0.0/16", "10.98.0.0/16"))
	expectServices(t, updates, "[10.96.0.0/16 10.98.0.0/16]")
}

// A kind that can't be read is told with what is to be done about it, and holds up no other.
func TestServicesForbidden(t *testing.T) {
	f, srv := newFakeServices(t)
	f.change("ADDED", apiService("a", "10.96.0.1"))
	f.change("ADDED", apiSlice("a", "10.244.0.5"))
	f.refuse("list servicecidrs", http.StatusForbidden)
	f.refuse("watch servicecidrs", http.StatusForbidden)
	f.refuse("watch endpointslices", http.StatusMethodNotAllowed)
	updates := servicesOf(t, srv)
	seen := map[string]bool{}
	for !seen["list ServiceCIDRs"] || !seen["watch EndpointSlices"] || !seen["all"] {
		u := nextServices(t, updates)
		if u.Err == nil {
			seen["all"] = seen["all"] || summary(u) == "all a=[10.96.0.1] a-1=10.244.0.5,"
			continue
		}
		text := u.Err.Error()
		seen["list ServiceCIDRs"] = strings.Contains(text, "list ServiceCIDRs from "+srv.URL+": agent cannot list servicecidrs; the agent's ClusterRole has to allow list and watch of servicecidrs")
		seen["watch EndpointSlices"] = strings.Contains(text, "watch EndpointSlices from "+srv.URL+": agent cannot watch endpointslices; the API server does not serve watch of endpointslices")
	}
	f.watched(t, "services")
	f.change("ADDED", apiService("b", "10.96.0.2"))
	for u := (service.Update{}); !strings.Contains(summary(u), "b=[10.96.0.2]"); {
		if u = nextServices(t, updates); u.Err == nil && !u.Faulty {
			t.Errorf("a change says that all can be read: %+v", u)
		}
	}
	for range 3 { // lists of what can't be watched bring no news
		select {
		case u := <-updates:
			if u.Err == nil || len(u.Services)+len(u.Slices) > 0 {
				t.Errorf("told again: %+v", u)
			}
		case <-time.After(300 * time.Millisecond):
		}
	}
	f.refuse("list servicecidrs", 0)
	f.refuse("watch servicecidrs", 0)
	f.refuse("watch endpointslices", 0)
	for u := nextServices(t, updates); u.Err != nil || u.Faulty; u = nextServices(t, updates) {
	}
}

// What fails for one reason is one text, however many kinds it concerns.
func TestServicesUnreachable(t *testing.T) {
	f, srv := newFakeServices(t)
	for resource := range kindsOf {
		f.refuse("list "+resource, http.StatusServiceUnavailable)
	}
	f.change("ADDED", apiService("a", "10.96.0.1"))
	updates := servicesOf(t, srv)
	last := ""
	for text := "Services, EndpointSlices, ServiceCIDRs"; !strings.Contains(last, text); {
		u := nextServices(t, updates)
		if u.Err == nil {
			t.Fatalf("told %+v", u)
		}
		last = u.Err.Error()
	}
	for resource := range kindsOf {
		f.refuse("list "+resource, 0)
	}
	for {
		u := nextServices(t, updates)
		if u.Err != nil {
			continue
		}
		if summary(u) != "all a=[10.96.0.1]" {
			t.Errorf("then %q", summary(u))
		}
		break
	}
}

func TestJoined(t *testing.T) {
	refused, other := errors.New("refused"), errors.New("other")
	fault := func(resource string, err error) error { return &failure{verbList, resource, "api", err} }
	for _, c := range []struct {
		faults []error
		want   string
	}{
		{[]error{nil, nil, nil}, ""},
		{[]error{other, nil}, "other"},
		{[]error{fault("As", refused), nil, fault("Bs", errors.New("refused"))}, "list As, Bs from api: refused"},
		{[]error{fault("As", refused), fault("Bs", other), other}, "other; list As from api: refused; list Bs from api: other"},
	} {
		got := ""
		if err := joined(c.faults); err != nil {
			got = err.Error()
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("-want +got: %s", diff)
		}
	}
}

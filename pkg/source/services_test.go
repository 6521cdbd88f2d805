package source

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// fakeServices answers lists and watches of what belongs to Services in JSON, as an API server would.
type fakeServices struct {
	mu      sync.Mutex
	version int
	objects map[string]map[string]metav1.Object // by resource and name
	watches map[string]map[chan []byte]bool
	refused map[string]int // statuses, by "verb resource"
	streams bool           // lists in a watch, as newer API servers do
	listed  int            // lists that were no streams
}

// kindsOf are the apiVersions and kinds of the resources.
var kindsOf = map[string][2]string{
	"services":       {"v1", "Service"},
	"endpointslices": {"discovery.k8s.io/v1", "EndpointSlice"},
	"servicecidrs":   {"networking.k8s.io/v1", "ServiceCIDR"},
}

func newFakeServices(t *testing.T) (*fakeServices, *httptest.Server) {
	t.Helper()
	f := &fakeServices{
		version: 1, objects: map[string]map[string]metav1.Object{}, watches: map[string]map[chan []byte]bool{},
		refused: map[string]int{},
	}
	for resource := range kindsOf {
		f.objects[resource], f.watches[resource] = map[string]metav1.Object{}, map[chan []byte]bool{}
	}
	srv := httptest.NewServer(f)
	t.Cleanup(func() {
		srv.CloseClientConnections()
		srv.Close()
	})
	return f, srv
}

func (f *fakeServices) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource, verb, q := path.Base(r.URL.Path), verbList, r.URL.Query()
	if q.Get("watch") != "" {
		verb = verbWatch
	}
	want := "!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name"
	if resource == "servicecidrs" {
		want = ""
	}
	f.mu.Lock()
	status := f.refused[verb+" "+resource]
	switch {
	case q.Get("labelSelector") != want:
		f.mu.Unlock()
		http.Error(w, "asked for "+q.Get("labelSelector"), http.StatusBadRequest)
	case status != 0:
		f.mu.Unlock()
		if status == http.StatusServiceUnavailable {
			refuse(w, status, "down")
			return
		}
		refuse(w, status, fmt.Sprintf("agent cannot %s %s", verb, resource))
	case q.Get("sendInitialEvents") != "" && !f.streams:
		f.mu.Unlock()
		refuse(w, http.StatusUnprocessableEntity, "no lists in a watch")
	case verb == verbWatch:
		f.watch(w, r, f.watches[resource], f.initial(resource, q.Get("sendInitialEvents") != "")) // unlocks
	default:
		f.listed++
		list := map[string]any{"apiVersion": kindsOf[resource][0], "kind": kindsOf[resource][1] + "List", "metadata": map[string]string{"resourceVersion": fmt.Sprint(f.version)}}
		items := []metav1.Object{}
		for _, o := range f.objects[resource] {
			items = append(items, o)
		}
		list["items"] = items
		content, _ := json.Marshal(list)
		f.mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(content)
	}
}

func refuse(w http.ResponseWriter, code int, message string) {
	reason := map[int]metav1.StatusReason{403: metav1.StatusReasonForbidden, 404: metav1.StatusReasonNotFound, 405: metav1.StatusReasonMethodNotAllowed, 422: metav1.StatusReasonInvalid}[code]
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Reason: reason, Message: message, Code: int32(code),
	})
}

// initial are the events with which a watch begins: all objects, and a mark of their end, if they are asked for.
func (f *fakeServices) initial(resource string, asked bool) (events [][]byte) {
	if !asked {
		return nil
	}
	for _, o := range f.objects[resource] {
		events = append(events, eventOf("ADDED", o))
	}
	return append(events, eventOf("BOOKMARK", map[string]any{
		"apiVersion": kindsOf[resource][0], "kind": kindsOf[resource][1],
		"metadata": map[string]any{"resourceVersion": fmt.Sprint(f.version), "annotations": map[string]string{metav1.InitialEventsAnnotationKey: "true"}},
	}))
}

func eventOf(kind string, o any) []byte {
	content, _ := json.Marshal(map[string]any{"type": kind, "object": o})
	return append(content, '\n')
}

func (f *fakeServices) watch(w http.ResponseWriter, r *http.Request, watches map[chan []byte]bool, initial [][]byte) {
	events := make(chan []byte, 2000)
	watches[events] = true
	for _, e := range initial {
		events <- e
	}
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		delete(watches, events)
		f.mu.Unlock()
	}()
	w.Header().Set("Content-Type", "application/json")
	w.(http.Flusher).Flush()
	for {
		select {
		case <-r.Context().Done():
			return
		case e, open := <-events:
			if !open {
				return
			}
			_, _ = w.Write(e)
			w.(http.Flusher).Flush()
		}
	}
}

// change applies an event and tells every watcher.
func (f *fakeServices) change(event string, o metav1.Object) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	o.SetResourceVersion(fmt.Sprint(f.version))
	resource := ""
	switch o := o.(type) {
	case *corev1.Service:
		resource, o.TypeMeta = "services", typeOf("services")
	case *discoveryv1.EndpointSlice:
		resource, o.TypeMeta = "endpointslices", typeOf("endpointslices")
	case *networkingv1.ServiceCIDR:
		resource, o.TypeMeta = "servicecidrs", typeOf("servicecidrs")
	}
	name := o.GetNamespace() + "/" + o.GetName()
	f.objects[resource][name] = o
	if event == "DELETED" {
		delete(f.objects[resource], name)
	}
	content := eventOf(event, o)
	for w := range f.watches[resource] {
		w <- content
	}
}

func typeOf(resource string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: kindsOf[resource][0], Kind: kindsOf[resource][1]}
}

// refuse has requests "verb resource" answered with an error; 0: no longer.
func (f *fakeServices) refuse(what string, status int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refused[what] = status
}

// forget ends the watches of a resource, the next one of which is told that its version is too old.
func (f *fakeServices) forget(resource string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	gone := eventOf("ERROR", metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Reason: metav1.StatusReasonExpired, Code: http.StatusGone,
	})
	for w := range f.watches[resource] {
		w <- gone
		close(w)
		delete(f.watches[resource], w)
	}
}

// watched waits until the resources are watched, since an event before is lost.
func (f *fakeServices) watched(t *testing.T, resources ...string) {
	t.Helper()
	for _, resource := range resources {
		waitFor(t, "watch of "+resource, func() bool {
			f.mu.Lock()
			defer f.mu.Unlock()
			return len(f.watches[resource]) > 0
		})
	}
}

func waitFor(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !done(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not seen: %s", what)
		}
	}
}

func apiService(name, clusterIP string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, Annotations: map[string]string{"heavy": "annotation"}},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: clusterIP, ClusterIPs: []string{clusterIP}, Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: 80}}},
	}
}

func apiSlice(of string, addresses ...string) *discoveryv1.EndpointSlice {
	port, protocol := int32(8080), corev1.ProtocolTCP
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: of + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: of}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Port: &port, Protocol: &protocol}},
	}
	for _, a := range addresses {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	return s
}

func apiCIDR(name string, ranges ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: ranges}}
}

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
	if u := nextServices(t, updates); summary(u) != want || u.Changed.IsZero() {
		t.Fatalf("got %q at %v, error %v, want %q", summary(u), u.Changed, u.Err, want)
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
	if late := arrived.Sub(u.Changed); u.Changed.Before(began) || late < 400*time.Millisecond {
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
	for !strings.Contains(summary(nextServices(t, updates)), "b=[10.96.0.2]") {
	}
	if u := nextServices(t, updates); u.Err == nil {
		t.Errorf("after the change it is not told that something can't be read: %+v", u)
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
	for u := nextServices(t, updates); u.Err != nil; u = nextServices(t, updates) {
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

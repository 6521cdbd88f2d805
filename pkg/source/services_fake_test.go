package source

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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

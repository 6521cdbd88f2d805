package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// serviceServer is an API server of Services that can be away.
type serviceServer struct {
	at       string
	listener *httptest.Server

	mu      sync.Mutex
	version string
	lists   map[string]any // by resource
}

// ServeHTTP implements http.Handler. A watch brings nothing, and none goes on from another version.
func (s *serviceServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	version, list := s.version, s.lists[path.Base(r.URL.Path)]
	s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	switch q := r.URL.Query(); {
	case q.Get("sendInitialEvents") != "":
		refuseRequest(w, metav1.StatusReasonInvalid, http.StatusUnprocessableEntity)
	case q.Get("watch") == "":
		_ = json.NewEncoder(w).Encode(list)
	case q.Get("resourceVersion") != version:
		refuseRequest(w, metav1.StatusReasonExpired, http.StatusGone)
	default:
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}
}

func refuseRequest(w http.ResponseWriter, reason metav1.StatusReason, code int32) {
	w.WriteHeader(int(code))
	_ = json.NewEncoder(w).Encode(metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Reason: reason, Code: code,
	})
}

// come listens, where it did before if it has.
func (s *serviceServer) come(t *testing.T) {
	t.Helper()
	type listening struct {
		l   net.Listener
		err error
	}
	done := make(chan listening)
	go func() { // outside the test's namespace, as clients are
		l, err := net.Listen("tcp", s.at)
		done <- listening{l, err}
	}()
	got := <-done
	must(t, got.err)
	s.at, s.listener = got.l.Addr().String(), httptest.NewUnstartedServer(s)
	_ = s.listener.Listener.Close()
	s.listener.Listener = got.l
	s.listener.Start()
}

func (s *serviceServer) leave() {
	_ = s.listener.Listener.Close()
	s.listener.CloseClientConnections()
	s.listener.Close()
}

// hold has the lists contain these endpoints, by the addresses of Services.
func (s *serviceServer) hold(version string, endpoints map[string][]string) {
	meta := metav1.ListMeta{ResourceVersion: version}
	all, endpointSlices := corev1.ServiceList{ListMeta: meta}, discoveryv1.EndpointSliceList{ListMeta: meta}
	all.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "ServiceList"}
	endpointSlices.TypeMeta = metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSliceList"}
	for address, of := range endpoints {
		object := metav1.ObjectMeta{Namespace: "shop", Name: "at-" + address, ResourceVersion: version}
		all.Items = append(all.Items, corev1.Service{ObjectMeta: object, Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: address, ClusterIPs: []string{address}, Ports: []corev1.ServicePort{{Port: 80}},
		}})
		object.Labels = map[string]string{discoveryv1.LabelServiceName: object.Name}
		slice := discoveryv1.EndpointSlice{ObjectMeta: object, AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Port: new(int32(8080))}}}
		for _, a := range of {
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
		}
		endpointSlices.Items = append(endpointSlices.Items, slice)
	}
	ranges := networkingv1.ServiceCIDRList{TypeMeta: metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "ServiceCIDRList"}, ListMeta: meta}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version = version
	s.lists = map[string]any{"services": all, "endpointslices": endpointSlices, "servicecidrs": ranges}
}

// awayServices is how many Services there are at each moment.
const awayServices = 300

// endpointsAt are those of one moment, by the addresses of Services: no two moments share any, and a tenth of the Services is of one
// moment alone.
func endpointsAt(moment int) map[string][]string {
	all := map[string][]string{}
	for i := range awayServices {
		address := fmt.Sprintf("10.96.%d.%d", i/100, 1+i%100)
		if i%10 == 0 {
			address = fmt.Sprintf("10.97.%d.%d", moment, 1+i/10)
		}
		for j := range 1 + (i+moment)%5 {
			all[address] = append(all[address], fmt.Sprintf("10.244.%d.%d", 10*moment+j, 1+i%250))
		}
	}
	return all
}

// assertFollows waits until the maps are as the API server says at a moment.
func assertFollows(t *testing.T, l *loop, moment int, limit time.Duration) {
	t.Helper()
	want := map[string][]string{}
	for address, of := range endpointsAt(moment) {
		for _, a := range of {
			want[address] = append(want[address], a+":8080")
		}
		slices.Sort(want[address])
	}
	for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		diff := cmp.Diff(want, allFound(t, l))
		if diff == "" {
			return
		}
		if time.Since(began) > priv.Patience(limit) {
			t.Fatalf("moment %d, after %v (-want +found):\n%.2000s", moment, limit, diff)
		}
	}
}

// An API server that was away while all endpoints moved, Services went and others came: a second after it is back the maps are
// as it says, however long it was away.
func TestServicesMoveWhileTheAPIServerIsAway(t *testing.T) {
	l := testServices(t)
	l.services.place(here())
	server := &serviceServer{at: "127.0.0.1:0"}
	server.hold("1", endpointsAt(1))
	server.come(t)
	defer func() { server.leave() }()
	stop := followServer(t, l, server)
	defer stop()
	assertFollows(t, l, 1, 20*time.Second)
	// A watch that has lasted is resumed, by a server that does not know its version; another one begins with a list.
	for i, c := range []struct{ stays, away time.Duration }{{0, 2500 * time.Millisecond}, {1200 * time.Millisecond, 200 * time.Millisecond}} {
		moment := 2 + i
		time.Sleep(c.stays)
		server.leave()
		time.Sleep(c.away)
		if found := allFound(t, l); len(found) != awayServices {
			t.Errorf("while the API server is away %d Services are served", len(found))
		}
		server.hold(fmt.Sprint(moment), endpointsAt(moment))
		server.come(t)
		assertFollows(t, l, moment, time.Second)
	}
}

// followServer runs what reads an API server and what writes the maps, until stop is called.
func followServer(t *testing.T, l *loop, server *serviceServer) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = l.services.run(ctx) })
	running.Go(func() {
		follow := source.Services{Config: &rest.Config{Host: "http://" + server.at}, Log: l.log}
		_ = follow.Run(ctx, l.services.deliver(ctx))
	})
	return func() {
		cancel()
		running.Wait()
	}
}

// allFound is where all frontends on port 80 lead to, by address, while somebody may be writing.
func allFound(t *testing.T, l *loop) map[string][]string {
	t.Helper()
	content, err := l.dp.Maps.Services.Content()
	must(t, err)
	found := map[string][]string{}
	for k, v := range content {
		if k.Port != wire.PortFrom(80) {
			continue
		}
		address := k.Address.String()
		for _, b := range members(t, l, v.Set) {
			found[address] = append(found[address], b.Address.With(b.Port))
		}
		slices.Sort(found[address])
	}
	return found
}

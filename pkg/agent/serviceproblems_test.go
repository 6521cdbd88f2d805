package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"github.com/ebpf-cni/ebpf-cni/pkg/service"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
)

// eventServer is an API server with one Service, that takes each Event once.
type eventServer struct {
	t      *testing.T
	events map[string]corev1.Event
	posts  int
}

func (s *eventServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", runtime.ContentTypeJSON)
	switch r.Method + " " + r.URL.Path {
	case "GET /api/v1/namespaces/shop/services":
		list := corev1.ServiceList{TypeMeta: metav1.TypeMeta{Kind: "ServiceList", APIVersion: "v1"}}
		if r.URL.Query().Get("fieldSelector") == "metadata.name=web" {
			list.Items = []corev1.Service{{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "1-2-3"}}}
		}
		_ = json.NewEncoder(w).Encode(list)
	case "POST /api/v1/namespaces/shop/events":
		s.posts++
		var e corev1.Event
		if err := json.NewDecoder(r.Body).Decode(&e); err != nil {
			s.t.Errorf("an Event that can't be read: %v", err)
		}
		if _, there := s.events[e.Name]; there {
			w.WriteHeader(http.StatusConflict)
			_, _ = w.Write([]byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"AlreadyExists","code":409}`))
			return
		}
		s.events[e.Name] = e
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(e)
	default:
		s.t.Errorf("%s %s", r.Method, r.URL)
	}
}

func TestEventsAboutServices(t *testing.T) {
	s := &eventServer{t: t, events: map[string]corev1.Event{}}
	srv := httptest.NewServer(s)
	t.Cleanup(srv.Close)
	client, err := source.NewClient(jsonOnly(&rest.Config{Host: srv.URL, QPS: -1}))
	must(t, err)
	e := newServiceEvents(&node{cfg: Config{Node: "n1"}})
	web := service.Problem{Service: service.Name{Namespace: "shop", Name: "web"}, Reason: service.Taken, Text: strings.Repeat("long ", 1000)}
	must(t, e.write(t.Context(), client, web, time.Unix(1000, 0)))
	must(t, e.write(t.Context(), client, web, time.Unix(2000, 0))) // as another node does
	gone := web
	gone.Service.Name = "gone"
	must(t, e.write(t.Context(), client, gone, time.Unix(1000, 0)))
	if len(s.events) != 1 || s.posts != 2 {
		t.Fatalf("%d Events after %d attempts", len(s.events), s.posts)
	}
	for name, event := range s.events {
		of := event.InvolvedObject
		if !strings.HasPrefix(name, "web.") || of.Kind != "Service" || of.Name != "web" || of.UID != "1-2-3" || event.Type != "Warning" ||
			event.Reason != "Taken" || len(event.Message) > 1024 || event.Source.Host != "n1" {
			t.Errorf("%+v", event)
		}
	}
}

// What names a node is told in one Event for all of them.
func TestEventOfAllNodes(t *testing.T) {
	s := &eventServer{t: t, events: map[string]corev1.Event{}}
	srv := httptest.NewServer(s)
	t.Cleanup(srv.Close)
	client, err := source.NewClient(jsonOnly(&rest.Config{Host: srv.URL, QPS: -1}))
	must(t, err)
	for _, name := range []string{"n1", "n2"} {
		n := &node{cfg: Config{Node: name}, status: newStatus(slog.New(slog.DiscardHandler))}
		h := newHealthChecks(n)
		h.checks[service.Name{Namespace: "shop", Name: "web"}] = &healthCheck{port: 32000, err: unix.EADDRINUSE}
		for _, p := range h.problems() {
			if !strings.Contains(p.Text, name) {
				t.Errorf("%s logs %q", name, p.Text)
			}
			must(t, newServiceEvents(n).write(t.Context(), client, p, time.Unix(1000, 0)))
		}
	}
	if len(s.events) != 1 || s.posts != 2 {
		t.Errorf("%d Events after %d attempts", len(s.events), s.posts)
	}
}

// All nodes meet a problem at the same moment, and say so one after the other.
func TestEventsAreNotWrittenAtOnce(t *testing.T) {
	for _, c := range []struct {
		pause time.Duration
		nodes int
		want  bool
	}{{time.Hour, 1, false}, {time.Millisecond, 1, true}, {time.Millisecond, 1_000_000, false}} {
		asked := make(chan bool, 10)
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			asked <- true
			w.WriteHeader(http.StatusForbidden)
		}))
		quiet := slog.New(slog.DiscardHandler)
		e := newServiceEvents(&node{cfg: Config{API: &rest.Config{Host: srv.URL}}, log: quiet, complaints: newComplaints(quiet), status: newStatus(quiet)})
		e.pause = c.pause
		e.status.set(func(f *figures) { f.nodes = c.nodes })
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- e.run(ctx) }()
		e.put(service.Problem{Service: service.Name{Namespace: "shop", Name: "web"}})
		got := false
		select {
		case got = <-asked:
		case <-time.After(500 * time.Millisecond):
		}
		if got != c.want {
			t.Errorf("with a pause of %v and %d nodes the API was asked soon: %v", c.pause, c.nodes, got)
		}
		time.Sleep(100 * time.Millisecond)
		if d := e.complaints.degraded(); len(d) > 0 { // no later Event may come to end that
			t.Errorf("degraded: %v", d)
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("ended with %v", err)
		}
		srv.Close()
	}
}

// A problem that comes and goes is written once while its Event stands.
func TestEventsAreNotRepeated(t *testing.T) {
	s := &eventServer{t: t, events: map[string]corev1.Event{}}
	srv := httptest.NewServer(s)
	t.Cleanup(srv.Close)
	client, err := source.NewClient(jsonOnly(&rest.Config{Host: srv.URL, QPS: -1}))
	must(t, err)
	log := slog.New(slog.DiscardHandler)
	e := newServiceEvents(&node{cfg: Config{Node: "n1"}, log: log, status: newStatus(log)})
	e.pause = time.Millisecond
	web := service.Problem{Service: service.Name{Namespace: "shop", Name: "web"}, Reason: service.Full}
	if e.stands(web, time.Now()) {
		t.Error("it stands before it was written")
	}
	must(t, e.writeLater(t.Context(), client, web))
	if !e.stands(web, time.Now()) {
		t.Error("it is written again though it stands")
	}
	if e.stands(web, time.Now().Add(eventLife+time.Second)) || len(e.written) > 0 {
		t.Error("it is remembered when the API has forgotten it")
	}
}

// However fast a problem comes and goes, and of however many Services, the log stays readable.
func TestProblemsThatComeAndGo(t *testing.T) {
	l := testServices(t)
	var said bytes.Buffer
	l.log = slog.New(newQuiet(slog.NewTextHandler(&said, nil)))
	for i := range 1000 {
		name := service.Name{Namespace: "shop", Name: fmt.Sprint("web-", i)}
		l.services.reportProblems([]service.Problem{{Service: name, Reason: service.Full, Text: "no room"}})
	}
	l.services.reportProblems(nil)
	if n := strings.Count(said.String(), "a Service"); n != 2*mostLines {
		t.Errorf("%d lines:\n%s", n, said.String())
	}
}

// Without an API, and when too many wait, a problem is only logged.
func TestEventsThatNobodyTakes(t *testing.T) {
	for _, api := range []*rest.Config{nil, {}} {
		e := newServiceEvents(&node{cfg: Config{API: api}})
		for range 2 * mostEvents {
			e.put(service.Problem{})
		}
		if waiting := len(e.waiting); waiting > mostEvents || api == nil && waiting > 0 {
			t.Errorf("%d wait", waiting)
		}
	}
}

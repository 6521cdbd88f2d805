package source

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// fakeAPI answers lists and watches of Nodes in JSON, as an API server would.
type fakeAPI struct {
	mu      sync.Mutex
	nodes   map[string]corev1.Node
	version int
	lists   int // that were sent
	broken  bool
	events  map[chan []byte]bool
}

func newFakeAPI(t *testing.T) (*fakeAPI, *httptest.Server) {
	t.Helper()
	f := &fakeAPI{nodes: map[string]corev1.Node{}, events: map[chan []byte]bool{}, version: 1}
	srv := httptest.NewServer(f)
	t.Cleanup(func() {
		srv.CloseClientConnections()
		srv.Close()
	})
	return f, srv
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	f.mu.Lock()
	switch {
	case f.broken:
		f.mu.Unlock()
		http.Error(w, "down", http.StatusServiceUnavailable)
	case q.Get("sendInitialEvents") != "":
		f.mu.Unlock()
		http.Error(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422}`, http.StatusUnprocessableEntity)
	case q.Get("watch") != "":
		f.watch(w, r) // unlocks
	default:
		f.lists++
		list := corev1.NodeList{TypeMeta: metav1.TypeMeta{Kind: "NodeList", APIVersion: "v1"}}
		list.ResourceVersion = fmt.Sprint(f.version)
		for _, n := range f.nodes {
			list.Items = append(list.Items, n)
		}
		f.mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(list)
	}
}

func (f *fakeAPI) watch(w http.ResponseWriter, r *http.Request) {
	events := make(chan []byte, 100)
	f.events[events] = true
	since, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	for _, n := range f.nodes { // what has changed since then; whoever follows misses nothing in between
		if version, _ := strconv.Atoi(n.ResourceVersion); since > 0 && version > since {
			object, _ := json.Marshal(n)
			events <- []byte(`{"type":"MODIFIED","object":` + string(object) + "}\n")
		}
	}
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		delete(f.events, events)
		f.mu.Unlock()
	}()
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
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

// change applies one event and tells every watcher.
func (f *fakeAPI) change(kind string, n corev1.Node) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	n.TypeMeta = metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}
	n.ResourceVersion = fmt.Sprint(f.version)
	if kind == "DELETED" {
		delete(f.nodes, n.Name)
	} else {
		f.nodes[n.Name] = n
	}
	object, _ := json.Marshal(n)
	event := []byte(`{"type":"` + kind + `","object":` + string(object) + "}\n")
	for w := range f.events {
		w <- event
	}
}

func (f *fakeAPI) listed() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lists
}

func (f *fakeAPI) setBroken(broken bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.broken = broken
	if broken {
		for w := range f.events {
			close(w)
			delete(f.events, w)
		}
	}
}

func apiNode(name, podCIDR string) corev1.Node {
	var n corev1.Node
	n.Name = name
	n.Labels = map[string]string{"heavy": "label"}
	n.Spec.PodCIDR = podCIDR
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "172.18.0.1"}}
	n.Status.Images = []corev1.ContainerImage{{Names: []string{"big"}}}
	return n
}

func follow(t *testing.T, srv *httptest.Server) <-chan Update {
	t.Helper()
	updates := make(chan Update, 100)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	api := API{Config: &rest.Config{Host: srv.URL}, Log: slog.New(slog.DiscardHandler), Self: "a"}
	go func() { done <- api.Run(ctx, func(u Update) { updates <- u }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Run ended with %v", err)
		}
	})
	return updates
}

// await skips updates until one passes.
func await(t *testing.T, updates <-chan Update, what string, pass func(Update) bool) Update {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		select {
		case u := <-updates:
			if pass(u) {
				return u
			}
		case <-deadline:
			t.Fatalf("no update: %s", what)
		}
	}
}

func TestAPIListsThenFollows(t *testing.T) {
	f, srv := newFakeAPI(t)
	f.change("ADDED", apiNode("b", "10.0.2.0/24"))
	f.change("ADDED", apiNode("a", "10.0.1.0/24"))
	updates := follow(t, srv)
	u := await(t, updates, "first list", func(u Update) bool { return u.Err == nil })
	if names(u.Nodes) != "a b" || u.Nodes[0].PodCIDRs[0] != "10.0.1.0/24" || u.Nodes[0].InternalIPs[0] != "172.18.0.1" {
		t.Fatalf("first list %+v", u.Nodes)
	}
	if !watching(f) {
		t.Fatal("no watch")
	}
	f.change("MODIFIED", apiNode("a", "10.0.9.0/24"))
	await(t, updates, "change", func(u Update) bool { return u.Err == nil && u.Nodes[0].PodCIDRs[0] == "10.0.9.0/24" })
	f.change("DELETED", apiNode("b", ""))
	await(t, updates, "deletion", func(u Update) bool { return names(u.Nodes) == "a" })
	heartbeat := apiNode("a", "10.0.9.0/24")
	heartbeat.Labels["heavy"] = "changed"
	f.change("MODIFIED", heartbeat)
	f.change("ADDED", apiNode("c", "10.0.3.0/24"))
	if u := next(t, updates); names(u.Nodes) != "a c" {
		t.Errorf("a heartbeat was delivered: %+v", u)
	}
	for _, name := range []string{"c", "a"} {
		leaves := apiNode(name, map[string]string{"a": "10.0.9.0/24", "c": "10.0.3.0/24"}[name])
		leaves.Spec.Taints = []corev1.Taint{{Key: leavingTaint}}
		f.change("MODIFIED", leaves)
	}
	if u := next(t, updates); !u.Nodes[0].Leaving || u.Nodes[1].Leaving {
		t.Errorf("two Nodes leave, one of them this node's, and what is delivered is %+v", u)
	}
}

// watching waits for the watch to stand, since an event before it is lost.
func watching(f *fakeAPI) bool {
	for range 500 {
		f.mu.Lock()
		n := len(f.events)
		f.mu.Unlock()
		if n > 0 {
			return true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return false
}

func TestAPIUnreachableAtStartAndLater(t *testing.T) {
	f, srv := newFakeAPI(t)
	f.change("ADDED", apiNode("a", "10.0.1.0/24"))
	f.setBroken(true)
	updates := follow(t, srv)
	if u := next(t, updates); u.Err == nil || u.Nodes != nil {
		t.Fatalf("with the API down: %+v", u)
	}
	f.setBroken(false)
	await(t, updates, "list after recovery", func(u Update) bool { return names(u.Nodes) == "a" })
	if !watching(f) {
		t.Fatal("no watch")
	}
	f.setBroken(true)
	u := await(t, updates, "error while down", func(u Update) bool { return true })
	if u.Err == nil {
		t.Fatalf("while down %+v was delivered", u.Nodes)
	}
	f.change("ADDED", apiNode("b", "10.0.2.0/24"))
	f.setBroken(false)
	await(t, updates, "missed change", func(u Update) bool { return names(u.Nodes) == "a b" })
}

// What this node's Node says of its network is told with every event; of others'
// nothing is.
func TestAPIObservesOwnCondition(t *testing.T) {
	f, srv := newFakeAPI(t)
	with := func(name string, status corev1.ConditionStatus) corev1.Node {
		n := apiNode(name, "10.0.1.0/24")
		n.Status.Conditions = []corev1.NodeCondition{
			{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady"},
			{Type: corev1.NodeNetworkUnavailable, Status: status, Reason: "NoRouteCreated", Message: "of a cloud"},
		}
		return n
	}
	f.change("ADDED", with("self", corev1.ConditionTrue))
	f.change("ADDED", with("other", corev1.ConditionUnknown))
	seen := make(chan *Condition, 100)
	api := API{
		Config: &rest.Config{Host: srv.URL}, Log: slog.New(slog.DiscardHandler),
		Self: "self", Observed: func(c *Condition) { seen <- c },
	}
	done := make(chan error, 1)
	ctx, cancel := context.WithCancel(context.Background())
	go func() { done <- api.Run(ctx, func(Update) {}) }()
	defer func() { cancel(); <-done }()
	expect := func(what string, want func(*Condition) bool) {
		t.Helper()
		deadline := time.After(20 * time.Second)
		for {
			select {
			case c := <-seen:
				if c != nil && c.Status == "Unknown" {
					t.Error("told of another Node's condition")
				}
				if want(c) {
					return
				}
			case <-deadline:
				t.Fatalf("not told: %s", what)
			}
		}
	}
	expect("list", func(c *Condition) bool {
		return c != nil && *c == Condition{Status: "True", Reason: "NoRouteCreated", Message: "of a cloud"}
	})
	if !watching(f) {
		t.Fatal("no watch")
	}
	f.change("MODIFIED", with("self", corev1.ConditionFalse))
	expect("change", func(c *Condition) bool { return c != nil && c.Status == "False" })
	f.change("MODIFIED", apiNode("self", "10.0.1.0/24"))
	expect("without a condition", func(c *Condition) bool { return c != nil && *c == Condition{} })
	f.change("DELETED", apiNode("self", ""))
	expect("deletion", func(c *Condition) bool { return c == nil })
}

func TestLoadConfig(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := LoadConfig(""); err != ErrNotInCluster {
		t.Errorf("outside a cluster: %v", err)
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	must(t, os.WriteFile(path, []byte("nonsense"), 0o600))
	if _, err := LoadConfig(path); err == nil {
		t.Error("nonsense was accepted")
	}
}

func TestUnreachableIsToldOnce(t *testing.T) {
	var told []Update
	r := (&store{deliver: func(u Update) { told = append(told, u) }}).reachOf(&rest.Config{Host: "https://api"})
	for _, timeout := range []string{"6m", "7m"} {
		r.noteError(verbList, &url.Error{Op: "Get", URL: "https://api/?timeout=" + timeout, Err: errors.New("connection refused")})
	}
	if len(told) != 1 || told[0].Err.Error() != "list Nodes from https://api: connection refused" {
		t.Errorf("told %+v", told)
	}
}

package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	nodeplan "github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
	nodesource "github.com/ebpf-cni/ebpf-cni/pkg/source"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
)

// read has the agent's own client read the Nodes of a server.
func read(t *testing.T, server *httptest.Server) <-chan nodesource.Update {
	t.Helper()
	updates := make(chan nodesource.Update, 100)
	config, err := nodesource.LoadConfig(kubeconfigOf(t, server))
	if err != nil {
		t.Fatal(err)
	}
	api := nodesource.API{Config: config, Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Self: "far-0", Observed: func(*nodesource.Condition) {}}
	untilTheEnd(t, func(ctx context.Context) error { return api.Run(ctx, func(u nodesource.Update) { updates <- u }) })
	return updates
}

// kubeconfigOf is a file that leads a client there.
func kubeconfigOf(t *testing.T, server *httptest.Server) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, []byte(kubeconfig(server.Listener.Addr().String())), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// untilTheEnd has a client follow a server for the length of the test.
func untilTheEnd(t *testing.T, follow func(context.Context) error) {
	t.Helper()
	ended := make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() { cancel(); <-ended })
	go func() {
		defer close(ended)
		_ = follow(ctx) // it ends by its context
	}()
}

// until waits for the Nodes that an agent has to learn of.
func until(t *testing.T, updates <-chan nodesource.Update, what string, arrived func([]nodeplan.Node) bool) {
	t.Helper()
	limit := time.After(20 * time.Second)
	for {
		select {
		case u := <-updates:
			if u.Err == nil && arrived(u.Nodes) {
				return
			}
		case <-limit:
			t.Fatalf("an agent never learns of %s", what)
		}
	}
}

// The agent's client reads what the server sends: whole Nodes, a change, and after a lost connection the changes since then, without all Nodes once more.
func TestAgentReadsTheServer(t *testing.T) {
	specs := modes.FarNodes(nil, 20, wire.IPv4)
	s, err := newAPIServer(specs)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	updates := read(t, server)
	until(t, updates, "all Nodes", func(nodes []nodeplan.Node) bool { return len(nodes) == len(specs) })
	change := func(podCIDR string) {
		t.Helper()
		specs[3].PodCIDRs = []netip.Prefix{netip.MustParsePrefix(podCIDR)}
		publish, err := s.stage(3, specs[3])
		if err != nil {
			t.Fatal(err)
		}
		for err = publish(); err != nil; err = publish() { // until it watches
			time.Sleep(time.Millisecond)
		}
		until(t, updates, podCIDR, func(nodes []nodeplan.Node) bool {
			return slices.ContainsFunc(nodes, func(n nodeplan.Node) bool {
				return n.Name == specs[3].Name && slices.Equal(n.PodCIDRs, []string{podCIDR})
			})
		})
	}
	change("10.9.1.0/24")
	server.CloseClientConnections()
	change("10.9.2.0/24")
	if size := len(s.nodes.objects[3].encoded); size < 10_000 || size > 30_000 {
		t.Errorf("a Node has %d bytes, and those of clusters in use have 10 to 30 KB", size)
	}
	if s.mu.Lock(); s.nodes.streams != 1 {
		t.Errorf("all Nodes were sent %d times", s.nodes.streams)
	}
	s.mu.Unlock()
}

// A kubelet renews a status, and an agent writes a condition, without anything else of the Node being changed.
func TestStatusIsRenewed(t *testing.T) {
	s, err := newAPIServer(modes.FarNodes(nil, 2, wire.IPv4))
	if err != nil {
		t.Fatal(err)
	}
	before := s.node(1).DeepCopy()
	request := httptest.NewRequest(http.MethodPatch, "/api/v1/nodes/far-1/status", strings.NewReader(
		`{"status": {"conditions": [{"type": "NetworkUnavailable", "status": "False"}, {"type": "Ready", "status": "Unknown"}]}}`))
	request.Header.Set("Accept", protobuf)
	answer := httptest.NewRecorder()
	s.ServeHTTP(answer, request)
	after := s.node(1)
	if answer.Code != 200 || len(after.Status.Conditions) != len(before.Status.Conditions)+1 || after.ResourceVersion == before.ResourceVersion ||
		len(after.Status.Images) == 0 || !reflect.DeepEqual(after.Status.Images, before.Status.Images) || after.Spec.PodCIDR != before.Spec.PodCIDR {
		t.Errorf("status %d: %+v", answer.Code, after.Status.Conditions)
	}
}

// A list has every object with its version, for clients that don't have it streamed.
func TestListOfTheServer(t *testing.T) {
	specs := modes.FarNodes(nil, 3, wire.IPv4)
	s, err := newAPIServer(specs)
	if err != nil {
		t.Fatal(err)
	}
	request := httptest.NewRequest(http.MethodGet, nodesPath, nil)
	request.Header.Set("Accept", protobuf)
	answer := httptest.NewRecorder()
	s.ServeHTTP(answer, request)
	var envelope runtime.Unknown
	var list corev1.NodeList
	raw, magic := bytes.CutPrefix(answer.Body.Bytes(), []byte("k8s\x00"))
	if err := errors.Join(envelope.Unmarshal(raw), list.Unmarshal(envelope.Raw)); err != nil || !magic || envelope.Kind != "NodeList" {
		t.Fatalf("kind %q, error %v", envelope.Kind, err)
	}
	if len(list.Items) != len(specs) || list.Items[2].Name != "far-2" || list.Items[2].ResourceVersion != list.ResourceVersion {
		t.Errorf("version %s of %d Nodes", list.ResourceVersion, len(list.Items))
	}
}

// The agent's client reads Services, their endpoints and their range from the server, and a change of one endpoint.
func TestAgentReadsServices(t *testing.T) {
	nodes := modes.FarNodes(nil, 4, wire.IPv4)
	all := manyServices(20, nodes)
	s, err := newAPIServer(nodes)
	if err != nil {
		t.Fatal(err)
	}
	slices, err := serveMany(s, all)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	model, updates := service.NewModel(), readServices(t, server)
	next := func(what string) service.Update {
		select {
		case u := <-updates:
			model.Apply(u)
			return u
		case <-time.After(20 * time.Second):
			t.Fatalf("an agent never learns of %s", what)
			return service.Update{}
		}
	}
	first := next("Services")
	if first.Err != nil || !first.Complete || len(first.Services) != len(all) || len(first.Slices) != len(all) || len(first.CIDRs) != 1 || first.CIDRs[0] != rangeOfMany {
		t.Fatalf("%d Services, %d EndpointSlices, ranges %v, complete %v, %v", len(first.Services), len(first.Slices), first.CIDRs, first.Complete, first.Err)
	}
	for _, slice := range first.Slices {
		addresses := map[netip.Addr]bool{}
		for _, e := range slice.Endpoints {
			addresses[e.Address] = e.Ready
		}
		if len(addresses) != endpointsEach {
			t.Errorf("%s has %d endpoints", slice.Name.Name, len(addresses))
		}
	}
	for _, o := range slices.objects {
		if size := len(o.encoded); size < 2000 || size > 4000 {
			t.Errorf("an EndpointSlice has %d bytes, and one of ten endpoints in a cluster in use has 2 to 4 KB", size)
		}
	}
	changed := all[7]
	changed.Endpoints = changed.Endpoints[1:]
	_, slice := objectsOf(changed)
	for err = s.publish(slices, 7, slice); err != nil; err = s.publish(slices, 7, slice) { // until it watches
		time.Sleep(time.Millisecond)
	}
	if u := next("a change"); len(u.Services) != 0 || len(u.Slices) != 1 || len(u.Slices[0].Endpoints) != endpointsEach-1 {
		t.Errorf("%d Services and %d EndpointSlices have changed, want one slice of %d endpoints", len(u.Services), len(u.Slices), endpointsEach-1)
	}
}

// readServices has the agent's own client read the Services of a server.
func readServices(t *testing.T, server *httptest.Server) <-chan service.Update {
	t.Helper()
	updates := make(chan service.Update, 100)
	config, err := nodesource.LoadConfig(kubeconfigOf(t, server))
	if err != nil {
		t.Fatal(err)
	}
	api := nodesource.Services{Config: config, Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	untilTheEnd(t, func(ctx context.Context) error { return api.Run(ctx, func(u service.Update) { updates <- u }) })
	return updates
}

package main

import (
	"context"
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

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	nodeplan "github.com/ebpf-cni/ebpf-cni/pkg/plan"
	nodesource "github.com/ebpf-cni/ebpf-cni/pkg/source"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
)

// read has the agent's own client read the Nodes of a server.
func read(t *testing.T, server *httptest.Server) <-chan nodesource.Update {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, []byte(kubeconfig(server.Listener.Addr().String())), 0o600); err != nil {
		t.Fatal(err)
	}
	config, err := nodesource.LoadConfig(file)
	if err != nil {
		t.Fatal(err)
	}
	updates, ended := make(chan nodesource.Update, 100), make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() { cancel(); <-ended })
	go func() {
		defer close(ended)
		api := nodesource.API{Config: config, Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Self: "far-0", Observed: func(*nodesource.Condition) {}}
		_ = api.Run(ctx, func(u nodesource.Update) { updates <- u }) // it ends by its context
	}()
	return updates
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
	if size := len(s.nodes[3].encoded); size < 10_000 || size > 30_000 {
		t.Errorf("a Node has %d bytes, and those of clusters in use have 10 to 30 KB", size)
	}
	if s.mu.Lock(); s.streams != 1 {
		t.Errorf("all Nodes were sent %d times", s.streams)
	}
	s.mu.Unlock()
}

// A kubelet renews a status, and an agent writes a condition, without anything else of the Node being changed.
func TestStatusIsRenewed(t *testing.T) {
	s, err := newAPIServer(modes.FarNodes(nil, 2, wire.IPv4))
	if err != nil {
		t.Fatal(err)
	}
	before := s.nodes[1].node.DeepCopy()
	request := httptest.NewRequest(http.MethodPatch, "/api/v1/nodes/far-1/status", strings.NewReader(
		`{"status": {"conditions": [{"type": "NetworkUnavailable", "status": "False"}, {"type": "Ready", "status": "Unknown"}]}}`))
	request.Header.Set("Accept", protobuf)
	answer := httptest.NewRecorder()
	s.ServeHTTP(answer, request)
	after := s.nodes[1].node
	if answer.Code != 200 || len(after.Status.Conditions) != len(before.Status.Conditions)+1 || after.ResourceVersion == before.ResourceVersion ||
		len(after.Status.Images) == 0 || !reflect.DeepEqual(after.Status.Images, before.Status.Images) || after.Spec.PodCIDR != before.Spec.PodCIDR {
		t.Errorf("status %d: %+v", answer.Code, after.Status.Conditions)
	}
}

package source

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

const (
	goodNode    = "{apiVersion: v1, kind: Node, metadata: {name: n1}}"
	goodService = `{apiVersion: v1, kind: Service, metadata: {name: a, namespace: ns}, spec: {clusterIP: 10.96.0.1, ports: [{port: 80, targetPort: http}]}}`
	goodSlice   = `{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: a-1, namespace: ns, labels: {kubernetes.io/service-name: a}}, addressType: IPv4, ports: [{port: 8080}], endpoints: [{addresses: [10.244.0.5], nodeName: n1}]}`
	goodCIDR    = `{apiVersion: networking.k8s.io/v1, kind: ServiceCIDR, metadata: {name: kubernetes}, spec: {cidrs: [10.96.0.0/16]}}`
)

// mixed is a List in YAML with these items.
func mixed(items ...string) string {
	return strings.Replace(listOf(items...), "NodeList", "List", 1)
}

func TestFileWithServices(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nodes.yaml")
	write(t, path, mixed(goodService, goodNode, goodSlice, goodCIDR))
	nodes, updates := make(chan Update, 100), make(chan service.Update, 100)
	services := NewFileServices()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 2)
	go func() {
		done <- File{Path: path, Log: slog.New(slog.DiscardHandler), Services: services}.Run(ctx, func(u Update) { nodes <- u })
	}()
	go func() { done <- services.Run(ctx, func(u service.Update) { updates <- u }) }()
	defer func() {
		cancel()
		for range 2 {
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Errorf("Run ended with %v", err)
			}
		}
	}()
	expect(t, nodes, "n1")
	expectServices(t, updates, "all a=[10.96.0.1] a-1=10.244.0.5, [10.96.0.0/16]")
	// The same once more, in another order, is nothing new.
	replace(t, path, mixed(goodSlice, goodNode, goodCIDR, goodService))
	noServices(t, updates, 200*time.Millisecond, "without a change")
	replace(t, path, mixed(goodNode, goodService, strings.Replace(goodSlice, "10.244.0.5", "10.244.0.6", 1)))
	expectServices(t, updates, "all a=[10.96.0.1] a-1=10.244.0.6,")
	// A broken file is told to both, and takes nothing back.
	replace(t, path, "nonsense")
	expectServices(t, updates, "error")
	if u := next(t, nodes); u.Err == nil {
		t.Errorf("of Nodes %+v is told", u)
	}
	replace(t, path, mixed(goodNode, goodService, strings.Replace(goodSlice, "10.244.0.5", "10.244.0.6", 1)))
	expectServices(t, updates, "") // it can be read again, and has not changed
	expect(t, nodes, "n1")
	replace(t, path, mixed(goodNode, goodService))
	expectServices(t, updates, "all a=[10.96.0.1]")
	// What concerns Services alone is nothing new about Nodes.
	replace(t, path, mixed(goodNode))
	expectServices(t, updates, "all")
	select {
	case u := <-nodes:
		t.Errorf("of Nodes is told %+v", u)
	default:
	}
}

func TestParseOthers(t *testing.T) {
	for _, c := range []struct {
		what, content string
		services      int
		malformed     string
		err           error
	}{
		{"all kinds", mixed(goodNode, goodService, goodSlice, goodCIDR), 1, "", nil},
		{"a Pod", mixed(goodNode, "{apiVersion: v1, kind: Pod, metadata: {name: a}}"), 0, "", ErrKind},
		{"another group's Service", mixed(goodNode, strings.Replace(goodService, "v1", "serving.knative.dev/v1", 1)), 0, "", ErrKind},
		{"an old EndpointSlice", mixed(goodNode, strings.Replace(goodSlice, "io/v1", "io/v1beta1", 1)), 0, "", ErrKind},
		{"no Node", mixed(goodService), 0, "", ErrEmpty},
		{"a Service among Nodes alone", listOf(goodNode, goodService), 0, "", ErrKind},
		{"no name", mixed(goodNode, strings.Replace(goodService, "name: a,", "", 1)), 0, "", ErrNameless},
		{"a wrong type", mixed(goodNode, goodSlice, strings.Replace(goodService, "port: 80", "port: eighty", 1)), 1, "cannot unmarshal", nil},
		{"a malformed address", mixed(goodNode, strings.Replace(goodService, "10.96.0.1", "10.96.0", 1)), 1, "no address", nil},
		{"headless", mixed(goodNode, strings.Replace(goodService, "10.96.0.1", "None", 1)), 0, "", nil},
	} {
		t.Run(c.what, func(t *testing.T) {
			got, err := parse([]byte(c.content), true)
			if !errors.Is(err, c.err) || (err == nil) != (c.err == nil) || len(got.services) != c.services {
				t.Fatalf("%d Services, error %v", len(got.services), err)
			}
			for _, s := range got.services {
				if !strings.Contains(s.Malformed, c.malformed) || (s.Malformed == "") != (c.malformed == "") || s.Name != (service.Name{Namespace: "ns", Name: "a"}) {
					t.Errorf("read %+v", s)
				}
			}
			// Who has no use for Services reads the Nodes of the same files.
			nodes, err := Parse([]byte(c.content))
			if !errors.Is(err, c.err) || len(nodes) != len(got.nodes) {
				t.Errorf("%d Nodes, error %v", len(nodes), err)
			}
		})
	}
}

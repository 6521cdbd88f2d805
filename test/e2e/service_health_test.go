package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// What load balancers, and whoever knows kube-proxy, are answered: from everywhere, and while endpoints, the agent and the Node come and go.
// NodePorts do without the agent.
func TestServicesHealth(t *testing.T) {
	t.Parallel()
	s := startServed(t, lab.Options{Families: families})
	has, lacks := s.Nodes[0], s.Nodes[1]
	p := startProcess(t, has, has.Namespace)
	process := func(_ context.Context, _, to string) (net.Conn, error) {
		return p.Dial(unix.SOCK_STREAM, netip.MustParseAddrPort(to))
	}
	web := s.spec("web", s.near)
	web.ExternalLocal, web.HealthCheckPort, web.LoadBalancerIPs = true, healthCheckPort, balancer[:]
	s.set(t, web)
	loopback := [wire.Families]netip.Addr{wire.IPv4: netip.MustParseAddr("127.0.0.1"), wire.IPv6: netip.MustParseAddr("::1")}
	overEachFamily(t, s.Lab, func(t *testing.T, family wire.Family) {
		for who, dial := range map[string]dialer{"the world": from(s.Outside), "a pod": from(s.client.Namespace), "a process of the node": process} {
			assertChecked(t, who, dial, has.AddrOf(family), 1)
			assertChecked(t, who, dial, lacks.AddrOf(family), 0)
			if got := get(t, dial, has.AddrOf(family), 10256, "/healthz"); got.StatusCode != http.StatusOK {
				t.Errorf("%s: /healthz: %s", who, got.Status)
			}
		}
		assertChecked(t, "a process of the node", process, loopback[family], 1)
	})
	family := firstFamily(s.Lab)
	to := has.AddrOf(family)
	if got := get(t, process, loopback[wire.IPv4], 10249, "/proxyMode"); got.body != "ebpf" {
		t.Errorf("/proxyMode: %s, %q", got.Status, got.body)
	}
	if conn, err := from(s.Outside)(t.Context(), "tcp", netip.AddrPortFrom(to, 10249).String()); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("the world reaches the port of metrics: %v, %v", conn, err)
	}

	web.Endpoints[0].Terminating, web.Endpoints[1].Terminating = true, true // they serve, but no load balancer is to send anything new
	s.set(t, web)
	assertChecked(t, "the endpoint ends", process, to, 0)
	web.Endpoints[0].Terminating = false
	s.set(t, web)
	assertChecked(t, "it is back", process, to, 1)

	s.assertNodePortsOutlive(t, func() {
		if conn, err := process(t.Context(), "tcp", netip.AddrPortFrom(to, healthCheckPort).String()); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("without an agent: %v, %v", conn, err)
		}
	})
	eventually(t, changeLimit, "another agent answers", func() bool {
		conn, err := process(t.Context(), "tcp", netip.AddrPortFrom(to, healthCheckPort).String())
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	assertChecked(t, "another agent", process, to, 1)

	specs := s.NodeSpecs()
	specs[0].Leaving = true
	if err := s.WriteNodes(specs...); err != nil {
		t.Fatal(err)
	}
	eventually(t, changeLimit, "the Node leaves", func() bool {
		return get(t, process, to, 10256, "/healthz").StatusCode == http.StatusServiceUnavailable
	})
	if got := get(t, process, to, 10256, "/livez"); got.StatusCode != http.StatusOK {
		t.Errorf("/livez of a Node that leaves: %s", got.Status)
	}
	assertChecked(t, "the Node leaves", process, to, 1)
}

// healthCheckPort is the healthCheckNodePort of the Services of the stories.
const healthCheckPort = 32100

// dialer is how a client connects.
type dialer func(ctx context.Context, network, address string) (net.Conn, error)

func from(ns *lab.Namespace) dialer {
	return func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		err = ns.Do(func() (err error) {
			conn, err = new(net.Dialer).DialContext(ctx, network, address)
			return err
		})
		return conn, err
	}
}

type answered struct {
	*http.Response
	body string
}

func get(t *testing.T, dial dialer, from netip.Addr, port uint16, path string) answered {
	t.Helper()
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: dial}}
	response, err := client.Get(fmt.Sprintf("http://%s%s", netip.AddrPortFrom(from, port), path))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answered{response, string(body)}
}

// assertChecked asks as a load balancer does.
func assertChecked(t *testing.T, what string, dial dialer, node netip.Addr, endpoints int) {
	t.Helper()
	code := http.StatusOK
	if endpoints == 0 {
		code = http.StatusServiceUnavailable
	}
	got := get(t, dial, node, healthCheckPort, "/")
	var said struct {
		Service             struct{ Namespace, Name string }
		LocalEndpoints      int
		ServiceProxyHealthy bool
	}
	if err := json.Unmarshal([]byte(got.body), &said); err != nil {
		t.Fatalf("%s: %v in %q", what, err, got.body)
	}
	if got.StatusCode != code || got.Header.Get("X-Load-Balancing-Endpoint-Weight") != strconv.Itoa(endpoints) ||
		said.Service.Name != "web" || said.LocalEndpoints != endpoints || !said.ServiceProxyHealthy {
		t.Errorf("%s: %s answers %s, %+v, %v, want %d endpoints", what, node, got.Status, said, got.Header, endpoints)
	}
}

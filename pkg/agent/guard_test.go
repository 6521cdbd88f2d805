package agent

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/guard"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// apiServerSlice is the slice of the API server's Service.
func apiServerSlice(addresses ...string) service.Slice {
	s := service.Slice{
		Name: service.Name{Namespace: "default", Name: "kubernetes"}, Service: service.APIServer().Name, Ports: []service.SlicePort{{Name: "https", Port: 6443, Protocol: wire.TCP}},
	}
	for _, a := range addresses {
		s.Endpoints = append(s.Endpoints, service.Endpoint{Address: netip.MustParseAddr(a), Ready: true})
	}
	return s
}

func TestGuardedPorts(t *testing.T) {
	l := testServices(t)
	l.cfg.Listen, l.cfg.MetricsListen = "127.0.0.1:9999", ":9998"
	restartServices(t, l)
	c := l.services
	t.Cleanup(c.checks.end)
	guarded := func(when string, want ...guard.Port) {
		t.Helper()
		have, err := endpoint.ReadGuard(l.cfg.State)
		must(t, err)
		if diff := cmp.Diff(append(guard.Fixed(), want...), have, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	agents := []guard.Port{{Number: 9999, Owner: "the agent of ebpf-cni (--listen)"}, {Number: 9998, Owner: "the metrics of ebpf-cni (--metrics-listen)"}}
	check := guard.Port{Number: 32000, Owner: "the health checks of Service shop/web-1 (healthCheckNodePort)"}
	four := guard.Port{Address: netip.MustParseAddr("192.0.2.1"), Number: 6443, Owner: "the API server at 192.0.2.1:6443"}
	six := guard.Port{Address: netip.MustParseAddr("2001:db8::1"), Number: 6443, Owner: "the API server at [2001:db8::1]:6443"}
	u := checked(32000, "10.244.1.7")
	u.Slices = append(u.Slices, apiServerSlice("192.0.2.1", "192.0.2.2", "2001:db8::1"))
	c.accept(u)
	guarded("before it is known where this is")
	c.place(here("127.0.0.1", "192.0.2.1", "2001:db8::1"))
	guarded("the API server is here", append(agents, four, six, check)...)
	c.place(here("127.0.0.1", "192.0.2.1"))
	guarded("at one address", append(agents, four, check)...)
	must(t, os.Remove(filepath.Join(l.cfg.State, endpoint.GuardFile)))
	c.accept(checked(0, "10.244.1.7"))
	guarded("no health check, and the API server restarts", append(agents, four)...)
	must(t, os.Mkdir(filepath.Join(l.cfg.State, endpoint.GuardFile+".next"), 0o700))
	c.accept(checked(32000, "10.244.1.7"))
	if says := c.complaints.degraded()["services/guarded ports"]; !strings.Contains(says, "guarded-ports.json") {
		t.Errorf("degraded by %q", says)
	}
	must(t, os.Remove(filepath.Join(l.cfg.State, endpoint.GuardFile+".next")))
	c.again()
	guarded("it can be written", append(agents, four, check)...)
	restartServices(t, l)
	c = l.services
	t.Cleanup(c.checks.end)
	c.accept(checked(0, "10.244.1.7"))
	c.place(here("127.0.0.1", "192.0.2.1"))
	guarded("the agent restarts as well", append(agents, four)...)
	c.place(here("127.0.0.1"))
	guarded("the address is gone", agents...)
	c.place(here("127.0.0.1", "192.0.2.1"))
	guarded("the address is back", agents...)
}

// While an API server of this node restarts, no Service gets its port either.
func TestAPIServerThatRestartsIsNoServices(t *testing.T) {
	l := testServices(t)
	c := l.services
	t.Cleanup(c.checks.end)
	u := checked(0, "10.244.1.7")
	u.Services[0].ExternalIPs, u.Services[0].Ports[0].Port = []netip.Addr{netip.MustParseAddr("192.0.2.1")}, 6443
	server := apiServerSlice("192.0.2.1")
	u.Slices = append(u.Slices, server)
	taken := func(when string, want bool) {
		t.Helper()
		is := slices.ContainsFunc(c.read().problems, func(p service.Problem) bool {
			return p.Reason == service.Taken && strings.Contains(p.Text, "192.0.2.1:6443")
		})
		if is != want {
			t.Errorf("%s: taken %t, problems %v", when, is, c.read().problems)
		}
	}
	c.place(here("127.0.0.1", "192.0.2.1"))
	c.accept(u)
	taken("it answers", true)
	server.Endpoints = nil
	c.accept(service.Update{Slices: []service.Slice{server}})
	taken("it restarts", true)
	c.place(here("127.0.0.1"))
	taken("the address is another node's", false)
}

// The list is not looked at while nothing has changed that it is made of.
func TestGuardIsWrittenOnce(t *testing.T) {
	l := testServices(t)
	c := l.services
	t.Cleanup(c.checks.end)
	path := filepath.Join(l.cfg.State, endpoint.GuardFile)
	c.accept(checked(32000, "10.244.1.7"))
	c.place(here("127.0.0.1"))
	must(t, os.WriteFile(path, []byte("as it was"), 0o600))
	c.accept(checked(32000, "10.244.1.8"))
	c.again()
	if have, err := os.ReadFile(path); err != nil || string(have) != "as it was" {
		t.Errorf("%s, %v", have, err)
	}
	lists := func(when string) {
		t.Helper()
		if have, err := os.ReadFile(path); err != nil || !strings.Contains(string(have), "32001") {
			t.Errorf("%s: %s, %v", when, have, err)
		}
	}
	c.accept(checked(32001, "10.244.1.8"))
	lists("another port")
	must(t, os.Remove(path))
	c.again()
	lists("the file is gone")
}

// A host port that a pod has had since before is the pod's until it ends, and a problem of the node.
func TestGuardedHostPortOfBefore(t *testing.T) {
	l := testServices(t)
	must(t, endpoint.Write(l.cfg.State, endpoint.Endpoint{ID: endpoint.ID{ContainerID: "container", IfName: "eth0"}, HostIndex: 42, Pod: "shop/proxy"}))
	kubelet := openHostPort(t, l, "[::]:10250", wire.TCP, 42)
	openHostPort(t, l, "0.0.0.0:10250", wire.UDP, 42)
	api := openHostPort(t, l, "0.0.0.0:6443", wire.TCP, 42)
	openHostPort(t, l, "192.0.2.77:6443", wire.TCP, 42)
	l.accept(list(n1(), n2()))
	l.pass(t.Context())
	where := told(t, l)
	where.held = append(where.held, netip.MustParseAddr("192.0.2.1"))
	l.services.place(where)
	l.services.accept(service.Update{Complete: true, Slices: []service.Slice{apiServerSlice("192.0.2.1")}})
	problems := func() (all []string) {
		t.Helper()
		l.pass(t.Context())
		l.judge()
		for _, p := range l.networkProblems {
			if p.Reason == guardedHostPort {
				all = append(all, p.Text)
			}
		}
		return all
	}
	all := problems()
	if len(all) != 2 || !strings.Contains(all[0], "0.0.0.0:6443/tcp of pod shop/proxy takes the port of the API server") || !strings.Contains(all[1], "[::]:10250/tcp of pod shop/proxy takes the port of the kubelet") {
		t.Errorf("problems %q", all)
	}
	must(t, l.dp.Maps.HostPorts.Delete(kubelet))
	must(t, l.dp.Maps.HostPorts.Delete(api))
	if all := problems(); len(all) > 0 {
		t.Errorf("when the pod has gone: %q", all)
	}
}

// A Service whose healthCheckNodePort a pod had first is told so, until the pod has gone.
func TestHealthCheckPortIsAHostPort(t *testing.T) {
	l := testServices(t)
	t.Cleanup(l.services.checks.end)
	must(t, endpoint.Write(l.cfg.State, endpoint.Endpoint{ID: endpoint.ID{ContainerID: "container", IfName: "eth0"}, HostIndex: 42, Pod: "shop/proxy"}))
	l.accept(list(n1(), n2()))
	for _, host := range []string{"127.0.0.1:32000", "192.0.2.77:32000", "[::1]:32000"} { // where no load balancer asks
		k := openHostPort(t, l, host, wire.TCP, 42)
		l.pass(t.Context())
		if len(l.services.around) > 0 {
			l.services.place(told(t, l))
		}
		l.services.accept(checked(32000, "10.244.1.7"))
		if found := l.services.problems(); len(found) > 0 {
			t.Errorf("%s: problems %v", host, found)
		}
		must(t, l.dp.Maps.HostPorts.Delete(k))
	}
	for _, host := range []string{"0.0.0.0:32000", "[::]:32000", "172.18.0.11:32000"} {
		k := openHostPort(t, l, host, wire.TCP, 42)
		openHostPort(t, l, "0.0.0.0:32000", wire.UDP, 42)
		l.pass(t.Context())
		l.services.place(told(t, l))
		l.services.accept(checked(32000, "10.244.1.7"))
		found := l.services.problems()
		if len(found) != 1 || found[0].Reason != service.HealthCheck || !strings.Contains(found[0].Text, "32000: it is host port "+host+"/tcp of pod shop/proxy") {
			t.Errorf("%s: problems %v", host, found)
		}
		must(t, l.dp.Maps.HostPorts.Delete(k))
		l.pass(t.Context())
		l.services.place(told(t, l))
		if found := l.services.problems(); len(found) > 0 {
			t.Errorf("when it has gone: %v", found)
		}
	}
}

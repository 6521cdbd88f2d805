package agent

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/health"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// asked is what a health check is answered: a code, 0 where nobody listens, and how many endpoints there are.
type asked struct{ code, endpoints int }

// askHealth connects on the thread of the test, which is in the namespace where the listeners are.
func askHealth(t *testing.T, to string) asked {
	t.Helper()
	conn, err := net.DialTimeout("tcp", to, time.Second)
	if errors.Is(err, unix.ECONNREFUSED) {
		return asked{}
	}
	must(t, err)
	defer conn.Close()
	must(t, conn.SetDeadline(time.Now().Add(5*time.Second)))
	_, err = fmt.Fprintf(conn, "GET / HTTP/1.0\r\n\r\n")
	must(t, err)
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	must(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	must(t, err)
	var a struct{ LocalEndpoints int }
	must(t, json.Unmarshal(body, &a))
	return asked{response.StatusCode, a.LocalEndpoints}
}

func assertAsked(t *testing.T, what, to string, want asked) {
	t.Helper()
	if got := askHealth(t, to); got != want {
		t.Errorf("%s: %s answers %+v, want %+v", what, to, got, want)
	}
}

// checked is a Service whose load balancer asks on a port, with endpoints on this node.
func checked(port uint16, endpoints ...string) service.Update {
	s, slice := webService(1, endpoints...)
	s.ExternalLocal, s.HealthCheckPort = true, port
	for i := range slice.Endpoints {
		slice.Endpoints[i].Node = "n1"
	}
	return service.Update{Services: []service.Service{s}, Slices: []service.Slice{slice}, Complete: true}
}

func TestHealthChecksOfServices(t *testing.T) {
	l := testServices(t)
	c := l.services
	t.Cleanup(c.checks.end)
	c.accept(checked(32000, "10.244.1.7", "10.244.1.8"))
	assertAsked(t, "before it is known where this is", "127.0.0.1:32000", asked{})
	c.place(here("127.0.0.1", "172.18.0.11"))
	for _, at := range []string{"127.0.0.1:32000", "172.18.0.11:32000", "[::1]:32000"} {
		assertAsked(t, "two endpoints", at, asked{200, 2})
	}
	held := c.checks.checks[service.Name{Namespace: "shop", Name: "web-1"}].open[netip.IPv4Unspecified()]
	c.accept(checked(32000, "10.244.1.7"))
	assertAsked(t, "one of them goes", "127.0.0.1:32000", asked{200, 1})
	c.accept(checked(32000))
	assertAsked(t, "both are gone", "127.0.0.1:32000", asked{503, 0})
	c.accept(checked(32000, "10.244.1.9"))
	assertAsked(t, "another one comes", "127.0.0.1:32000", asked{200, 1})
	if now := c.checks.checks[service.Name{Namespace: "shop", Name: "web-1"}].open[netip.IPv4Unspecified()]; now != held {
		t.Error("the port was closed meanwhile")
	}
	c.status.set(func(f *figures) { f.inStep = time.Now().Add(-maxBehind) })
	assertAsked(t, "changes wait for too long", "127.0.0.1:32000", asked{503, 1})
	c.accept(checked(32001, "10.244.1.9"))
	assertAsked(t, "the former port", "127.0.0.1:32000", asked{})
	assertAsked(t, "another port", "127.0.0.1:32001", asked{200, 1})
	c.accept(checked(0, "10.244.1.9"))
	assertAsked(t, "no port any more", "127.0.0.1:32001", asked{})
	c.accept(checked(32001, "10.244.1.9"))
	c.accept(service.Update{Complete: true})
	assertAsked(t, "no Service any more", "127.0.0.1:32001", asked{})
	c.accept(checked(32001, "10.244.1.9"))
	c.checks.end()
	assertAsked(t, "the end", "127.0.0.1:32001", asked{})
}

// Health checks are answered where NodePorts are, and where --nodeport-addresses names the loopback addresses, on those.
func TestHealthChecksOnNodePortAddresses(t *testing.T) {
	l := testServices(t)
	l.cfg.NodePortAddresses = []netip.Prefix{netip.MustParsePrefix("127.0.0.1/32"), netip.MustParsePrefix("172.18.0.0/16")}
	restartServices(t, l)
	c := l.services
	t.Cleanup(c.checks.end)
	c.accept(checked(32000, "10.244.1.7"))
	for _, step := range []struct {
		held           []string
		loopback, node asked
	}{
		{[]string{"127.0.0.1", "192.0.2.1"}, asked{200, 1}, asked{}},
		{[]string{"127.0.0.1", "172.18.0.11"}, asked{200, 1}, asked{200, 1}},
		{[]string{"172.18.0.11", "172.18.0.99"}, asked{}, asked{200, 1}},
	} {
		c.place(here(step.held...))
		assertAsked(t, strings.Join(step.held, ","), "127.0.0.1:32000", step.loopback)
		assertAsked(t, strings.Join(step.held, ","), "172.18.0.11:32000", step.node)
		assertAsked(t, strings.Join(step.held, ","), "127.0.0.2:32000", asked{})
	}
	if found := c.read().problems; len(found) > 0 || time.Until(c.due()) > portRetry {
		t.Errorf("an address that is not there: %v, due in %s", found, time.Until(c.due()))
	}
}

// tryAgain has ports that could not be opened tried again with the next change.
func tryAgain(h *healthChecks) {
	for _, c := range h.checks {
		c.again = time.Time{}
	}
}

// A port that somebody else has is a problem of that Service alone, told once, and is taken when it is free.
func TestHealthCheckPortThatIsTaken(t *testing.T) {
	l := testServices(t)
	log := &syncedBuffer{}
	l.log = slog.New(slog.NewTextHandler(log, nil))
	c := l.services
	t.Cleanup(c.checks.end)
	other, err := net.Listen("tcp", "0.0.0.0:32000")
	must(t, err)
	defer other.Close()
	u := checked(32000, "10.244.1.7")
	s, slice := webService(2, "10.244.1.8")
	s.ExternalLocal, s.HealthCheckPort, slice.Endpoints[0].Node = true, 32002, "n1"
	u.Services, u.Slices = append(u.Services, s), append(u.Slices, slice)
	level := func(is netfilter.Level) { c.status.set(func(f *figures) { f.netfilter = is }) }
	level(netfilter.Translates)
	c.accept(u)
	c.place(here())
	if found := c.read().problems; len(found) > 0 || strings.Contains(log.String(), "WARN") {
		t.Errorf("beside kube-proxy, which answers: %v, logged %s", found, log)
	}
	_ = other.Close()
	tryAgain(c.checks)
	c.again()
	assertAsked(t, "kube-proxy may be back in a moment", "127.0.0.1:32000", asked{})
	if found := c.read().problems; len(found) > 0 || time.Until(c.due()) > portRetry {
		t.Errorf("meanwhile: %v, due in %s", found, time.Until(c.due()))
	}
	other, err = net.Listen("tcp", "0.0.0.0:32000")
	must(t, err)
	defer other.Close()
	level(netfilter.Nothing)
	for range 3 {
		tryAgain(c.checks)
		c.again()
	}
	const want = "node n1 can't answer its load balancer's health checks on healthCheckNodePort 32000: listen tcp 0.0.0.0:32000: bind: address already in use"
	if found := c.read().problems; len(found) != 1 || found[0] != (service.Problem{Service: u.Services[0].Name, Reason: service.HealthCheck, Text: want}) {
		t.Errorf("problems %v", found)
	}
	if said := log.String(); strings.Count(said, "level=WARN") != 1 || len(l.complaints.degraded()) > 0 {
		t.Errorf("degraded by %v, logged %s", l.complaints.degraded(), said)
	}
	if due := time.Until(c.due()); due > portRetry {
		t.Errorf("tried again in %s", due)
	}
	assertFound(t, l, "10.96.0.1", "10.244.1.7:8080")
	assertAsked(t, "another Service", "127.0.0.1:32002", asked{200, 1})
	level(netfilter.Translates)
	c.checks.checks[u.Services[0].Name].until = time.Now() // it has been away for long
	_ = other.Close()
	c.again()
	assertAsked(t, "it was tried a moment ago", "127.0.0.1:32000", asked{})
	tryAgain(c.checks)
	c.again()
	assertAsked(t, "the port is free", "127.0.0.1:32000", asked{200, 1})
	if found := c.read().problems; len(found) > 0 || time.Until(c.due()) <= portRetry {
		t.Errorf("problems %v, due in %s", found, time.Until(c.due()))
	}
}

// The node is healthy while the maps hold what is known of Services, and eligible while its Node stays.
func TestHealthOfServices(t *testing.T) {
	l := testServices(t)
	is := func(when string, want health.State) {
		t.Helper()
		got := l.status.health()
		if got.Updated.IsZero() || time.Since(got.Updated) < 0 {
			t.Errorf("%s: last in step %s", when, got.Updated)
		}
		if got.Updated = want.Updated; got != want {
			t.Errorf("%s: %+v, want %+v", when, got, want)
		}
		if said := l.whoServes(); strings.Contains(said, "this node serves none") == (want.Healthy && want.Eligible) {
			t.Errorf("%s: ebpfctl is told %q", when, said)
		}
	}
	is("nothing is known", health.State{Eligible: true})
	leaving := n1()
	leaving.Leaving = true
	for _, c := range []struct {
		what  string
		nodes []plan.Node
		stays bool
	}{{"the Node is there", []plan.Node{n1(), n2()}, true}, {"it leaves", []plan.Node{leaving, n2()}, false}, {"it is back", []plan.Node{n1()}, true}, {"it is gone", []plan.Node{n2()}, false}} {
		l.accept(list(c.nodes...))
		is(c.what, health.State{Eligible: c.stays})
	}
	c := l.services
	c.accept(complete([]string{"10.244.2.7"}))
	is("nothing is written yet", health.State{})
	c.place(here())
	is("all is written", health.State{Healthy: true})
	late := func() { c.status.set(func(f *figures) { f.inStep = time.Now().Add(-maxBehind) }) }
	late()
	is("changes wait for too long", health.State{})
	c.again()
	is("none wait", health.State{Healthy: true})
	c.failed, c.compared = true, time.Now()
	late()
	c.reconcile(nil)
	is("writes fail", health.State{})
	restartServices(t, l)
	is("another agent, with what is in the maps", health.State{Healthy: true})
	late()
	l.services.again()
	is("which has heard of nothing new", health.State{Healthy: true})
	l.accept(list(n1()))
	is("and the Node is back", health.State{Healthy: true, Eligible: true})
	l.status.leave(healthAddress, true)
	l.status.leave(modeAddress, true)
	if said := l.whoServes(); !strings.HasSuffix(said, "; 127.0.0.1:10249 and :10256 left to kube-proxy") {
		t.Errorf("ebpfctl is told %q", said)
	}
	l.status.leave(modeAddress, false)
	if said := l.whoServes(); !strings.HasSuffix(said, "; :10256 left to kube-proxy") {
		t.Errorf("ebpfctl is told %q", said)
	}
}

// The addresses where kube-proxy answers are its while it runs. Nobody is bothered with that.
func TestPortThatKubeProxyHas(t *testing.T) {
	t.Parallel()
	other, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer other.Close()
	address := other.Addr().String()
	log := &syncedBuffer{}
	text := slog.New(slog.NewTextHandler(log, nil))
	a := &agent{node: &node{log: text, status: newStatus(text), complaints: newComplaints(text)}}
	a.status.set(func(f *figures) {
		f.netfilter, f.services.filled, f.stays, f.inStep = netfilter.Translates, true, true, time.Now()
	})
	ctx, cancel := context.WithCancel(t.Context())
	var ended sync.WaitGroup
	ended.Go(func() { _ = a.serve(ctx, server{"health", address, health.Node(a.status.health), nil, maxRestart}) })
	defer func() { cancel(); ended.Wait() }()
	eventually(t, "it is left to kube-proxy", func() bool { return len(a.status.read().left) == 1 })
	if a.leave(address, time.Now().Add(time.Minute)); strings.Count(log.String(), "level=INFO") != 1 || len(a.complaints.degraded()) > 0 {
		t.Errorf("degraded by %v, logged %s", a.complaints.degraded(), log)
	}
	_ = other.Close()
	time.Sleep(portRetry + time.Second)
	if answers("http://" + address + "/healthz") {
		t.Error("it answers while kube-proxy may be about to come back")
	}
	a.status.set(func(f *figures) { f.netfilter = netfilter.Nothing })
	eventually(t, "it answers", func() bool { return answers("http://" + address + "/healthz") })
	if left := a.status.read().left; len(left) > 0 || strings.Contains(log.String(), "level=ERROR") {
		t.Errorf("left to kube-proxy: %v, logged %s", left, log)
	}
	if a.leave(address, time.Now().Add(time.Minute)) {
		t.Error("left to kube-proxy where there is none")
	}
}

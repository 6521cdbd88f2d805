package agent

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/rest"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
)

// reaching is a node whose flags say how to reach the API.
func reaching(t *testing.T, cfg Config) (*node, *syncedBuffer) {
	t.Helper()
	log := &syncedBuffer{}
	cfg.Log = slog.New(slog.NewTextHandler(log, nil))
	if cfg.State == "" {
		cfg.State = t.TempDir()
	}
	n := &node{cfg: cfg, log: cfg.Log, status: newStatus(cfg.Log), complaints: newComplaints(cfg.Log)}
	must(t, n.reachAPI())
	return n, log
}

func addresses(texts ...string) (all []netip.AddrPort) {
	for _, text := range texts {
		all = append(all, netip.MustParseAddrPort(text))
	}
	return all
}

var compareAddresses = cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })

func TestAddressesOfAPI(t *testing.T) {
	for host, want := range map[string][]netip.AddrPort{
		"https://192.0.2.1:6443": addresses("192.0.2.1:6443"), "https://[2001:db8::1]:6443": addresses("[2001:db8::1]:6443"), "https://192.0.2.1": addresses("192.0.2.1:443"),
		"https://[::ffff:192.0.2.1]": addresses("192.0.2.1:443"), "https://api.example:6443": nil, "http://192.0.2.1": addresses("192.0.2.1:80"),
	} {
		n, _ := reaching(t, Config{API: &rest.Config{Host: host}})
		if diff := cmp.Diff(want, n.addressesOfAPI(), compareAddresses); diff != "" {
			t.Errorf("%s -want +got:\n%s", host, diff)
		}
	}
	n, _ := reaching(t, Config{API: &rest.Config{Host: "https://10.96.0.1"}, APIServers: []string{"https://192.0.2.1:6443", "https://[2001:db8::1]:443", "https://api.example:443"}})
	if diff := cmp.Diff(addresses("192.0.2.1:6443", "[2001:db8::1]:443"), n.addressesOfAPI(), compareAddresses); diff != "" {
		t.Errorf("several -want +got:\n%s", diff)
	}
	if says := n.describeAPI(); says != "none of 3 answers" {
		t.Errorf("before any was asked: %q", says)
	}
	n, _ = reaching(t, Config{})
	if n.api != nil || n.addressesOfAPI() != nil || n.describeAPI() != "" {
		t.Errorf("without an API: %v", n.addressesOfAPI())
	}
}

// What stands in the file of kept addresses is used where the API is only known by its Service, and may be anything.
func TestKeptServers(t *testing.T) {
	config := func() *rest.Config { return &rest.Config{Host: "https://10.96.0.1:443"} }
	const good = `{"servers":["https://192.0.2.1:6443","https://192.0.2.2:6443"]}`
	for name, c := range map[string]struct {
		content string
		known   int
		warns   bool
	}{
		"good": {good, 3, false}, "garbage": {"\x00\xff", 1, true}, "truncated": {good[:30], 1, true}, "empty": {"", 1, true},
		"another form": {`["https://192.0.2.1:6443"]`, 1, true}, "no addresses": {`{"servers":["nonsense","http://192.0.2.1:80"]}`, 1, false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			must(t, os.WriteFile(filepath.Join(dir, apiServersName), []byte(c.content), 0o600))
			n, log := reaching(t, Config{Directories: Directories{State: dir}, API: config(), Services: ServicesOn, APIOfService: true})
			if got := n.api.State().Known; got != c.known || strings.Contains(log.String(), "kept addresses") != c.warns {
				t.Errorf("%d are known, want %d; the log: %s", got, c.known, log)
			}
			for _, other := range []Config{
				{Services: ServicesOn, APIOfService: true, APIServers: []string{"https://192.0.2.9:6443"}}, {Services: ServicesOn}, {APIOfService: true},
			} {
				other.State, other.API = dir, config()
				if n, _ := reaching(t, other); n.api.State().Known != 1 {
					t.Errorf("%+v: they are used", other)
				}
			}
		})
	}
}

// anyAPI answers that it is ready, and lists nothing.
func anyAPI(t *testing.T) *httptest.Server {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/readyz":
		case r.URL.Query().Get("sendInitialEvents") != "":
			w.WriteHeader(http.StatusUnprocessableEntity)
		case r.URL.Query().Get("watch") != "":
			w.Header().Set("Content-Type", "application/json")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		default:
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write([]byte(`{"apiVersion":"v1","kind":"NodeList","metadata":{"resourceVersion":"1"},"items":[]}`))
		}
	}))
	t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
	return srv
}

// unused is an address where nobody listens.
func unused(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	must(t, l.Close())
	return l.Addr().String()
}

// The addresses of the API server's Service are learnt from its endpoints, kept for the next start, and used instead of it.
func TestServersAreLearntAndKept(t *testing.T) {
	api, other := anyAPI(t), unused(t)
	l := testServices(t) // whose network is another, but not for the goroutines that ask the API
	l.cfg.API, l.cfg.APIOfService = &rest.Config{Host: "http://" + unused(t)}, true
	must(t, l.reachAPI())
	ctx, cancel := context.WithCancel(t.Context())
	var g sync.WaitGroup
	g.Go(func() { _ = l.api.Run(ctx) })
	defer g.Wait()
	defer cancel()

	u := complete([]string{"10.244.2.7"})
	s, slice := webService(9)
	s.Name, slice.Name, slice.Service = service.APIServer(), service.APIServer(), service.APIServer().Name
	for _, text := range []string{api.Listener.Addr().String(), other} {
		at := netip.MustParseAddrPort(text)
		one := slice
		one.Name.Name = text
		one.Ports = []service.SlicePort{{Name: "https", Protocol: wire.TCP, Port: at.Port()}, {Name: "https", Protocol: wire.UDP, Port: 1}, {Name: "http", Protocol: wire.TCP, Port: 2}}
		one.Endpoints = []service.Endpoint{{Address: at.Addr(), Ready: true, Serving: true}, {Address: netip.MustParseAddr("192.0.2.7")}}
		u.Slices = append(u.Slices, one)
	}
	u.Services = append(u.Services, s)
	l.services.accept(u)
	path := filepath.Join(l.cfg.State, apiServersName)
	for end := time.Now().Add(15 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		kept, err := readServers(path)
		if err == nil && slices.Equal(kept, []string{api.URL}) {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("kept are %v, %v; %+v", kept, err, l.api.State())
		}
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if says := l.describeAPI(); says != api.URL+", one of 3" {
		t.Errorf("in use is %s", says)
	}
	if all := l.addressesOfAPI(); !slices.Contains(all, netip.MustParseAddrPort(other)) || len(all) != 3 {
		t.Errorf("the addresses are %v", all)
	}
}

// A node on which nobody translates the Service's address says what is missing, for as long as it is.
func TestMissingAPIServerIsSaid(t *testing.T) {
	address, api := unused(t), anyAPI(t)
	l := testServices(t)
	l.cfg.API, l.cfg.APIOfService = &rest.Config{Host: "http://" + address}, true
	must(t, l.reachAPI())
	ctx, cancel := context.WithCancel(t.Context())
	said := make(chan source.Update, 100)
	var g sync.WaitGroup
	g.Go(func() { _ = source.API{Config: l.cfg.API, Log: l.log}.Run(ctx, func(u source.Update) { said <- u }) })
	defer g.Wait()
	defer cancel()
	l.accept(<-said)
	l.pass(t.Context())
	const missing = "--api-server is missing"
	why := l.status.reason()
	if !strings.Contains(why, missing) || strings.Contains(why, "\n") {
		t.Errorf("not ready because %q", why)
	}
	w := httptest.NewRecorder()
	l.status.handler(http.NotFoundHandler(), true).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/readyz", nil))
	if w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), missing) || strings.Count(w.Body.String(), "\n") != 1 {
		t.Errorf("/readyz: %d %q", w.Code, w.Body)
	}
	content, err := os.ReadFile(l.publishedPath())
	if err != nil || !strings.Contains(string(content), missing) {
		t.Errorf("ebpfctl is told %s, %v", content, err)
	}
	translated := &http.Server{Addr: address, Handler: api.Config.Handler, ReadHeaderTimeout: time.Second}
	g.Go(func() { _ = translated.ListenAndServe() })
	defer translated.Close()
	u := <-said
	if u.Err != nil {
		t.Fatal(u.Err)
	}
	l.accept(u)
	l.pass(t.Context())
	if why := l.status.reason(); strings.Contains(why, missing) {
		t.Errorf("there is a way, and still %q", why)
	}
}

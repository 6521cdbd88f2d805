package agent

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// syncedBuffer is a log that several goroutines write.
type syncedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncedBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncedBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// serving is an agent that does nothing but answer on its listeners.
func serving(t *testing.T, cfg Config) (*agent, *syncedBuffer) {
	t.Helper()
	log := &syncedBuffer{}
	cfg.Log = slog.New(slog.NewTextHandler(log, nil))
	a := &agent{node: &node{cfg: cfg, log: cfg.Log, status: newStatus(cfg.Log), complaints: newComplaints(cfg.Log)}}
	a.status.setNotReady("")
	ctx, cancel := context.WithCancel(t.Context())
	var ended sync.WaitGroup
	for _, s := range a.serversFor(serveMetrics(prometheus.NewRegistry())) {
		ended.Go(func() {
			if err := a.serve(ctx, s); !errors.Is(err, context.Canceled) {
				t.Errorf("%s ended with %v", s.name, err)
			}
		})
	}
	t.Cleanup(func() { cancel(); ended.Wait() })
	return a, log
}

func eventually(t *testing.T, what string, so func() bool) {
	t.Helper()
	for deadline := time.Now().Add(priv.Patience(10 * time.Second)); !so(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not so: %s", what)
		}
	}
}

func answers(url string) bool {
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Second}
	response, err := client.Get(url)
	if err != nil {
		return false
	}
	defer response.Body.Close()
	_, _ = io.Copy(io.Discard, response.Body)
	return response.StatusCode == http.StatusOK
}

// A port that somebody else has is told once and taken when it is free; the other listener does not wait for it.
func TestPortThatIsTaken(t *testing.T) {
	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = free.Close()
	a, log := serving(t, Config{Listen: other.Addr().String(), MetricsListen: free.Addr().String()})
	eventually(t, "metrics are served", func() bool { return answers("http://" + free.Addr().String() + "/metrics") })
	time.Sleep(2*retry + retry/2)
	if degraded := a.complaints.degraded(); len(degraded) != 1 || !strings.Contains(degraded["listeners/--listen"], "address already in use") {
		t.Errorf("degraded by %v", degraded)
	}
	_ = other.Close()
	eventually(t, "health is served", func() bool { return answers("http://" + other.Addr().String() + "/readyz") })
	if said := log.String(); strings.Count(said, "listeners/--listen") != 2 || !strings.Contains(said, "no longer the case") || len(a.complaints.degraded()) != 0 {
		t.Errorf("logged %s", said)
	}
}

// An address may come later than the agent, as one of DHCP does.
func TestAddressThatIsNotThereYet(t *testing.T) {
	priv.Isolate(t)
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		t.Fatal(err)
	}
	const address = "192.0.2.7:9965"
	// Listeners are made where this test is: on the one thread that is in the namespace.
	log := slog.New(slog.DiscardHandler)
	a := &agent{node: &node{cfg: Config{Listen: address}, log: log, status: newStatus(log), complaints: newComplaints(log)}}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	tries := 0
	a.complaints.now = func() time.Time { // each failure is noted here
		if tries++; tries == 1 {
			addr, err := netlink.ParseAddr("192.0.2.7/32")
			must(t, err)
			must(t, netlink.AddrAdd(lo, addr))
		}
		return time.Now()
	}
	s := a.serversFor(serveMetrics(prometheus.NewRegistry()))[0]
	s.refuse = func(l net.Listener) net.Listener {
		if l.Addr().String() != address {
			t.Errorf("listens on %v", l.Addr())
		}
		cancel()
		return l
	}
	if err := a.serve(ctx, s); !errors.Is(err, context.Canceled) || tries == 0 {
		t.Errorf("ended with %v after %d failures", err, tries)
	}
}

// brokenListener fails once, as one does whose process has no file descriptors left.
type brokenListener struct {
	net.Listener
	once *sync.Once
}

func (l brokenListener) Accept() (c net.Conn, err error) {
	l.once.Do(func() { err = errors.New("broken") })
	if err != nil {
		return nil, err
	}
	return l.Listener.Accept()
}

// A server that fails is started again, and nothing else ends for it.
func TestServerThatFails(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = free.Close()
	log := slog.New(slog.DiscardHandler)
	a := &agent{node: &node{cfg: Config{MetricsListen: free.Addr().String()}, log: log, status: newStatus(log), complaints: newComplaints(log)}}
	s := a.serversFor(serveMetrics(prometheus.NewRegistry()))[0]
	once := &sync.Once{}
	s.refuse = func(l net.Listener) net.Listener { return brokenListener{l, once} }
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- a.serve(ctx, s) }()
	eventually(t, "it complains", func() bool { return a.complaints.degraded()["listeners/--metrics-listen"] == "broken" })
	eventually(t, "it answers", func() bool { return answers("http://" + free.Addr().String() + "/metrics") })
	if len(a.complaints.degraded()) != 0 {
		t.Errorf("degraded by %v", a.complaints.degraded())
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("ended with %v", err)
	}
}

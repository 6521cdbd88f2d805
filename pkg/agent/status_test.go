package agent

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

func get(t *testing.T, s *status, all bool, path string) (int, string) {
	t.Helper()
	w := httptest.NewRecorder()
	s.handler(serveMetrics(prometheus.NewRegistry()), all).ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	body, err := io.ReadAll(w.Result().Body)
	if err != nil {
		t.Fatal(err)
	}
	return w.Code, string(body)
}

func TestHealth(t *testing.T) {
	s := newStatus(slog.New(slog.DiscardHandler))
	expect := func(path string, all bool, status int, says string) {
		t.Helper()
		if code, body := get(t, s, all, path); code != status || !strings.Contains(body, says) {
			t.Errorf("%s: %d %q, want %d %q", path, code, body, status, says)
		}
	}
	expect("/readyz", true, 503, "starting")
	s.setNotReady("no podCIDR")
	expect("/readyz", true, 503, "no podCIDR")
	expect("/healthz", true, 200, "ok")
	s.setNotReady("")
	expect("/readyz", true, 200, "ok")
	s.set(func(f *figures) { f.alive = time.Now().Add(-2 * observe.MaxSilence) })
	expect("/healthz", true, 503, "stuck")
	expect("/metrics", true, 200, "")
	expect("/metrics", false, 200, "")
	expect("/readyz", false, 404, "")
	expect("/healthz", false, 404, "")
}

func TestSyncLag(t *testing.T) {
	s := newStatus(slog.New(slog.DiscardHandler))
	at := func(seconds int) time.Time { return time.Unix(int64(seconds), 0) }
	s.pending(at(10))
	s.pending(at(12)) // a second change while the first one waits
	if got := s.read().syncLag(at(15)); got != 5*time.Second {
		t.Errorf("waiting for %v, want since the first change", got)
	}
	s.synced(at(12), at(16))
	if got := s.read().syncLag(at(99)); got != 4*time.Second {
		t.Errorf("took %v", got)
	}
	s.synced(at(12), at(50)) // nothing was waiting
	if got := s.read().syncLag(at(99)); got != 4*time.Second {
		t.Errorf("a pass without a change made it %v", got)
	}
}

func TestProblemsAndPods(t *testing.T) {
	s := newStatus(slog.New(slog.DiscardHandler))
	s.describe(plan.Standing{
		Own:    []netip.Prefix{netip.MustParsePrefix("10.1.0.0/24")},
		Claims: map[netip.Prefix]netip.Addr{netip.MustParsePrefix("10.2.0.0/24"): {}},
	}, []plan.Problem{{Node: "a", Reason: plan.Refused}, {Node: "a", Reason: plan.Refused}, {Node: "b", Reason: plan.OffLink}}, 3)
	now := s.read()
	if now.nodes != 3 || now.problems[plan.Refused] != 2 || now.problems[plan.OffLink] != 1 {
		t.Errorf("%d nodes, problems %v", now.nodes, now.problems)
	}
	for addr, want := range map[string]bool{"10.1.0.9": true, "10.2.0.9": true, "172.18.0.1": false} {
		if s.isPod(netip.MustParseAddr(addr)) != want {
			t.Errorf("%s is a pod's: want %v", addr, want)
		}
	}
}

// queue is a listener whose connections come from the given addresses.
type queue struct {
	own  string
	from []string
}

type conn struct {
	net.Conn
	from string
}

func (c conn) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(c.from)) }
func (c conn) Close() error         { return nil }

func (q *queue) Addr() net.Addr { return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(q.own)) }
func (q *queue) Close() error   { return nil }
func (q *queue) Accept() (net.Conn, error) {
	if len(q.from) == 0 {
		return nil, errors.New("no more")
	}
	c := conn{from: q.from[0]}
	q.from = q.from[1:]
	return c, nil
}

func TestPodsAreNotLetIn(t *testing.T) {
	isPod := func(a netip.Addr) bool { return netip.MustParsePrefix("10.0.0.0/8").Contains(a) }
	callers := []string{"10.0.0.5:1", "127.0.0.1:2", "172.18.0.1:3", "[::ffff:10.0.0.6]:4", "[::1]:5"}
	for own, want := range map[string]string{
		"127.0.0.1:9965":  "127.0.0.1:2 [::1]:5",
		"[::1]:9965":      "127.0.0.1:2 [::1]:5",
		"172.18.0.1:9965": "127.0.0.1:2 172.18.0.1:3 [::1]:5",
		"0.0.0.0:9965":    "127.0.0.1:2 172.18.0.1:3 [::1]:5",
	} {
		l := restrict(&queue{own: own, from: callers}, isPod)
		var got []string
		for {
			c, err := l.Accept()
			if err != nil {
				break
			}
			got = append(got, c.RemoteAddr().String())
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s lets in %v, want %s", own, got, want)
		}
	}
}

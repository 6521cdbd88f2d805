package source

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
)

// blackHole is a path to a server that can swallow everything, as a firewall that drops does: connections stay open,
// new ones open and nobody ever answers.
type blackHole struct {
	net.Listener
	to string

	mu    sync.Mutex
	holes []net.Conn // both ends of each connection
	open  chan struct{}
}

func newBlackHole(t *testing.T, to string) *blackHole {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &blackHole{Listener: l, to: to, open: make(chan struct{})}
	close(b.open)
	done := make(chan struct{})
	go func() { defer close(done); b.serve() }()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
		b.mu.Lock()
		defer b.mu.Unlock()
		for _, c := range b.holes {
			_ = c.Close()
		}
	})
	return b
}

func (b *blackHole) serve() {
	for {
		near, err := b.Accept()
		if err != nil {
			return
		}
		far, err := net.Dial("tcp", b.to)
		if err != nil {
			_ = near.Close()
			continue
		}
		b.mu.Lock()
		b.holes = append(b.holes, near, far)
		b.mu.Unlock()
		go b.pipe(near, far)
		go b.pipe(far, near)
	}
}

// pipe passes on what arrives while the way is open. What arrives while it is not is lost, and so is the connection: TCP
// would repeat it, a dead path does not.
func (b *blackHole) pipe(from, to net.Conn) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			_ = to.Close()
			return
		}
		b.mu.Lock()
		open := b.open
		b.mu.Unlock()
		select {
		case <-open:
		default:
			_, _ = io.Copy(io.Discard, from)
			return
		}
		if _, err := to.Write(buffer[:n]); err != nil {
			return
		}
	}
}

func (b *blackHole) swallow() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.open = make(chan struct{})
}

func (b *blackHole) pass() {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.open)
}

// A path that swallows everything is a loss, whatever the protocol notices of it by itself; and the return is told.
func TestSilenceIsALoss(t *testing.T) {
	// When client-go takes a connection for dead. Until then requests go over it.
	t.Setenv("HTTP2_READ_IDLE_TIMEOUT_SECONDS", "1")
	t.Setenv("HTTP2_PING_TIMEOUT_SECONDS", "1")
	for name, secure := range map[string]bool{"HTTP/1.1": false, "HTTP/2": true} {
		t.Run(name, func(t *testing.T) {
			f := &fakeAPI{nodes: map[string]corev1.Node{}, events: map[chan []byte]bool{}, version: 1}
			var protocol atomic.Value
			srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				protocol.Store(r.Proto)
				f.ServeHTTP(w, r)
			}))
			srv.EnableHTTP2 = secure
			scheme := "http://"
			if secure {
				scheme = "https://"
				srv.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
				srv.StartTLS()
			} else {
				srv.Start()
			}
			t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
			way := newBlackHole(t, srv.Listener.Addr().String())
			var heard atomic.Int64
			api := API{
				Config: &rest.Config{Host: scheme + way.Addr().String(), TLSClientConfig: rest.TLSClientConfig{Insecure: secure}},
				Log:    slog.New(slog.DiscardHandler), Heard: func() { heard.Store(time.Now().UnixNano()) },
				limits: limits{answer: time.Second, silence: 1500 * time.Millisecond},
			}
			updates := make(chan Update, 100)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- api.Run(ctx, func(u Update) { updates <- u }) }()
			defer func() { cancel(); <-done }()

			f.change("ADDED", apiNode("a", "10.0.1.0/24"))
			await(t, updates, "first list", func(u Update) bool { return names(u.Nodes) == "a" })
			if got, want := protocol.Load(), map[bool]string{false: "HTTP/1.1", true: "HTTP/2.0"}[secure]; got != want {
				t.Fatalf("spoken is %v, want %s", got, want)
			}
			// A watch without news, and without bookmarks, is asked for anew, which is no loss.
			time.Sleep(2500 * time.Millisecond)
			select {
			case u := <-updates:
				t.Fatalf("while nothing happens: %+v", u)
			default:
			}
			if !watching(f) {
				t.Fatal("no watch")
			}
			if silent := time.Since(time.Unix(0, heard.Load())); silent > 2*time.Second {
				t.Errorf("nothing was heard for %v although the server answers", silent)
			}
			way.swallow()
			f.change("ADDED", apiNode("b", "10.0.2.0/24"))
			lost := await(t, updates, "loss", func(u Update) bool { return true })
			if lost.Err == nil || lost.Nodes != nil {
				t.Errorf("told %+v", lost)
			}
			before := heard.Load()
			time.Sleep(2500 * time.Millisecond)
			if heard.Load() != before {
				t.Error("something was heard of a path that swallows everything")
			}
			way.pass()
			await(t, updates, "what was missed", func(u Update) bool { return names(u.Nodes) == "a b" })
			if heard.Load() == before {
				t.Error("nothing is heard again")
			}
		})
	}
}

// An answer that begins and then stays away ends as well, and its reader is told why.
func TestSilenceWithinAnAnswer(t *testing.T) {
	end := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/late" {
			<-end
		}
		_, _ = w.Write([]byte("begun"))
		w.(http.Flusher).Flush()
		<-end
	}))
	defer srv.Close()
	defer close(end)
	client := &http.Client{Transport: attentive{http.DefaultTransport, limits{100 * time.Millisecond, 200 * time.Millisecond}, func() {}, func(*http.Request, error) {}}}
	if _, err := client.Get(srv.URL + "/late"); err == nil || !strings.Contains(err.Error(), "nothing heard for 100ms") { //nolint:bodyclose // there is none
		t.Errorf("no answer: %v", err)
	}
	response, err := client.Get(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	var timeout net.Error
	if string(content) != "begun" || err == nil || !strings.Contains(err.Error(), "nothing heard for 200ms") || !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("an answer that stays away: %q, %v", content, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, srv.URL, nil)
	if err != nil {
		t.Fatal(err)
	}
	if response, err = client.Do(request); err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := io.ReadAll(response.Body); !errors.Is(err, context.Canceled) {
		t.Errorf("a request that its owner gave up: %v", err)
	}
	_ = response.Body.Close()
}

// client-go repeats a watch that times out, and then takes it for an empty one: neither may hide that nobody answers.
func TestWatchThatNobodyAnswers(t *testing.T) {
	f := &fakeAPI{nodes: map[string]corev1.Node{}, events: map[chan []byte]bool{}, version: 1}
	var gone atomic.Bool
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		if gone.CompareAndSwap(false, q.Get("watch") != "" && q.Get("sendInitialEvents") == ""); gone.Load() {
			<-r.Context().Done()
			return
		}
		f.ServeHTTP(w, r)
	}))
	defer srv.Close()
	updates := make(chan Update, 100)
	api := API{Config: &rest.Config{Host: srv.URL}, Log: slog.New(slog.DiscardHandler), limits: limits{answer: 200 * time.Millisecond, silence: time.Minute}}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- api.Run(ctx, func(u Update) { updates <- u }) }()
	defer func() { cancel(); <-done }()
	await(t, updates, "first list", func(u Update) bool { return u.Err == nil })
	lost := await(t, updates, "loss", func(u Update) bool { return true })
	if lost.Err == nil || !strings.HasPrefix(lost.Err.Error(), "watch Nodes from "+srv.URL+": nothing heard for 200ms") {
		t.Errorf("told %+v", lost)
	}
	for deadline := time.After(4 * time.Second); ; { // longer than ten attempts take
		select {
		case u := <-updates:
			if u.Err == nil {
				t.Errorf("then told %+v", u)
			}
		case <-deadline:
			return
		}
	}
}

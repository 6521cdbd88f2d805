package source

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// authority signs the certificates of a cluster's API servers.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	pem         []byte
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "cluster"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	a.certificate, a.key = a.sign(t, template)
	a.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.certificate.Raw})
	return a
}

// sign signs a certificate, by itself if there is nobody yet.
func (a *authority) sign(t *testing.T, template *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	parent, signer := a.certificate, a.key
	if parent == nil {
		parent, signer = template, key
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := x509.ParseCertificate(raw)
	if err != nil {
		t.Fatal(err)
	}
	return certificate, key
}

// certify makes a certificate for these addresses.
func (a *authority) certify(t *testing.T, addresses ...string) tls.Certificate {
	t.Helper()
	template := &x509.Certificate{SerialNumber: big.NewInt(2), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature}
	for _, text := range addresses {
		template.IPAddresses = append(template.IPAddresses, net.ParseIP(text))
	}
	certificate, key := a.sign(t, template)
	return tls.Certificate{Certificate: [][]byte{certificate.Raw}, PrivateKey: key}
}

// front is one API server of a cluster. It can be killed, and come back.
type front struct {
	t       *testing.T
	cluster http.Handler
	cert    tls.Certificate
	address string
	server  *httptest.Server

	mu     sync.Mutex
	ready  int           // what it answers to /readyz
	hangs  chan struct{} // it answers nothing until that is closed; nil: it answers
	checks int
	tokens map[string]int // what it was asked with
	takes  string         // the only token that it takes; empty: any
}

func newFront(t *testing.T, cluster http.Handler, cert tls.Certificate) *front {
	t.Helper()
	f := &front{t: t, cluster: cluster, cert: cert, address: "127.0.0.1:0", ready: http.StatusOK, tokens: map[string]int{}}
	f.start()
	t.Cleanup(func() { f.hang(false); f.kill() })
	return f
}

func (f *front) start() {
	f.t.Helper()
	l, err := net.Listen("tcp", f.address)
	if err != nil {
		f.t.Fatal(err)
	}
	f.address = l.Addr().String()
	f.server = httptest.NewUnstartedServer(f)
	_ = f.server.Listener.Close()
	f.server.Listener, f.server.EnableHTTP2 = l, true
	f.server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)
	f.server.TLS = &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{f.cert}}
	f.server.StartTLS()
}

// kill ends it, with its connections.
func (f *front) kill() {
	_ = f.server.Listener.Close()
	f.server.CloseClientConnections()
	f.server.Close()
}

func (f *front) say(ready int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ready = ready
}

func (f *front) hang(hangs bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case hangs:
		f.hangs = make(chan struct{})
	case f.hangs != nil:
		close(f.hangs)
		f.hangs = nil
	}
}

func (f *front) url() string { return "https://" + f.address }

func (f *front) addrPort() netip.AddrPort { return netip.MustParseAddrPort(f.address) }

func (f *front) checked() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.checks
}

// asked is how often it was asked with a token for something else than its readiness.
func (f *front) asked(token string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.tokens["Bearer "+token]
}

func (f *front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	hangs, ready, refused := f.hangs, f.ready, f.takes != "" && r.Header.Get("Authorization") != "Bearer "+f.takes
	if r.URL.Path == "/readyz" {
		f.checks++
	} else {
		f.tokens[r.Header.Get("Authorization")]++
	}
	f.mu.Unlock()
	if hangs != nil {
		select {
		case <-hangs:
		case <-r.Context().Done():
		}
		return
	}
	switch {
	case refused:
		refuse(w, http.StatusUnauthorized, "who are you?")
	case r.URL.Path == "/readyz":
		w.WriteHeader(ready)
	default:
		f.cluster.ServeHTTP(w, r)
	}
}

// take has it take no other token any more.
func (f *front) take(token string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.takes = token
}

// quick are times for a test.
var quick = times{interval: 100 * time.Millisecond, trust: 400 * time.Millisecond, delay: 5 * time.Millisecond, away: 50 * time.Millisecond, spread: time.Hour}

// following is a source of Nodes that goes by Servers.
type following struct {
	*Servers
	log  *syncBuffer
	said chan Update
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// followServers follows Nodes until the test ends.
func followServers(t *testing.T, config *rest.Config, options ServersOptions) *following {
	t.Helper()
	f := &following{log: &syncBuffer{}, said: make(chan Update, 1000)}
	options.Log = slog.New(slog.NewTextHandler(f.log, nil))
	if options.times == (times{}) {
		options.times = quick
	}
	v, err := NewServers(config, options)
	if err != nil {
		t.Fatal(err)
	}
	f.Servers = v
	ctx, cancel := context.WithCancel(t.Context())
	var g sync.WaitGroup
	g.Go(func() { _ = v.Run(ctx) })
	g.Go(func() { _ = API{Config: v.Config(), Log: options.Log}.Run(ctx, func(u Update) { f.said <- u }) })
	t.Cleanup(func() {
		cancel()
		g.Wait()
		if t.Failed() {
			t.Log(f.log.String())
		}
	})
	return f
}

// news is how long it took, and the errors that came before.
type news struct {
	took time.Duration
	errs error
}

// patience is longer than client-go goes on with a token that is not the file's any more.
func patience() time.Duration {
	if priv.Long() {
		return 75 * time.Second
	}
	return 15 * time.Second
}

// hears waits until a Node has become known.
func (f *following) hears(t *testing.T, name string) news {
	t.Helper()
	began := time.Now()
	var errs []error
	for {
		select {
		case u := <-f.said:
			errs = append(errs, u.Err)
			for _, n := range u.Nodes {
				if n.Name == name {
					return news{time.Since(began), errors.Join(errs...)}
				}
			}
		case <-time.After(patience()):
			t.Fatalf("Node %s has not become known; errors before: %v", name, errors.Join(errs...))
		}
	}
}

// fails waits for an error.
func (f *following) fails(t *testing.T) error {
	t.Helper()
	for {
		select {
		case u := <-f.said:
			if u.Err != nil {
				return u.Err
			}
		case <-time.After(15 * time.Second):
			t.Fatal("no error")
		}
	}
}

// uses waits until an API server is in use.
func (f *following) uses(t *testing.T, want string) {
	t.Helper()
	for end := time.Now().Add(15 * time.Second); f.State().InUse != want; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("in use is %q, not %q", f.State().InUse, want)
		}
	}
}

// newNodes is a cluster without Nodes.
func newNodes() *fakeAPI {
	return &fakeAPI{nodes: map[string]corev1.Node{}, events: map[chan []byte]bool{}, version: 1}
}

func named(name string) (n corev1.Node) {
	n.Name = name
	return n
}

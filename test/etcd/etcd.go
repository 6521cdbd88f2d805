// Package etcd runs a real etcd-server for tests: one that is installed, or Debian's, which `tools/setup.sh test` unpacks into
// the project's cache. A Server is on the loopback interface of wherever a test is, a Process in any network namespace.
package etcd

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// Server is an etcd for one test, which ends with it; whatever goes wrong with it fails the test.
type Server struct {
	// URL is where clients reach it.
	URL    string
	Client *clientv3.Client

	tb      testing.TB
	process *Process
}

// Start starts a server. Without the program the test is skipped, or fails where nothing may be skipped.
func Start(tb testing.TB) *Server {
	tb.Helper()
	if _, err := priv.Program("etcd"); err != nil {
		if os.Getenv("REQUIRE_PRIVILEGED") == "1" {
			tb.Fatal(err)
		}
		tb.Skip(err)
	}
	p, err := start(tb)
	for tries := 1; err != nil && tries < 5 && strings.Contains(p.LogTail(), "address already in use"); tries++ {
		p, err = start(tb) // the port was taken between the look and the start
	}
	if err != nil {
		tb.Fatal(err)
	}
	client, err := p.Client()
	if err != nil {
		tb.Fatal(err)
	}
	s := &Server{URL: p.URL(), Client: client, tb: tb, process: p}
	tb.Cleanup(func() {
		_ = client.Close()
		s.Stop()
		if tb.Failed() {
			tb.Log(p.LogTail())
		}
	})
	return s
}

func start(tb testing.TB) (*Process, error) {
	tb.Helper()
	p := New(tb.TempDir(), freePort(tb), func(f func() error) error { return f() })
	return p, p.Start(tb.Context())
}

// freePort is an address of the loopback interface that nobody listened at just now.
func freePort(tb testing.TB) netip.AddrPort {
	tb.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// Start starts a server that has been stopped, with all that it had, and waits until it answers.
func (s *Server) Start() {
	s.tb.Helper()
	s.must(s.process.Start(s.tb.Context()))
}

// Stop kills the server; nobody answers afterwards.
func (s *Server) Stop() {
	s.tb.Helper()
	s.must(s.process.Kill())
}

// Empty puts a new, empty etcd in the server's place.
func (s *Server) Empty() {
	s.tb.Helper()
	s.must(s.process.Empty(s.tb.Context()))
}

func (s *Server) must(err error) {
	s.tb.Helper()
	if err != nil {
		s.tb.Fatal(err)
	}
}

// Put writes a key.
func (s *Server) Put(key, value string) {
	s.tb.Helper()
	s.Do(func(ctx context.Context) error { _, err := s.Client.Put(ctx, key, value); return err })
}

// Get returns a key's value; false: it is not there.
func (s *Server) Get(key string) (value string, there bool) {
	s.tb.Helper()
	s.Do(func(ctx context.Context) error {
		answer, err := s.Client.Get(ctx, key)
		if err == nil && len(answer.Kvs) == 1 {
			value, there = string(answer.Kvs[0].Value), true
		}
		return err
	})
	return value, there
}

// Lease puts a key with a lease of its own, and returns that.
func (s *Server) Lease(key, value string, ttl time.Duration) clientv3.LeaseID {
	s.tb.Helper()
	var id clientv3.LeaseID
	s.Do(func(ctx context.Context) error {
		granted, err := s.Client.Grant(ctx, int64(ttl.Seconds()))
		if err != nil {
			return fmt.Errorf("grant a lease: %w", err)
		}
		id = granted.ID
		_, err = s.Client.Put(ctx, key, value, clientv3.WithLease(id))
		return err
	})
	return id
}

// Revoke ends the lease of a key, as its time does.
func (s *Server) Revoke(key string) {
	s.tb.Helper()
	s.Do(func(ctx context.Context) error {
		answer, err := s.Client.Get(ctx, key)
		if err != nil || len(answer.Kvs) == 0 || answer.Kvs[0].Lease == 0 {
			return fmt.Errorf("%s has no lease: %w", key, err)
		}
		_, err = s.Client.Revoke(ctx, clientv3.LeaseID(answer.Kvs[0].Lease))
		return err
	})
}

// Do asks the server something, and fails the test with the error.
func (s *Server) Do(ask func(context.Context) error) {
	s.tb.Helper()
	ctx, cancel := context.WithTimeout(s.tb.Context(), priv.Patience(10*time.Second))
	defer cancel()
	s.must(ask(ctx))
}

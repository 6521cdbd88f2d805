package lease

import (
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
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/ebpf-cni/ebpf-cni/test/etcd"
)

// certificate makes a certificate, of the authority or of itself, and returns the files that it and its key are in.
func certificate(t *testing.T, name string, authority *tls.Certificate) (pair tls.Certificate, certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	what := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour), IsCA: authority == nil,
		BasicConstraintsValid: true, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	by, with := what, any(key)
	if authority != nil {
		by, with = authority.Leaf, authority.PrivateKey
	}
	der, err := x509.CreateCertificate(rand.Reader, what, by, key.Public(), with)
	encoded, err2 := x509.MarshalPKCS8PrivateKey(key)
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	certFile, keyFile = filepath.Join(t.TempDir(), name+".crt"), filepath.Join(t.TempDir(), name+".key")
	err = errors.Join(
		os.WriteFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600),
		os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: encoded}), 0o600))
	pair, err2 = tls.LoadX509KeyPair(certFile, keyFile)
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	return pair, certFile, keyFile
}

func TestCertificates(t *testing.T) {
	t.Parallel()
	s := etcd.Start(t)
	s.Put(configKey, narrow)
	authority, caFile, _ := certificate(t, "authority", nil)
	server, _, _ := certificate(t, "server", &authority)
	_, certFile, keyFile := certificate(t, "node", &authority)
	known := x509.NewCertPool()
	known.AddCert(authority.Leaf)
	wall := newWall(t, strings.TrimPrefix(s.URL, "http://"), func(l net.Listener) net.Listener {
		return tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{server}, ClientCAs: known, ClientAuth: tls.RequireAndVerifyClientCert, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS12})
	})
	a := start(t, "https://"+wall.address, func(o *Options, _ *Self) { o.CAFile, o.CertFile, o.KeyFile = caFile, certFile, keyFile })
	a.expect("n1=10.5.9.0/24")
	for what, change := range map[string]option{
		"an unknown authority": func(o *Options, _ *Self) { o.CertFile, o.KeyFile = certFile, keyFile },
		"no certificate":       func(o *Options, _ *Self) { o.CAFile = caFile },
	} {
		b := start(t, "https://"+wall.address, change)
		t.Log(what)
		b.expectError("etcd at https://" + wall.address)
		b.stop()
	}
	for _, o := range []Options{{CAFile: keyFile}, {CAFile: "/nowhere"}, {CertFile: keyFile, KeyFile: certFile}} {
		o.Endpoints = []string{"https://127.0.0.1:1"}
		if _, err := Open(o, slog.New(slog.DiscardHandler)); err == nil {
			t.Errorf("%+v can be opened", o)
		}
	}
}

// With a password, and the rights to the network's keys alone.
func TestPassword(t *testing.T) {
	t.Parallel()
	s := etcd.Start(t)
	s.Put(configKey, narrow)
	s.Do(func(ctx context.Context) error {
		c := s.Client
		_, err := c.UserAdd(ctx, "root", "r")
		_, err2 := c.RoleAdd(ctx, "root")
		_, err3 := c.UserGrantRole(ctx, "root", "root")
		_, err4 := c.UserAdd(ctx, "flannel", "secret")
		_, err5 := c.RoleAdd(ctx, "network")
		_, err6 := c.RoleGrantPermission(ctx, "network", prefix+"/", clientv3.GetPrefixRangeEnd(prefix+"/"), clientv3.PermissionType(clientv3.PermReadWrite))
		_, err7 := c.UserGrantRole(ctx, "flannel", "network")
		_, err8 := c.AuthEnable(ctx)
		return errors.Join(err, err2, err3, err4, err5, err6, err7, err8)
	})
	wall := newWall(t, strings.TrimPrefix(s.URL, "http://"))
	a := start(t, "http://"+wall.address, func(o *Options, _ *Self) { o.Username, o.Password = "flannel", "secret" })
	a.expect("n1=10.5.9.0/24")
	for _, password := range []string{"", "wrong"} {
		b := start(t, s.URL, func(o *Options, _ *Self) {
			if o.Password = password; password != "" {
				o.Username = "flannel"
			}
		})
		b.expectError("etcd at " + s.URL)
		b.stop()
	}
	// It may read its own keys by now, and not follow those of others: that stays an error.
	root, err := clientv3.New(clientv3.Config{Endpoints: []string{s.URL}, Username: "root", Password: "r", Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	end := clientv3.GetPrefixRangeEnd(prefix + "/")
	for _, key := range []string{subnetKey("10.5.9.0-24"), prefix + "/ebpf-cni/192.0.2.1"} {
		if _, err := root.RoleGrantPermission(t.Context(), "network", key, "", clientv3.PermissionType(clientv3.PermReadWrite)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := root.RoleRevokePermission(t.Context(), "network", prefix+"/", end); err != nil {
		t.Fatal(err)
	}
	wall.close()
	wall.open()
	a.expectError("follow changes of leases", "permission denied")
	for began := time.Now(); time.Since(began) < 4*listPause; time.Sleep(5 * time.Millisecond) {
		if _, _, failing := a.now(); !failing {
			t.Fatal("changes are not heard of, and that is no error any more")
		}
	}
	if _, err := root.RoleGrantPermission(t.Context(), "network", prefix+"/", end, clientv3.PermissionType(clientv3.PermReadWrite)); err != nil {
		t.Fatal(err)
	}
	a.expect("n1=10.5.9.0/24")
}

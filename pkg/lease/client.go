package lease

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// DefaultPrefix is flannel's.
const DefaultPrefix = "/coreos.com/network"

// Options are how the registry is reached.
type Options struct {
	// Endpoints are the URLs of etcd's members, all http or all https.
	Endpoints []string
	// Prefix is what all keys begin with, without a slash at its end.
	Prefix string
	// CAFile has the certificates by which members are known; empty: the machine's. CertFile and KeyFile are what we are known by;
	// empty: nothing.
	CAFile, CertFile, KeyFile string
	// Username and Password are what we are known by as well; empty: nothing.
	Username, Password string
	// Public are the addresses by which other nodes reach this one; of a family without one, that by which the default route leads out.
	Public [wire.Families]netip.Addr
	// SubnetFile is where container engines are told of the subnet.
	SubnetFile string
	// TTL is how long a lease lives that is not renewed; 0: as long as flanneld's.
	TTL time.Duration
}

// usualTTL is that of flanneld's leases.
const usualTTL = 24 * time.Hour

func (o Options) ttl() time.Duration {
	if o.TTL == 0 {
		return usualTTL
	}
	return o.TTL
}

const (
	// answerTimeout bounds the wait for an answer.
	answerTimeout = 5 * time.Second
	// connectTimeout bounds the wait for a connection, reconnectMost the pause before the next try: a registry that comes back is
	// to be noticed soon, and not to be overrun.
	connectTimeout = 5 * time.Second
	reconnectMost  = 3 * time.Second
	// retries are few, so that it is soon known why nobody answers.
	retries = 5
	// quietMost is how long a connection may be silent before it is asked whether it lives.
	quietMost = 10 * time.Second
)

// Registry is the registry in etcd.
type Registry struct {
	Options
	log    *slog.Logger
	secret *tls.Config
	client *clientv3.Client // nil: with a password etcd has to be reached first
}

// Open returns the registry. It reaches nobody yet.
func Open(o Options, log *slog.Logger) (*Registry, error) {
	secret, err := o.tls()
	if err != nil {
		return nil, err
	}
	return &Registry{Options: o, log: log, secret: secret}, nil
}

// connect makes the client, once.
func (r *Registry) connect() error {
	if r.client != nil {
		return nil
	}
	pause := backoff.DefaultConfig
	pause.BaseDelay, pause.MaxDelay = 200*time.Millisecond, reconnectMost
	client, err := clientv3.New(clientv3.Config{
		Endpoints: r.Endpoints, Username: r.Username, Password: r.Password, TLS: r.secret, Logger: zap.NewNop(),
		DialTimeout: connectTimeout, DialKeepAliveTime: quietMost, DialKeepAliveTimeout: answerTimeout, MaxUnaryRetries: retries,
		DialOptions: []grpc.DialOption{
			grpc.WithConnectParams(grpc.ConnectParams{Backoff: pause, MinConnectTimeout: connectTimeout}),
			grpc.WithChainUnaryInterceptor(atOnce),
		},
	})
	if err == nil {
		r.client = client
	}
	return err
}

// atOnce has requests fail where a connection has been refused, instead of waiting for one: the error says why.
func atOnce(ctx context.Context, method string, request, answer any, c *grpc.ClientConn, ask grpc.UnaryInvoker, opts ...grpc.CallOption) error { //nolint:revive // grpc's own signature
	return ask(ctx, method, request, answer, c, append(opts, grpc.WaitForReady(false))...)
}

// isAway reports whether there is no connection.
func (r *Registry) isAway() bool {
	return r.client == nil || r.client.ActiveConnection().GetState() != connectivity.Ready
}

// Close ends the connection. The lease lives on.
func (r *Registry) Close() {
	if r.client != nil {
		_ = r.client.Close()
	}
}

// tls is nil where members are reached without encryption.
func (o Options) tls() (*tls.Config, error) {
	if len(o.Endpoints) == 0 || !strings.HasPrefix(o.Endpoints[0], "https:") {
		return nil, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if o.CAFile != "" {
		content, err := os.ReadFile(o.CAFile)
		if err != nil {
			return nil, fmt.Errorf("read the certificates of etcd's authority: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(content) {
			return nil, fmt.Errorf("read the certificates of etcd's authority: %s has none", o.CAFile)
		}
	}
	if o.CertFile != "" {
		// Read anew for each connection, so that a certificate may be renewed.
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(o.CertFile, o.KeyFile)
			return &pair, err
		}
		if _, err := tls.LoadX509KeyPair(o.CertFile, o.KeyFile); err != nil {
			return nil, fmt.Errorf("read the certificate for etcd: %w", err)
		}
	}
	return c, nil
}

// The keys below the prefix.
func (r *Registry) configKey() string                  { return r.Prefix + "/config" }
func (r *Registry) subnetsKey() string                 { return r.Prefix + "/subnets/" }
func (r *Registry) subnetKey(s Subnet) string          { return r.subnetsKey() + s.String() }
func (r *Registry) holdersKey() string                 { return r.Prefix + "/ebpf-cni/" }
func (r *Registry) holderKey(public netip.Addr) string { return r.holdersKey() + public.String() }

// errNoAnswer says that etcd is there, and too slow.
var errNoAnswer = fmt.Errorf("no answer within %v", answerTimeout)

// asked bounds the wait for one answer, and says which registry has not given it.
func (r *Registry) asked(ctx context.Context, ask func(context.Context) error) error {
	bounded, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	err := r.connect()
	if err == nil {
		err = ask(bounded)
	}
	if err == nil || ctx.Err() != nil {
		return err
	}
	if errors.Is(err, context.DeadlineExceeded) || bounded.Err() != nil {
		err = errNoAnswer
	}
	return fmt.Errorf("etcd at %s: %w", strings.Join(r.Endpoints, ","), err)
}

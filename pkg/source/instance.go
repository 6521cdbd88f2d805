package source

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/connrotation"
)

const (
	// connectTimeout bounds how long a connection to an API server may take to come about, checkTimeout how long its answer may
	// that it is ready.
	connectTimeout = 5 * time.Second
	checkTimeout   = 3 * time.Second
)

// ParseServer checks the address of an API server, such as https://10.0.0.1:6443, and returns it with its port.
func ParseServer(text string) (string, error) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Hostname() == "" {
		return "", fmt.Errorf("%q is no URL such as https://10.0.0.1:6443", text)
	}
	if u.User != nil || u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.ForceQuery || u.Fragment != "" {
		return "", fmt.Errorf("%q has more than a host and a port", u.Redacted())
	}
	port, err := strconv.ParseUint(cmp.Or(u.Port(), "443"), 10, 16)
	if err != nil || port == 0 {
		return "", fmt.Errorf("%q has no port from 1 to 65535", text)
	}
	return serverAt(u.Scheme, u.Hostname(), uint16(port)), nil
}

func serverAt(scheme, host string, port uint16) string {
	return scheme + "://" + net.JoinHostPort(host, strconv.Itoa(int(port)))
}

// instance is one API server of a cluster, as it is reached at one address.
type instance struct {
	at *url.URL // scheme, host and port
	// ways lead there; they differ in the name that the certificate has to be valid for. way is the one in use.
	ways        []http.RoundTripper
	way         atomic.Int32
	connections *connrotation.Dialer

	heard   atomic.Int64 // when anything was last read from it, in ns
	suspect atomic.Bool  // it has failed at a request since it was last checked

	// Of Servers, under its lock.
	lastResort bool // it is used only where all others fail
	worked     bool // it has been ready
	checked    time.Time
	err        error // of the newest check
}

// newInstance makes one that is reached with the credentials of a configuration. Its certificate has to be valid for the address,
// or for what the configuration names. Where the address was learnt, the latter alone counts: whoever may write an EndpointSlice
// chooses the address, and kubelets have certificates for theirs, while each API server has one for its Service's address.
func newInstance(config *rest.Config, at, named string, learnt bool) (*instance, error) {
	u, err := url.Parse(at)
	if err != nil {
		return nil, fmt.Errorf("read an API server's address: %w", err)
	}
	dialer := &net.Dialer{Timeout: connectTimeout, KeepAlive: 30 * time.Second}
	i := &instance{at: u, connections: connrotation.NewDialer(dialer.DialContext)}
	names := []string{config.ServerName}
	if config.ServerName == "" && u.Scheme == "https" && !config.Insecure && named != u.Hostname() {
		names = append(names, named)
		if learnt {
			names = names[1:]
		}
	}
	for _, name := range names {
		c := rest.CopyConfig(config)
		c.Host, c.Dial, c.ServerName = at, i.connections.DialContext, name
		way, err := rest.TransportFor(c)
		if err != nil {
			return nil, fmt.Errorf("prepare to reach the API server at %s: %w", at, err)
		}
		i.ways = append(i.ways, way)
	}
	return i, nil
}

func (i *instance) String() string { return i.at.String() }

// address is that of the instance; not valid: it is reached by a name.
func (i *instance) address() netip.AddrPort {
	host, err := netip.ParseAddr(i.at.Hostname())
	port, portErr := strconv.ParseUint(i.at.Port(), 10, 16)
	if err != nil || portErr != nil {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(host.Unmap(), uint16(port))
}

// RoundTrip sends a request here, wherever it was meant to go.
func (i *instance) RoundTrip(r *http.Request) (*http.Response, error) {
	sent := r.Clone(r.Context())
	sent.URL.Scheme, sent.URL.Host, sent.Host = i.at.Scheme, i.at.Host, i.at.Host
	way := i.way.Load()
	response, err := i.ways[way].RoundTrip(sent)
	if _, other := errors.AsType[x509.HostnameError](err); other && len(i.ways) > 1 {
		if way != 0 {
			i.way.Store(0)
		} else if onlyReads(r) {
			if again, err := i.ways[1].RoundTrip(sent); err == nil {
				i.way.Store(1)
				return i.listened(again), nil
			}
		}
	}
	if err != nil {
		return nil, err
	}
	return i.listened(response), nil
}

// onlyReads says whether a request can be sent again: nothing of it is used up.
func onlyReads(r *http.Request) bool { return r.Body == nil || r.Body == http.NoBody }

// listened has an answer say that something was heard.
func (i *instance) listened(response *http.Response) *http.Response {
	i.heard.Store(time.Now().UnixNano())
	response.Body = &noticed{response.Body, i}
	return response
}

// noticed is the body of an answer of an instance.
type noticed struct {
	io.ReadCloser
	from *instance
}

// Read implements io.Reader.
func (b *noticed) Read(into []byte) (int, error) {
	n, err := b.ReadCloser.Read(into)
	if n > 0 {
		b.from.heard.Store(time.Now().UnixNano())
	}
	return n, err
}

// errUnready is the answer of an API server that is there, but says of itself that others should be asked.
var errUnready = errors.New("not ready")

// check asks whether the instance is ready, as long as it may take.
func (i *instance) check(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, checkTimeout, fmt.Errorf("no answer within %v", checkTimeout))
	defer cancel()
	began := time.Now().UnixNano()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, i.at.JoinPath("readyz").String(), http.NoBody)
	if err != nil {
		return err
	}
	response, err := i.RoundTrip(r)
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
			if i.heard.Load() >= began { // it is slow, but it talks: what goes on there is not to be cut
				err = fmt.Errorf("%w, %w", errUnready, err)
			}
		}
		return fmt.Errorf("%v: %w", i, terse(err))
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(response.Body, 16<<10))
	_ = response.Body.Close()
	switch {
	case response.StatusCode == http.StatusUnauthorized: // perhaps another cluster's
		return fmt.Errorf("%v: answers %s to what the agent is known by", i, response.Status)
	case response.StatusCode >= http.StatusInternalServerError:
		return fmt.Errorf("%v: %w, /readyz answers %s", i, errUnready, response.Status)
	}
	return nil // one that does not let the agent ask is not worse for that
}

// terse is an error of a connection without its ends, of which one is another each time.
func terse(err error) error {
	if failed, is := errors.AsType[*net.OpError](err); is {
		return fmt.Errorf("%s: %w", failed.Op, failed.Err)
	}
	return err
}

// sameServers says whether two lists are of the same servers, in whatever order.
func sameServers(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

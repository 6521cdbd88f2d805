package source

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"sync"
	"time"

	"k8s.io/client-go/rest"
)

// ServersOptions are what is known of a cluster's API servers beside a configuration.
type ServersOptions struct {
	// Given are the addresses to use instead of the configuration's, as ParseServer returns them.
	Given []string
	// OfService says that the configuration's address is that of a Service, which this node may translate itself. Then the addresses
	// behind it are learnt, and used instead, unless others are given.
	OfService bool
	// Kept are addresses that were learnt before, and Keep is told of those to keep; nil: nobody keeps any.
	Kept []string
	Keep func([]string) error
	Log  *slog.Logger
	// times; zero: the usual ones.
	times times
}

// Servers are the API servers of a cluster, of which one is in use: any that is ready, until it fails, or one is drawn anew, which is
// every few hours. Where there is but one, it is reached, and nothing else is done.
type Servers struct {
	options ServersOptions
	config  *rest.Config  // has the credentials for all
	base    *url.URL      // what it names
	news    chan struct{} // readable when a look should not wait

	choosing sync.Mutex // of who looks for one that is ready

	mu        sync.Mutex
	all       []*instance
	inUse     *instance   // nil: none has been chosen
	away      error       // why none answers; nil: one does
	tried     time.Time   // when all were last tried
	draw      time.Time   // when one is to be drawn anew
	leaving   bool        // the one in use is none of those that were learnt last
	left      []*instance // were in use until a moment ago, and did not fail
	failovers uint64
	kept      []string
}

// NewServers makes them. It asks nobody for anything yet.
func NewServers(config *rest.Config, options ServersOptions) (*Servers, error) {
	base, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, fmt.Errorf("read the address of the API server: %w", err)
	}
	if options.times == (times{}) {
		options.times = usualTimes()
	}
	v := &Servers{options: options, config: config, base: base, news: make(chan struct{}, 1)}
	addresses := options.Given
	if v.learns() {
		v.kept = v.usable(options.Kept)
		addresses = v.kept
	}
	if len(options.Given) > 0 {
		base.Path = "" // which is of the address that is not used
	} else {
		addresses = append(slices.Clip(addresses), v.baseAddress())
	}
	v.all, err = v.instances(addresses)
	for _, i := range v.all {
		i.worked = slices.Contains(v.kept, i.String())
	}
	return v, err
}

// learns says whether addresses are learnt.
func (v *Servers) learns() bool { return v.options.OfService && len(v.options.Given) == 0 }

// baseAddress is the address that the configuration names.
func (v *Servers) baseAddress() string {
	port := v.base.Port()
	if port == "" {
		port = map[string]string{"http": "80"}[v.base.Scheme]
	}
	if port == "" {
		port = "443"
	}
	return v.base.Scheme + "://" + net.JoinHostPort(v.base.Hostname(), port)
}

// instances makes one for each address, of those that are there already it takes these.
func (v *Servers) instances(addresses []string) (all []*instance, err error) {
	have := map[string]*instance{}
	for _, i := range v.all {
		have[i.String()] = i
	}
	for _, at := range addresses {
		i := have[at]
		if i == nil {
			if i, err = newInstance(v.config, at, v.base.Hostname(), v.learns()); err != nil {
				return nil, err
			}
		}
		i.lastResort = v.learns() && at == v.baseAddress()
		all = append(all, i)
	}
	return all, nil
}

// Config is how to reach whichever API server is in use. It has no credentials: those are given to the servers.
func (v *Servers) Config() *rest.Config {
	c := rest.AnonymousClientConfig(v.config)
	c.Host = v.base.String()
	c.Transport, c.TLSClientConfig, c.Dial, c.Proxy = v, rest.TLSClientConfig{}, nil, nil
	return c
}

// nameOf is what a configuration's API server is called in texts.
func nameOf(config *rest.Config) string {
	if v, several := config.Transport.(*Servers); several {
		return v.name()
	}
	return config.Host
}

func (v *Servers) name() string {
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case len(v.all) == 1:
		return v.all[0].String()
	case v.inUse == nil || v.away != nil:
		return "any API server"
	}
	return v.inUse.String()
}

// RoundTrip implements http.RoundTripper. A request that only reads goes to another API server when the one in use fails.
func (v *Servers) RoundTrip(r *http.Request) (*http.Response, error) {
	i, err := v.choice(r.Context())
	for err == nil {
		var response *http.Response
		response, err = i.RoundTrip(r)
		if err == nil {
			v.weigh(i, response.StatusCode)
			return response, nil
		}
		next := v.doubt(r.Context(), i)
		if next == i || !onlyReads(r) {
			return nil, v.explain(i, err)
		}
		if i, err = next, nil; i == nil {
			i, err = v.choice(r.Context())
		}
	}
	return nil, err
}

// weigh has an API server checked that answers that it can't.
func (v *Servers) weigh(i *instance, status int) {
	if status >= http.StatusInternalServerError && !i.suspect.Swap(true) {
		poke(v.news)
	}
}

// serverError is what a request to one of several API servers failed with.
type serverError struct {
	at  string
	err error
}

// Error implements error.
func (e *serverError) Error() string { return e.at + ": " + e.err.Error() }

// Unwrap returns the cause.
func (e *serverError) Unwrap() error { return e.err }

// ErrNoAddress says that an API server has only the address of a Service, and nobody translates that.
var ErrNoAddress = errors.New("--api-server is missing: this is a Service's address, which nobody translates on this node yet")

// explain says what a request failed at.
func (v *Servers) explain(i *instance, err error) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	failed, connects := errors.AsType[*net.OpError](err)
	switch {
	case len(v.all) > 1:
		return &serverError{i.String(), err}
	case i.lastResort && connects && failed.Op == "dial":
		return fmt.Errorf("%w (%w)", ErrNoAddress, err)
	}
	return err
}

// ServersState is what there is to say of API servers.
type ServersState struct {
	InUse     string // empty: none answers, or none has been asked
	Known     int    // how many there are
	Failovers uint64 // how often the one in use has failed and another was taken
}

// State tells which API server is in use.
func (v *Servers) State() ServersState {
	v.mu.Lock()
	defer v.mu.Unlock()
	s := ServersState{Known: len(v.all), Failovers: v.failovers}
	switch {
	case len(v.all) == 1:
		s.InUse = v.all[0].String()
	case v.inUse != nil && v.away == nil:
		s.InUse = v.inUse.String()
	}
	return s
}

// Addresses are those of all API servers that are not reached by a name.
func (v *Servers) Addresses() (all []netip.AddrPort) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, i := range v.all {
		if a := i.address(); a.IsValid() {
			all = append(all, a)
		}
	}
	return all
}

// closeLeft ends what still goes on at those that were left without a failure. Short requests have had the time to end by themselves.
func (v *Servers) closeLeft() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, i := range v.left {
		if i != v.inUse {
			i.connections.CloseAll()
		}
	}
	v.left = nil
}

// poke makes a channel readable.
func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Run checks the API server in use now and then, and those that have become known, until ctx ends.
func (v *Servers) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(jittered(v.options.times.interval)):
			v.closeLeft()
		case <-v.news:
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(jittered(v.options.times.delay)):
			}
		}
		v.look(ctx)
		v.save()
	}
}

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/ebpf-cni/ebpf-cni/pkg/health"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
)

// server is one listener of the agent: the one for everything, or the one for metrics alone.
type server struct {
	name, address string
	handler       http.Handler
	refuse        func(own net.Listener) net.Listener // whom; nil: nobody
	kubeProxys    time.Duration                       // for how long that may be away from the port, which is its; 0: it is not
}

// maxRestart is for how long kube-proxy may be away while it restarts. It has its ports again if nobody else takes them.
const maxRestart = time.Minute

// Where kube-proxy answers, unless it is told otherwise: others on the first, the node's own processes on the second.
const (
	healthAddress = ":10256"
	modeAddress   = "127.0.0.1:10249"
)

// serversFor are those that the flags name, and those that kube-proxy would have where we are in its place.
func (a *agent) serversFor(metrics http.Handler) (all []server) {
	restricted := func(l net.Listener) net.Listener { return restrict(l, a.status.isPod) }
	if a.cfg.Listen != "" {
		all = append(all, server{"--listen", a.cfg.Listen, a.status.handler(metrics, true), restricted, 0})
	}
	if a.cfg.MetricsListen != "" {
		all = append(all, server{"--metrics-listen", a.cfg.MetricsListen, a.status.handler(metrics, false), nil, 0})
	}
	if a.cfg.servesServices() {
		all = append(all,
			server{"health of Services", healthAddress, health.Node(a.status.health), nil, maxRestart},
			server{"mode of Services", modeAddress, health.Mode("ebpf", metrics), restricted, maxRestart})
	}
	return all
}

// Scrapes may cost the agent little, whoever asks and however often. Those within scrapeAge of each other get the same
// samples. maxScrapes are answered at a time, and as many more every scrapePause; others wait, for at most scrapeWait.
const (
	maxScrapes  = 2
	scrapeAge   = time.Second
	scrapePause = 100 * time.Millisecond
	scrapeWait  = time.Second
)

// serveMetrics serves what is registered, for all listeners together.
func serveMetrics(reg *prometheus.Registry) http.Handler {
	samples := prometheus.GathererFunc(kept(scrapeAge, reg.Gather))
	answer := promhttp.HandlerFor(samples, promhttp.HandlerOpts{})
	free := make(chan struct{}, maxScrapes)
	for range maxScrapes {
		free <- struct{}{}
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-free:
		case <-r.Context().Done():
			return
		case <-time.After(scrapeWait):
			http.Error(w, fmt.Sprintf("%d others are being answered, try again later", maxScrapes), http.StatusServiceUnavailable)
			return
		}
		began := time.Now()
		defer func() {
			time.AfterFunc(scrapePause-time.Since(began), func() { free <- struct{}{} })
		}()
		answer.ServeHTTP(w, r)
	})
}

// kept returns a function that calls get, one call at a time, and keeps what it returns for d.
func kept[T any](d time.Duration, get func() (T, error)) func() (T, error) {
	var (
		mu    sync.Mutex
		until time.Time
		value T
		err   error
	)
	return func() (T, error) {
		mu.Lock()
		defer mu.Unlock()
		if !time.Now().Before(until) {
			value, err = get()
			until = time.Now().Add(d)
		}
		return value, err
	}
}

// handler serves metrics and, if all is to be served, health.
func (s *status) handler(metrics http.Handler, all bool) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics)
	if !all {
		return mux
	}
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if silent := time.Since(s.read().alive); silent > observe.MaxSilence {
			http.Error(w, "stuck for "+silent.Round(time.Second).String(), http.StatusServiceUnavailable)
			return
		}
		_, _ = fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if why := s.reason(); why != "" {
			http.Error(w, "not ready: "+why, http.StatusServiceUnavailable)
			return
		}
		_, _ = fmt.Fprintln(w, "ok")
	})
	return mux
}

// serve answers until ctx ends. While the address is not to be had, or not there yet, it tries again: no packet and no pod
// depends on it.
func (a *agent) serve(ctx context.Context, s server) error {
	about := "listeners/" + s.name
	var until time.Time // it is left to kube-proxy
	return repeat(ctx, func() time.Duration {
		if s.kubeProxys > 0 && a.status.waits() {
			a.complaints.note(about, nil)
			return inspectInterval
		}
		l, err := net.Listen("tcp", s.address)
		if errors.Is(err, syscall.EADDRINUSE) {
			until = time.Now().Add(s.kubeProxys)
		}
		if a.leave(s.address, until) {
			if err == nil {
				_ = l.Close()
			}
			a.complaints.note(about, nil)
			return portRetry
		}
		if err == nil {
			a.complaints.note(about, nil)
			if s.refuse != nil {
				l = s.refuse(l)
			}
			err = s.answer(ctx, l, a.log, a.status.waits)
		}
		if ctx.Err() == nil && !errors.Is(err, http.ErrServerClosed) {
			a.complaints.note(about, err)
		}
		return retry
	})
}

// leave says whether an address is left to kube-proxy, which has had its port a moment ago. Its answers are as good, and nothing is wrong.
func (a *agent) leave(address string, until time.Time) bool {
	leaves := a.status.leaves(until)
	if a.status.leave(address, leaves) {
		if leaves {
			a.log.Info("the port of an address where kube-proxy answers is in use, and left to it until it has been free for a while", "address", address)
		} else {
			a.log.Info("an address where kube-proxy answered is not left to it any more", "address", address)
		}
	}
	return leaves
}

// answer answers on a listener until ctx ends, or the listener fails, or it is kube-proxy's.
func (s server) answer(ctx context.Context, l net.Listener, log *slog.Logger, kubeProxys func() bool) error {
	srv := httpServer(s.handler, log, new(connections))
	var watching sync.WaitGroup
	defer watching.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	context.AfterFunc(ctx, func() { _ = srv.Close() })
	if s.kubeProxys > 0 {
		watching.Go(func() {
			_ = repeat(ctx, func() time.Duration {
				if kubeProxys() {
					cancel()
				}
				return inspectInterval
			})
		})
	}
	return srv.Serve(l)
}

// httpServer is a server that costs little, whoever asks.
func httpServer(handler http.Handler, log *slog.Logger, open *connections) *http.Server {
	const requestTimeout = 5 * time.Second
	return &http.Server{
		Handler: handler, ReadHeaderTimeout: requestTimeout, ReadTimeout: requestTimeout, WriteTimeout: 2 * requestTimeout,
		IdleTimeout: 6 * requestTimeout, MaxHeaderBytes: 8 << 10, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		ConnState: open.follow,
	}
}

// restrictedListener closes connections from those it is not for: on a loopback
// address from everybody outside this host (kube-proxy's route_localnet lets packets
// to 127.0.0.0/8 in, so a pod could reach it), on any other address from pods.
type restrictedListener struct {
	net.Listener
	refuse func(netip.Addr) bool
}

// Accept implements net.Listener.
func (l restrictedListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from, ok := address(c.RemoteAddr())
		if ok && !l.refuse(from) {
			return c, nil
		}
		_ = c.Close()
	}
}

func address(a net.Addr) (netip.Addr, bool) {
	p, err := netip.ParseAddrPort(a.String())
	return p.Addr().Unmap(), err == nil
}

// restrict keeps the agent's own listener to those whom it is for.
func restrict(l net.Listener, isPod func(netip.Addr) bool) net.Listener {
	if own, ok := address(l.Addr()); ok && own.IsLoopback() {
		return restrictedListener{l, func(a netip.Addr) bool { return !a.IsLoopback() }}
	}
	return restrictedListener{l, isPod}
}

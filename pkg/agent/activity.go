package agent

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// What the agent puts right, beside the pieces of endpoints, as a label says it.
const (
	repairedPin         = "pin"
	repairedUplink      = "uplink program"
	repairedTunnel      = "tunnel"
	repairedRoute       = "cluster route"
	repairedDestination = "cluster destination"
	repairedSysctl      = "host sysctl"
	repairedList        = "network configuration list"
	repairedPlugin      = "plugin"
	repairedService     = "service entry"
	repairedSocket      = "socket program"
)

// activity is how much the agent itself has to do. Unlike what the programs count it begins anew with each start.
type activity struct {
	rounds  *prometheus.HistogramVec
	repairs *prometheus.CounterVec
	locks   *prometheus.HistogramVec
	synced  prometheus.Histogram
}

func newActivity() activity {
	buckets := prometheus.ExponentialBuckets(0.001, 4, 8)
	a := activity{
		rounds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: prefix + "pass_duration_seconds", Buckets: buckets,
			Help: "How long the agent took to look at the node and put it right (pass), to apply new Nodes (replan), and to look for what vanishes without a notice (inspect).",
		}, []string{"kind"}),
		repairs: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: prefix + "repairs_total", Help: "What the agent found missing or changed by others and put right: pieces of pods, routes to pods of other nodes, destinations, sysctls of the host, entries of Services, pins, programs of uplinks and of the node's sockets, the tunnel, the plugin and the list.",
		}, []string{"what"}),
		locks: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: prefix + "lock_wait_seconds", Buckets: buckets,
			Help: "How long the agent waited for the lock that it shares with the plugin, by the work that needed it, also in vain.",
		}, []string{"work"}),
		synced: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: prefix + "service_sync_duration_seconds", Buckets: buckets,
			Help: "How long changes of Services and their endpoints took from when the agent heard of them to the programs' maps.",
		}),
	}
	// A counter that appears with its first event would hide that one from a rate.
	for _, kind := range []string{kindPass, kindReplan, kindInspect} {
		a.rounds.WithLabelValues(kind)
	}
	for _, what := range append(endpoint.Repairable(), repairedPin, repairedUplink, repairedTunnel, repairedRoute,
		repairedDestination, repairedSysctl, repairedList, repairedPlugin, repairedService, repairedSocket) {
		a.repairs.WithLabelValues(what)
	}
	return a
}

func (a activity) collectors() []prometheus.Collector {
	return []prometheus.Collector{a.rounds, a.repairs, a.locks, a.synced}
}

// The kinds of rounds.
const (
	kindPass    = "pass"
	kindReplan  = "replan"
	kindInspect = "inspect"
)

// took notes how long a round has taken.
func (a activity) took(kind string, since time.Time) {
	a.rounds.WithLabelValues(kind).Observe(time.Since(since).Seconds())
}

// servicesSynced notes that the maps hold the Services of that change.
func (a activity) servicesSynced(changed time.Time) { a.synced.Observe(time.Since(changed).Seconds()) }

// repaired notes that n things of a kind have been put right.
func (a activity) repaired(what string, n int) { a.repairs.WithLabelValues(what).Add(float64(n)) }

// waited notes a wait for the node's lock, see bpffs.WithWaits.
func (a activity) waited(work string, d time.Duration) {
	a.locks.WithLabelValues(work).Observe(d.Seconds())
}

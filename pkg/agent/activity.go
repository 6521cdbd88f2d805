package agent

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// What the agent puts right, beside the pieces of endpoints, as a label says it.
const (
	repairedPin         = "pin"
	repairedUplink      = "uplink program"
	repairedBridge      = "bridge program"
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
	began              time.Time
	rounds             *prometheus.HistogramVec
	repairs            *prometheus.CounterVec
	locks              *prometheus.HistogramVec
	synced, programmed prometheus.Histogram
}

// The buckets of changes of Services: an agent takes milliseconds, and seconds only where something is wrong; what a cluster
// takes as a whole is asked to be below 30 s.
var (
	syncBuckets    = []float64{.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60}
	programBuckets = []float64{.25, .5, 1, 1.5, 2, 3, 4, 5, 7.5, 10, 15, 20, 30, 45, 60, 120, 300}
)

func newActivity() activity {
	buckets := prometheus.ExponentialBuckets(0.001, 4, 8)
	a := activity{
		began: time.Now(),
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
			Name: prefix + "service_sync_duration_seconds", Buckets: syncBuckets,
			Help: "How long each change of a Service or an EndpointSlice took from when the agent heard of it to the programs' maps, by which the next packet goes; whole lists count once.",
		}),
		programmed: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: prefix + "network_programming_duration_seconds", Buckets: programBuckets,
			Help: "How long it took from when a pod became ready, or a Service was made, to the programs' maps, as kube-proxy's metric of that name: from the time that EndpointSlices say, by another clock and in whole seconds.",
		}),
	}
	// A counter that appears with its first event would hide that one from a rate.
	for _, kind := range []string{kindPass, kindReplan, kindInspect} {
		a.rounds.WithLabelValues(kind)
	}
	for _, what := range append(endpoint.Repairable(), repairedPin, repairedUplink, repairedBridge, repairedTunnel, repairedRoute,
		repairedDestination, repairedSysctl, repairedList, repairedPlugin, repairedService, repairedSocket) {
		a.repairs.WithLabelValues(what)
	}
	return a
}

func (a activity) collectors() []prometheus.Collector {
	return []prometheus.Collector{a.rounds, a.repairs, a.locks, a.synced, a.programmed}
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

// servicesSynced notes that the maps hold Services as they are after these changes. What happened before this agent says nothing of it.
func (a activity) servicesSynced(changes []service.Change) {
	for _, c := range changes {
		a.synced.Observe(time.Since(c.Noticed).Seconds())
		if c.Triggered.After(a.began) {
			a.programmed.Observe(max(0, time.Since(c.Triggered).Seconds())) // two clocks
		}
	}
}

// repaired notes that n things of a kind have been put right.
func (a activity) repaired(what string, n int) { a.repairs.WithLabelValues(what).Add(float64(n)) }

// waited notes a wait for the node's lock, see bpffs.WithWaits.
func (a activity) waited(work string, d time.Duration) {
	a.locks.WithLabelValues(work).Observe(d.Seconds())
}

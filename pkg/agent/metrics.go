package agent

import (
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
)

func describeMetric(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("ebpf_cni_"+name, help, labels, nil)
}

// metrics reads the maps when it is asked, so that nothing is counted twice and
// a restart of the agent sets no counter back.
type metrics struct {
	maps   *datapath.Maps
	pins   bpffs.Dir
	status *status
	log    *slog.Logger

	mapEntries, mapCapacity, drops, packets, bytes *prometheus.Desc
	allocations, retries, failures                 *prometheus.Desc
	lag, nodes, endpoints, nodeProblems            *prometheus.Desc
	conflicts, ready, beside                       *prometheus.Desc
}

func newRegistry(maps *datapath.Maps, pins bpffs.Dir, s *status, log *slog.Logger) *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		&metrics{
			maps: maps, pins: pins, status: s, log: log,
			mapEntries:   describeMetric("map_entries", "Entries in a map.", "map"),
			mapCapacity:  describeMetric("map_capacity", "Entries that a map can hold.", "map"),
			drops:        describeMetric("drops_total", "Packets that did not get through, by reason.", "reason"),
			packets:      describeMetric("packets_total", "Packets that a program saw, by direction.", "direction"),
			bytes:        describeMetric("bytes_total", "Bytes of whole frames that a program saw, by direction.", "direction"),
			allocations:  describeMetric("snat_allocations_total", "Ports chosen for new masqueraded flows."),
			retries:      describeMetric("snat_retries_total", "Ports that were tried and found taken."),
			failures:     describeMetric("snat_failures_total", "Packets dropped because their flow could not be masqueraded."),
			lag:          describeMetric("sync_lag_seconds", "How long the newest change of a Node took to reach the packets' way, or has been waiting to."),
			nodes:        describeMetric("nodes", "Nodes in the list."),
			endpoints:    describeMetric("endpoints", "Pods of this node."),
			nodeProblems: describeMetric("node_problems", "What is wrong with Nodes, by node and reason.", "node", "reason"),
			conflicts:    describeMetric("endpoint_conflicts", "Pods of this node whose address another pod, or somebody else's route, has."),
			ready:        describeMetric("ready", "1 when this node can carry a pod."),
			beside:       describeMetric("beside_netfilter", "1 while packets meet netfilter because it translates addresses on this node."),
		})
	return reg
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(m, ch) }

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	now := m.status.read()
	gauge(m.nodes, float64(now.nodes))
	gauge(m.lag, now.syncLag(time.Now()).Seconds())
	gauge(m.conflicts, float64(now.conflicts))
	gauge(m.ready, oneIf(now.notReady == ""))
	gauge(m.beside, oneIf(now.beside))
	for p, n := range now.problems {
		gauge(m.nodeProblems, float64(n), p.node, string(p.reason))
	}
	fills, err := observe.Fills(m.pins)
	if err != nil {
		m.log.Warn("maps can't be counted", "error", err)
	}
	for _, f := range fills {
		gauge(m.mapEntries, float64(f.Entries), f.Name)
		gauge(m.mapCapacity, float64(f.Capacity), f.Name)
	}
	if pods, err := countPods(m.maps.Endpoints); err != nil {
		m.log.Warn("endpoints can't be counted", "error", err)
	} else {
		gauge(m.endpoints, float64(pods))
	}
	m.sumTraffic(ch)
}

func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// countPods counts pods by their links: one with two addresses has two entries.
func countPods(m *endpoints.Map) (int, error) {
	links := map[uint32]bool{}
	for e, err := range m.All() {
		if err != nil {
			return 0, err
		}
		links[e.Value.Ifindex] = true
	}
	return len(links), nil
}

// sumTraffic adds up what the programs counted.
func (m *metrics) sumTraffic(ch chan<- prometheus.Metric) {
	dropped, err := m.maps.Drops.All()
	if err != nil {
		m.log.Warn("drops can't be read", "error", err)
		return
	}
	passed, err := m.maps.Traffic.All()
	if err != nil {
		m.log.Warn("traffic can't be read", "error", err)
		return
	}
	t := addUp(dropped, passed)
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	for r, n := range t.drops {
		if drops.Reason(r) != drops.None {
			counter(m.drops, n, drops.Reason(r).String())
		}
	}
	for d := range t.packets {
		counter(m.packets, t.packets[d], wire.Direction(d).String())
		counter(m.bytes, t.bytes[d], wire.Direction(d).String())
	}
	counter(m.allocations, t.allocations)
	counter(m.retries, t.retries)
	counter(m.failures, t.failures())
}

// totals are the programs' counters, added up. Each packet of a direction is
// counted either among the drops or under one of the first four events.
type totals struct {
	drops                [drops.Reasons]uint64
	packets, bytes       [wire.Directions]uint64
	allocations, retries uint64
}

func addUp(dropped []drops.Counter, passed []traffic.Counter) (t totals) {
	for _, c := range dropped {
		if c.Slot < drops.Reasons {
			t.drops[c.Slot] += c.Packets
		}
		t.packets[c.Direction] += c.Packets
		t.bytes[c.Direction] += c.Bytes
	}
	for _, c := range passed {
		switch c.Slot {
		case traffic.SnatAllocated:
			t.allocations += c.Packets
		case traffic.SnatRetried:
			t.retries += c.Packets
		default:
			t.packets[c.Direction] += c.Packets
			t.bytes[c.Direction] += c.Bytes
		}
	}
	return t
}

// failures are the flows that could not be masqueraded, whatever the table or
// the range lacked.
func (t totals) failures() uint64 {
	return t.drops[drops.SnatExhausted] + t.drops[drops.SnatLimit] + t.drops[drops.SnatFull] + t.drops[drops.NoSnatAddress]
}

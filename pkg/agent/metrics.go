package agent

import (
	"errors"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
	"github.com/ebpf-cni/ebpf-cni/pkg/install"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// prefix begins the name of each metric.
const prefix = "ebpf_cni_"

// metrics reads the maps when it is asked, so that nothing is counted twice and
// a restart of the agent sets no counter back.
type metrics struct{ *node }

// scrapes are what reads the maps for whoever asks for metrics. A request may outlive its listener, but none reads them once they have
// ended: where the agent starts anew, other maps have their descriptors then.
type scrapes struct {
	mu    sync.Mutex
	ended bool
}

func (s *scrapes) read(maps func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		maps()
	}
}

// end returns when nothing reads the maps any more.
func (s *scrapes) end() { s.read(func() { s.ended = true }) }

// newRegistry registers all metrics of a node. Gathering is for one goroutine at a time.
func newRegistry(n *node) *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(append(n.status.collectors(),
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		metrics{n},
	)...)
	return reg
}

// Describe implements prometheus.Collector.
func (m metrics) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(m, ch) }

// sample is how one value is sent; labels are names and values alternately.
type sample func(name string, v float64, help string, labels ...string)

func samples(ch chan<- prometheus.Metric, of prometheus.ValueType) sample {
	return func(name string, v float64, help string, labels ...string) {
		var names, values []string
		for pair := range slices.Chunk(labels, 2) {
			names, values = append(names, pair[0]), append(values, pair[1])
		}
		ch <- prometheus.MustNewConstMetric(prometheus.NewDesc(prefix+name, help, names, nil), of, v, values...)
	}
}

// Collect implements prometheus.Collector.
func (m metrics) Collect(ch chan<- prometheus.Metric) { m.scrapes.read(func() { m.collect(ch) }) }

func (m metrics) collect(ch chan<- prometheus.Metric) {
	gauge, counter := samples(ch, prometheus.GaugeValue), samples(ch, prometheus.CounterValue)
	m.describe(gauge)
	m.describeAPI(gauge, counter)
	for about, collect := range map[string]func() error{
		"the maps' fill":          func() error { return m.countEntries(gauge) },
		"the number of endpoints": func() error { return m.countPods(gauge) },
		"the addresses":           func() error { return m.countAddresses(gauge) },
		"flows from outside":      func() error { return m.countOutside(gauge) },
		"the programs' counters":  func() error { return m.sumTraffic(counter) },
	} {
		m.complaints.note("metrics/"+about, collect())
	}
}

// describe tells what the agent knows itself.
func (m metrics) describe(gauge sample) {
	now := m.status.read()
	gauge("build_info", 1, "Always 1; the labels say which build this is.",
		"version", m.cfg.Version, "revision", revision(), "goversion", runtime.Version(), "layout", strconv.Itoa(wire.LayoutVersion))
	gauge("nodes", float64(now.nodes), "Nodes in the list.")
	gauge("sync_lag_seconds", now.syncLag(time.Now()).Seconds(),
		"How long the newest change of a Node took to reach the packets' way, or has been waiting to.")
	gauge("endpoint_conflicts", float64(now.conflicts), "Pods of this node whose address another pod has.")
	gauge("ready", oneIf(now.notReady == ""), "1 when this node can carry a pod.")
	gauge("beside_netfilter", oneIf(now.netfilter == netfilter.Translates), "1 while packets meet netfilter because it may translate pods' addresses on this node.")
	gauge("beside_masquerading", oneIf(now.netfilter == netfilter.Masquerades), "1 while netfilter translates others' packets alone, so that pods' bypass it.")
	m.collectSource(gauge, now)
	for _, way := range []destinations.Way{destinations.Direct, destinations.Tunnel, destinations.None} {
		gauge("node_ways", float64(now.ways[way]), "Other nodes, by the way to their pods, in the family of their first podCIDR: direct, tunnel, or none.", "way", string(way))
	}
	m.describeServices(gauge, now.services)
	network := map[string]int{}
	for _, p := range now.networkProblems {
		network[p.Reason]++
	}
	for _, reason := range networkReasons() {
		gauge("network_problems", float64(network[reason]),
			"Faults of this node's surroundings that pods meet, by reason; the log and ebpfctl status name them and what mends them.", "reason", reason)
	}
	for _, reason := range append(plan.Reasons(), neighbourTable) {
		gauge("node_problems", float64(now.problems[reason]),
			"What is wrong with Nodes, by reason; the log and ebpfctl status name them.", "reason", string(reason))
	}
}

// describeAPI tells which API server the agent goes by.
func (m metrics) describeAPI(gauge, counter sample) {
	if m.api == nil {
		return
	}
	s := m.api.State()
	gauge("api_servers", float64(s.Known), "Addresses of API servers that the agent knows.")
	counter("api_server_failovers_total", float64(s.Failovers), "How often the API server in use has failed and another one was taken.")
	if s.InUse != "" {
		gauge("api_server_in_use", 1, "Always 1; the label names the API server that the agent goes by. Of several, none while none answers.", "server", s.InUse)
	}
}

// describeServices tells of the Services that are served. The maps of sets, backends and slots are arrays, whose fill the agent knows alone.
func (m metrics) describeServices(gauge sample, now serviceReport) {
	if !m.cfg.servesServices() {
		return
	}
	gauge("services", float64(now.services), "Services that have an address of their own.")
	left := m.status.read().yields
	if !left.any() { // else load balancers ask others
		gauge("services_healthy", oneIf(m.status.health().Serves()), "1 while load balancers are told that this node serves Services; none where those ask kube-proxy.")
	}
	for family, where := range left {
		gauge("services_yielded", oneIf(where != ""), "1 while Services of the family are left to kube-proxy's rules (--services auto).", "family", wire.Family(family).Name())
	}
	gauge("service_backends", float64(now.used.Backends), "Endpoints of Services' ports, each counted once for a port.")
	for _, f := range []struct {
		name           string
		used, capacity uint32
	}{
		{services.SetsName, now.used.Sets, now.capacities.Sets},
		{backends.Name, now.used.Backends, now.capacities.Backends},
		{backends.SlotsName, now.used.Slots, now.capacities.Slots},
	} {
		m.fill(gauge, observe.Fill{Name: f.name, Entries: uint64(f.used), Capacity: uint64(f.capacity)})
	}
	problems := map[service.Reason]int{}
	for _, p := range now.problems {
		problems[p.Reason]++
	}
	for _, reason := range service.Reasons() {
		gauge("service_problems", float64(problems[reason]),
			"What is wrong with Services, by reason; the log, Events and ebpfctl status name them.", "reason", reasonOf(reason))
	}
}

// revision is the commit of this build, where it is recorded; else empty.
func revision() string {
	build, _ := debug.ReadBuildInfo()
	if build == nil {
		return ""
	}
	for _, s := range build.Settings {
		if s.Key == "vcs.revision" {
			return s.Value
		}
	}
	return ""
}

func (m metrics) countEntries(gauge sample) error {
	fills, err := observe.Fills(m.cfg.BPFFS)
	for _, f := range fills {
		m.fill(gauge, f)
	}
	return err
}

func (m metrics) fill(gauge sample, f observe.Fill) {
	gauge("map_entries", float64(f.Entries), "Entries in a map; not of clients and sockets, which make room for what is new.", "map", f.Name)
	gauge("map_capacity", float64(f.Capacity), "Entries that a map can hold.", "map", f.Name)
}

func (m metrics) countPods(gauge sample) error {
	pods, err := countPods(m.dp.Maps.Endpoints)
	if err == nil {
		gauge("endpoints", float64(pods), "Pods of this node.")
	}
	return err
}

// countAddresses counts those of this node's podCIDRs.
func (m metrics) countAddresses(gauge sample) error {
	store, err := ipam.Open(m.cfg.State, install.Network, ipam.Options{Quarantine: m.cfg.Quarantine})
	if err != nil {
		return err
	}
	for _, own := range m.status.read().own {
		usage, err := store.Usage(own)
		if err != nil {
			return err
		}
		for state, n := range map[string]int{string(ipam.Used): usage.Used, string(ipam.Quarantined): usage.Quarantined, "free": usage.Free} {
			gauge("addresses", float64(n), "Addresses of this node's podCIDRs, by family and state: used by pods, free, or quarantined, which were freed a moment ago and are given last.",
				"family", wire.FamilyOf(own.Addr()).String(), "state", state)
		}
	}
	return nil
}

// countOutside counts the flows that clients outside hold.
func (m metrics) countOutside(gauge sample) error {
	if !m.frontends() {
		return nil
	}
	world, err := m.dp.Maps.Devices.Get(devices.Key{Ifindex: devices.World})
	if errors.Is(err, typed.ErrKeyNotExist) { // before the controller of Services has made it, as when metrics are registered
		err = nil
	}
	if err == nil {
		gauge("outside_flows", float64(world.SnatFlows), "Flows of clients outside to Services and host ports, all of which have one share of the map snat.")
	}
	return err
}

// collectSource says whether what the node goes by is what the cluster says, and what is not as it should be.
func (m metrics) collectSource(gauge sample, now figures) {
	gauge("source_connected", oneIf(now.connected), "1 while the API server, or the file, of which the Nodes come can be read.")
	stamp := func(name string, at time.Time, help string) {
		if !at.IsZero() {
			gauge(name, float64(at.UnixMilli())/1e3, help)
		}
	}
	stamp("source_last_contact_timestamp_seconds", now.heard, "When anything was last heard from there.")
	stamp("last_sync_timestamp_seconds", now.lastSync, "When the packets' way last agreed with all Nodes that are known.")
	for controller, is := range now.degraded {
		gauge("degraded", oneIf(is), "1 while a controller has a problem that keeps no pod from being carried.", "controller", controller)
	}
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
func (m metrics) sumTraffic(counter sample) error {
	dropped, err := m.dp.Maps.Drops.All()
	if err != nil {
		return err
	}
	passed, err := m.dp.Maps.Traffic.All()
	if err != nil {
		return err
	}
	t := addUp(dropped, passed)
	for r, n := range t.drops {
		if drops.Reason(r) != drops.None {
			counter("drops_total", float64(n), "Packets that did not get through, by reason.", "reason", drops.Reason(r).String())
		}
	}
	for d := range t.packets {
		direction := wire.Direction(d).String()
		counter("packets_total", float64(t.packets[d]), "Packets that a program saw, by direction; of socket, refusals of the node's own processes, before there is a packet.", "direction", direction)
		counter("bytes_total", float64(t.bytes[d]), "Bytes of whole frames that a program saw, by direction.", "direction", direction)
	}
	counter("snat_allocations_total", float64(t.allocations), "Ports chosen for new masqueraded flows.")
	counter("snat_retries_total", float64(t.retries), "Ports that were tried and found taken.")
	counter("snat_failures_total", float64(t.refused), "Packets of pods, or of the node, dropped because their flow could not be masqueraded, or opened to a Service or a host port.")
	if m.frontends() {
		counter("outside_failures_total", float64(t.refusedOutside), "Packets of clients outside dropped because their flow to a Service or a host port could not be opened.")
	}
	return nil
}

// totals are the programs' counters, added up. Each packet of a direction is
// counted either among the drops or under one of the first four events.
type totals struct {
	drops                [drops.Reasons]uint64
	packets, bytes       [wire.Directions]uint64
	allocations, retries uint64
	// refused are the packets whose flow could not be opened, whatever the table or the range lacked; those of clients outside
	// are by themselves, as anybody can send too many of them.
	refused, refusedOutside uint64
}

func addUp(dropped []drops.Counter, passed []traffic.Counter) (t totals) {
	for _, c := range dropped {
		if c.Slot < drops.Reasons {
			t.drops[c.Slot] += c.Packets
		}
		t.packets[c.Direction] += c.Packets
		t.bytes[c.Direction] += c.Bytes
		switch {
		case !slices.Contains(noFlow, c.Slot):
		case c.Direction == wire.FromUplink || c.Direction == wire.FromTunnel:
			t.refusedOutside += c.Packets
		default:
			t.refused += c.Packets
		}
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

// noFlow are why a flow can't be opened.
var noFlow = []drops.Reason{drops.SnatExhausted, drops.PortLimit, drops.SnatLimit, drops.SnatFull, drops.NoSnatAddress}

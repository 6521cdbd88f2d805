package agent

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"

	"github.com/ebpf-cni/ebpf-cni/maps/counters"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

func TestCountPods(t *testing.T) {
	l := testLoop(t)
	for address, ifindex := range map[string]uint32{"10.244.1.2": 7, "fd00::2": 7, "10.244.1.3": 9} {
		key := endpoints.Key{Address: wire.AddrFrom(netip.MustParseAddr(address))}
		if err := l.dp.Maps.Endpoints.Put(key, endpoints.Value{Ifindex: ifindex}); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := countPods(l.dp.Maps.Endpoints); n != 2 || err != nil {
		t.Errorf("%d pods, error %v; want 2: one has two addresses", n, err)
	}
}

func TestAddUp(t *testing.T) {
	total := addUp([]drops.Counter{
		{Direction: wire.FromPod, Slot: drops.SnatExhausted, Value: counters.Value{Packets: 2, Bytes: 20}},
		{Direction: wire.ToUplink, Slot: drops.SnatExhausted, Value: counters.Value{Packets: 1, Bytes: 10}},
		{Direction: wire.FromPod, Slot: drops.PortLimit, Value: counters.Value{Packets: 6, Bytes: 60}},
		{Direction: wire.FromUplink, Slot: drops.SnatLimit, Value: counters.Value{Packets: 16, Bytes: 160}},
		{Direction: wire.FromTunnel, Slot: drops.PortLimit, Value: counters.Value{Packets: 32, Bytes: 320}},
		{Direction: wire.FromPod, Slot: drops.NotIP, Value: counters.Value{Packets: 4, Bytes: 40}},
		{Direction: wire.FromPod, Slot: drops.Slots - 1, Value: counters.Value{Packets: 8, Bytes: 80}},
	}, []traffic.Counter{
		{Direction: wire.FromPod, Slot: traffic.Forwarded, Value: counters.Value{Packets: 100, Bytes: 1000}},
		{Direction: wire.FromPod, Slot: traffic.SnatAllocated, Value: counters.Value{Packets: 3, Bytes: 7}},
		{Direction: wire.ToUplink, Slot: traffic.SnatRetried, Value: counters.Value{Packets: 5, Bytes: 7}},
	})
	if total.drops[drops.SnatExhausted] != 3 || total.refused != 9 || total.refusedOutside != 48 || total.allocations != 3 || total.retries != 5 {
		t.Errorf("%+v", total)
	}
	// Each packet once: passed, and dropped for whatever reason.
	if got := total.packets[wire.FromPod]; got != 120 {
		t.Errorf("%d packets from pods, want 120", got)
	}
	if got := total.bytes[wire.FromPod]; got != 1200 {
		t.Errorf("%d bytes from pods, want 1200", got)
	}
}

var update = flag.Bool("update", false, "write the table of metrics anew")

// collected are metrics that have been collected in the test's goroutine, which alone sees its pins.
type collected []prometheus.Metric

func (c collected) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, ch) }

func (c collected) Collect(ch chan<- prometheus.Metric) {
	for _, m := range c {
		ch <- m
	}
}

// registered is what newRegistry registers, but for what any Go program has.
// Where the agent starts anew a request may still be under way, which must not read maps that are closed.
func TestScrapesEndBeforeTheMaps(t *testing.T) {
	l := testLoop(t)
	gather := newRegistry(l.node).Gather
	if all, err := gather(); err != nil || len(all) < 10 {
		t.Fatalf("%d metrics, %v", len(all), err)
	}
	maps := l.dp.Maps
	defer func() { l.dp.Maps = maps }()
	l.scrapes.end()
	l.dp.Maps = nil // who reads them now panics
	if _, err := gather(); err != nil {
		t.Error(err)
	}
}

func registered(l *loop) *prometheus.Registry {
	ch := make(chan prometheus.Metric, 10_000)
	metrics{l.node}.Collect(ch)
	close(ch)
	var all collected
	for m := range ch {
		all = append(all, m)
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(append(l.status.collectors(), all)...)
	return reg
}

// page is where the metrics are explained.
const page = "../../tools/deploy/metrics.md"

// TestMetricsAreExplained holds the page to what is registered: a row for each metric, with its labels, its type and its meaning.
func TestMetricsAreExplained(t *testing.T) {
	l := testServices(t)
	l.services.place(here())
	l.services.accept(complete([]string{"10.244.2.7"}))
	ready(t, l)
	l.cfg.API = &rest.Config{Host: "https://192.0.2.1:6443"}
	must(t, l.reachAPI())
	l.status.waited("start", time.Second)
	l.status.set(func(f *figures) { f.heard = time.Now() })
	families, err := registered(l).Gather()
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, f := range families {
		var labels []string
		for _, pair := range f.GetMetric()[0].GetLabel() {
			labels = append(labels, "`"+pair.GetName()+"`")
		}
		want = append(want, fmt.Sprintf("| `%s` | %s | %s | %s |", f.GetName(), strings.ToLower(f.GetType().String()), strings.Join(labels, ", "), f.GetHelp()))
	}
	content, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, table, _ := strings.Cut(string(content), "|---|---|---|---|\n")
	table, after, _ := strings.Cut(table, "\n\n")
	if *update {
		content = []byte(before + "|---|---|---|---|\n" + strings.Join(want, "\n") + "\n\n" + strings.TrimSpace(after) + "\n")
		if err := os.WriteFile(page, content, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	have := strings.Split(table, "\n")
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("%s (-is +says; -update writes it):\n%s", page, diff)
	}
}

// sampleOf returns a sample of a counter or gauge, or how many a histogram has.
func sampleOf(t *testing.T, l *loop, name, label string) float64 {
	t.Helper()
	families, err := registered(l).Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == prefix+name && len(m.GetLabel()) == 1 && m.GetLabel()[0].GetValue() == label {
				return m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	t.Fatalf("there is no %s with %s", name, label)
	return 0
}

func TestRepairsAreCounted(t *testing.T) {
	l, _ := withPod(t)
	assert := func(what string, spoil func()) {
		t.Helper()
		before := sampleOf(t, l, "repairs_total", what)
		spoil()
		if l.inspect(t.Context()) {
			l.pass(t.Context())
		}
		l.assertReady(t)
		if got := sampleOf(t, l, "repairs_total", what) - before; got != 1 {
			t.Errorf("%v repairs of %s are counted, want 1", got, what)
		}
	}
	remove := func(path string) func() {
		return func() {
			if err := os.Remove(path); err != nil {
				t.Error(err)
			}
		}
	}
	assert(repairedPin, remove(l.cfg.BPFFS.Program("ec_from_pod")))
	assert(repairedList, remove(l.files.listPath()))
	assert(repairedPlugin, remove(l.files.pluginPath()))
	for _, kind := range []string{kindPass, kindInspect} {
		if sampleOf(t, l, "pass_duration_seconds", kind) == 0 {
			t.Errorf("no %s is measured", kind)
		}
	}
}

func TestScrapesAreFewAndKept(t *testing.T) {
	reg := prometheus.NewRegistry()
	var gathered atomic.Int64
	running, finish := make(chan struct{}, 100), make(chan struct{})
	reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "slow", Help: "x"}, func() float64 {
		gathered.Add(1)
		running <- struct{}{}
		<-finish
		return 1
	}))
	h := serveMetrics(reg)
	scrape := func() int {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
		return w.Code
	}
	codes, wg := make(chan int, 100), sync.WaitGroup{}
	for range 20 {
		wg.Go(func() { codes <- scrape() })
	}
	<-running
	for range 20 - maxScrapes {
		if code := <-codes; code != http.StatusServiceUnavailable {
			t.Errorf("beyond %d scrapes at a time: status %d", maxScrapes, code)
		}
	}
	close(finish)
	wg.Wait()
	for range maxScrapes {
		if code := <-codes; code != http.StatusOK {
			t.Errorf("one of %d scrapes: status %d", maxScrapes, code)
		}
	}
	if n := gathered.Load(); n != 1 {
		t.Errorf("for two scrapes at a time the samples were gathered %d times", n)
	}
	const long = 5 * scrapePause
	began, served := time.Now(), 0
	for ; time.Since(began) < long; served++ {
		if code := scrape(); code != http.StatusOK {
			t.Errorf("one scrape after the other: status %d", code)
		}
	}
	if most := maxScrapes * (1 + int(time.Since(began)/scrapePause)); served > most {
		t.Errorf("%d scrapes are served in %v, want at most %d", served, time.Since(began), most)
	}
}

func TestKept(t *testing.T) {
	calls := 0
	get := kept(time.Hour, func() (int, error) { calls++; return calls, io.EOF })
	for range 3 {
		if v, err := get(); v != 1 || !errors.Is(err, io.EOF) {
			t.Errorf("%d, %v", v, err)
		}
	}
	get = kept(0, func() (int, error) { calls++; return calls, nil })
	if a, _ := get(); a != 2 {
		t.Errorf("a new one gave %d", a)
	}
	if b, _ := get(); b != 3 {
		t.Errorf("kept for no time, and %d", b)
	}
}

package agent

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// A run that ends since a host port was asked for is followed by another one, any other end is the agent's.
func TestRunsAnew(t *testing.T) {
	log := &bytes.Buffer{}
	failure, runs := errors.New("failure"), 0
	err := anew(slog.New(slog.NewTextHandler(log, nil)), func() error {
		if runs++; runs <= 2 {
			return errAnew
		}
		return failure
	})
	if !errors.Is(err, failure) || runs != 3 || strings.Count(log.String(), "starting anew") != 2 {
		t.Errorf("%d runs, %v, logged %s", runs, err, log)
	}
}

func TestFirstHostPortIsAwaited(t *testing.T) {
	state := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		a := &agent{node: &node{cfg: Config{Directories: Directories{State: state}}}}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ended := make(chan error, 1)
		go func() { ended <- a.awaitHostPorts(ctx) }()
		synctest.Wait()
		select {
		case err := <-ended:
			t.Fatalf("ended before a pod has asked: %v", err)
		default:
		}
		must(t, endpoint.AskForHostPorts(state))
		if err := <-ended; !errors.Is(err, errAnew) {
			t.Errorf("ended with %v", err)
		}
		for _, is := range []*node{{hostPortsAsked: true}, {cfg: Config{Services: ServicesOn}}} {
			is.cfg.State = state
			if err := (&agent{node: is}).awaitHostPorts(ctx); err != nil {
				t.Errorf("where they are served already: %v", err)
			}
		}
	})
}

// told is where the loop has told the controller of Services that it is.
func told(t *testing.T, l *loop) whereabouts {
	t.Helper()
	select {
	case s := <-l.services.around:
		return s
	default:
		t.Fatal("nothing new was told")
		return whereabouts{}
	}
}

// testHostPorts is a node whose programs serve host ports, and Services not.
func testHostPorts(t *testing.T) *loop {
	t.Helper()
	l := testLoop(t)
	l.hostPortsAsked = true
	restartServices(t, l)
	return l
}

// Where others serve Services, the programs are told of this node's own addresses, and of no Service.
func TestHostPortsWithoutServices(t *testing.T) {
	l := testHostPorts(t)
	l.cfg.Service = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")}
	ready(t, l) // whatever is known of Services
	for range 2 {
		l.pass(t.Context()) // now the tunnel has its address
	}
	if flags, _ := l.flags(t); flags&config.Services != 0 {
		t.Error("ADD need not wait any more, and no address of the node's has host ports yet")
	}
	l.services.place(told(t, l))
	l.pass(t.Context()) // by what the maps hold now
	l.assertReady(t)
	if flags, told := l.flags(t); flags&config.Services == 0 || !strings.Contains(told, `"services":""`) {
		t.Errorf("flags %v, told %s", flags, told)
	}
	if v, there := l.destination(t, "10.96.0.0/12"); there {
		t.Errorf("the range of Services is %+v", v)
	}
	want := map[services.Key]services.Value{{Address: wire.AddrFrom(netip.MustParseAddr("172.18.0.11"))}: {Flags: services.Own | services.Node}}
	if diff := cmp.Diff(want, readServices(t, l).Services); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
	if _, err := l.dp.Maps.Devices.Get(devices.Key{Ifindex: devices.World}); err != nil {
		t.Errorf("the world's entry: %v", err)
	}
	if found := l.services.problems(); len(found) > 0 {
		t.Errorf("problems %v", found)
	}
	must(t, l.dp.Maps.Services.Delete(services.Key{Address: wire.AddrFrom(netip.MustParseAddr("172.18.0.11"))}))
	l.services.repair()
	if diff := cmp.Diff(want, readServices(t, l).Services); diff != "" {
		t.Errorf("somebody has deleted one (-want +got):\n%s", diff)
	}
}

// What an agent has left that served Services goes when the next one serves host ports alone.
func TestHostPortsAfterServices(t *testing.T) {
	l := testServices(t)
	l.services.place(here("192.0.2.1"))
	l.services.accept(complete([]string{"10.244.2.7"}))
	l.cfg.Services, l.hostPortsAsked = ServicesOff, true
	restartServices(t, l)
	l.services.place(here("192.0.2.1"))
	content := readServices(t, l)
	want := map[services.Key]services.Value{{Address: wire.AddrFrom(netip.MustParseAddr("192.0.2.1"))}: {Flags: services.Own | services.Node}}
	if diff := cmp.Diff(want, content.Services); diff != "" || len(content.Names) > 0 {
		t.Errorf("left beside the node's address: %v, %s", content.Names, diff)
	}
}

// openHostPort writes what the plugin does of a host port.
func openHostPort(t *testing.T, l *loop, host string, proto wire.Protocol, ifindex uint32) hostports.Key {
	t.Helper()
	at := netip.MustParseAddrPort(host)
	k := hostports.KeyFrom(at.Addr(), at.Port(), proto)
	must(t, l.dp.Maps.HostPorts.Put(k, hostports.Value{PodAddress: wire.AddrFrom(netip.MustParseAddr("10.244.1.9")), PodPort: wire.PortFrom(80), Ifindex: ifindex}))
	return k
}

func TestHostPortsAreReserved(t *testing.T) {
	l := testHostPorts(t)
	ready(t, l)
	reserved := func(want string) {
		t.Helper()
		l.inspect(t.Context())
		have, err := device.Sysctl{Dir: l.cfg.ProcSys}.Get(reservedPorts)
		must(t, err)
		if have != want {
			t.Errorf("%q is reserved, want %q", have, want)
		}
	}
	reserved("50000-60000")
	web := openHostPort(t, l, "0.0.0.0:8080", wire.TCP, 42)
	openHostPort(t, l, "[::]:8081", wire.UDP, 42)
	reserved("8080-8081,50000-60000")
	if s := told(t, l); len(s.hostPorts) != 2 {
		t.Errorf("Services are told of %v", s.hostPorts)
	}
	select {
	case <-l.services.ceased:
	default:
		t.Error("no socket is looked at when pods have other host ports")
	}
	must(t, l.dp.Maps.HostPorts.Delete(web))
	reserved("8081,50000-60000")
}

// A NodePort that a pod has as its host port is that Service's problem, which names the pod, until it has gone.
func TestHostPortInTheWayOfANodePort(t *testing.T) {
	l := testServices(t)
	log := logged(l)
	must(t, endpoint.Write(l.cfg.State, endpoint.Endpoint{ID: endpoint.ID{ContainerID: "container", IfName: "eth0"}, HostIndex: 42, Pod: "shop/proxy"}))
	web := openHostPort(t, l, "172.18.0.11:30080", wire.TCP, 42)
	openHostPort(t, l, "0.0.0.0:30080", wire.UDP, 42)
	l.accept(list(n1(), n2()))
	l.pass(t.Context())
	l.services.place(told(t, l))
	l.services.accept(outsideService())
	const text = "it is host port 172.18.0.11:30080/tcp of pod shop/proxy"
	found := l.services.problems()
	if len(found) != 1 || found[0].Reason != service.HostPort || !strings.Contains(found[0].Text, text) {
		t.Fatalf("problems %v", found)
	}
	if event := eventText(found[0]); strings.Contains(event, "shop/proxy") || !strings.Contains(event, "host port") {
		t.Errorf("all nodes' Event says %q", event)
	}
	l.judge()
	if told := l.readTold(t).ServiceProblems; len(told) != 1 || told[0].Reason != "hostport" {
		t.Errorf("ebpfctl is told %v", told)
	}
	must(t, l.dp.Maps.HostPorts.Delete(web))
	l.pass(t.Context())
	l.services.place(told(t, l))
	if found := l.services.problems(); len(found) > 0 {
		t.Errorf("when it has gone: %v", found)
	}
	if said := log.String(); strings.Count(said, text) != 2 || !strings.Contains(said, "is over") {
		t.Errorf("logged %s", said)
	}
}

// Host ports answer on all addresses that others may ask, but not where kube-proxy has put those of Services.
func TestOwnAddresses(t *testing.T) {
	l := testHostPorts(t)
	run(t, "ip link add kube-ipvs0 type bridge")
	run(t, "ip link add other type bridge")
	run(t, "ip address add 10.96.0.10/32 dev kube-ipvs0")
	run(t, "ip address add 198.51.100.1/24 dev other")
	run(t, "ip address add 198.51.100.1/32 dev kube-ipvs0") // a Service has it as its externalIP
	ready(t, l)
	l.pass(t.Context())
	s := told(t, l)
	want := []netip.Addr{netip.MustParseAddr("172.18.0.11"), netip.MustParseAddr("198.51.100.1")}
	if !slices.Equal(s.own, want) || !slices.Contains(s.held, netip.MustParseAddr("10.96.0.10")) || !slices.Contains(s.held, netip.MustParseAddr("127.0.0.1")) {
		t.Errorf("own %v of %v", s.own, s.held)
	}
	l.cfg.NodePortAddresses, l.cfg.Listen = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}, ":9999"
	o := l.services.options(s)
	if everybody := netip.MustParseAddr("172.18.0.255"); !o.Broadcast[everybody] || o.Broadcast[want[0]] {
		t.Errorf("everybody on a link is %v, not %v", o.Broadcast, everybody)
	}
	for _, port := range []uint16{9999, 10250} {
		if _, is := o.Guarded.Find(want[0], port); !is {
			t.Errorf("port %d is not guarded: %v", port, o.Guarded)
		}
	}
	if !o.OwnAddresses[want[0]] || o.NodeAddresses[want[0]] || !o.NodeAddresses[want[1]] || len(o.OwnAddresses) != 2 {
		t.Errorf("own %v, NodePorts on %v", o.OwnAddresses, o.NodeAddresses)
	}
}

// The programs on the cgroup are what host ports can do without; with Services they are not.
func TestHostPortsDoWithoutACgroup(t *testing.T) {
	failure := errors.New("failure")
	for name, c := range map[string]struct {
		services     ServicesMode
		kubeProxy    KubeProxyMode
		cgroup       string
		broken, none bool // with the cgroup, and at all
		tries        int
		says         string // that it is degraded by; empty: it is not
	}{
		"all is well":          {cgroup: "/cgroup", tries: 1},
		"there is no cgroup":   {tries: 1, says: "--cgroup: not given: there is none"},
		"it is of no use":      {cgroup: "/cgroup", broken: true, tries: 2, says: "--cgroup /cgroup"},
		"nothing loads":        {cgroup: "/cgroup", broken: true, none: true, tries: 2},
		"Services need it":     {services: ServicesOn, cgroup: "/cgroup", broken: true, tries: 1},
		"kube-proxy serves":    {services: ServicesAuto, kubeProxy: KubeProxyOn, cgroup: "/cgroup", broken: true, tries: 2, says: "own processes do not reach Services and host ports"},
		"nobody else serves":   {services: ServicesAuto, kubeProxy: KubeProxyOff, cgroup: "/cgroup", broken: true, tries: 1},
		"no cgroup by default": {services: ServicesAuto, kubeProxy: KubeProxyOff, tries: 1, says: "--cgroup: not given: there is none"},
		"neither is asked for": {cgroup: "/cgroup", broken: true, tries: 1},
	} {
		log := slog.New(slog.DiscardHandler)
		a := &agent{node: &node{cfg: Config{Services: c.services, KubeProxy: c.kubeProxy, Cgroup: c.cgroup, NoCgroup: errors.New("--cgroup: not given: there is none")}, log: log, complaints: newComplaints(log), hostPortsAsked: name != "neither is asked for"}}
		tries := 0
		dp, err := a.withoutCgroup(t.Context(), datapath.Options{Cgroup: c.cgroup}, func(_ context.Context, o datapath.Options) (*datapath.Datapath, error) {
			tries++
			if c.none || c.broken && o.Cgroup != "" {
				return nil, failure
			}
			return &datapath.Datapath{}, nil
		})
		fails := c.none || c.broken && c.says == ""
		if tries != c.tries || (err != nil) != fails || (dp == nil) != fails {
			t.Errorf("%s: %d tries, %v, %v", name, tries, dp, err)
		}
		if says := a.complaints.degraded()["services/cgroup"]; !strings.Contains(says, c.says) || (says == "") != (c.says == "") {
			t.Errorf("%s: degraded by %q", name, says)
		}
		if gone := c.says != "" && a.cfg.Cgroup != ""; gone {
			t.Errorf("%s: programs are looked for on %s", name, a.cfg.Cgroup)
		}
	}
}

// What is wrong with the pin directory is put right while the agent starts anew, with all that it is to serve.
func TestNothingIsForgoneForThePinDirectory(t *testing.T) {
	a := &agent{node: &node{
		cfg:        Config{Services: ServicesAuto, KubeProxy: KubeProxyOn, Directories: Directories{BPFFS: bpffs.Dir(t.TempDir()), State: t.TempDir()}},
		complaints: newComplaints(slog.New(slog.DiscardHandler)),
	}}
	if err := a.load(t.Context()); !errors.Is(err, bpffs.ErrNotBPFFS) || a.forgone || len(a.complaints.degraded()) > 0 {
		t.Errorf("error %v, forgone %t, degraded %v", err, a.forgone, a.complaints.degraded())
	}
}

// Programs that nobody insists on, and that can't be loaded, take no agent away: it goes on without them, says so, and does not start anew at once.
func TestBackendsAreForgone(t *testing.T) {
	failure := errors.New("failure")
	for name, c := range map[string]struct {
		services       ServicesMode
		kubeProxy      KubeProxyMode
		asked, forgone bool
	}{
		"host ports alone":     {asked: true, forgone: true},
		"Services as well":     {services: ServicesOn, asked: true},
		"kube-proxy serves":    {services: ServicesAuto, kubeProxy: KubeProxyOn, forgone: true},
		"nobody else serves":   {services: ServicesAuto, kubeProxy: KubeProxyOff},
		"neither is asked for": {},
	} {
		a := &agent{node: &node{
			cfg: Config{Services: c.services, KubeProxy: c.kubeProxy, Directories: Directories{State: t.TempDir()}}, complaints: newComplaints(slog.New(slog.DiscardHandler)), hostPortsAsked: c.asked,
		}}
		must(t, endpoint.AskForHostPorts(a.cfg.State))
		if got := a.forgo(t.Context(), failure); got != c.forgone || a.frontends() != (c.services != "" && !c.forgone) {
			t.Errorf("%s: forgone %t, frontends %t", name, got, a.frontends())
		}
		if !c.forgone {
			continue
		}
		if says := a.complaints.degraded()["services/programs"]; !strings.Contains(says, "failure") {
			t.Errorf("%s: degraded by %q", name, says)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*inspectInterval)
		if err := a.awaitHostPorts(ctx); errors.Is(err, errAnew) {
			t.Errorf("%s: it starts anew at once", name)
		}
		cancel()
	}
}

func TestCleanupForgetsHostPorts(t *testing.T) {
	c := &cleaner{Directories: Directories{State: t.TempDir()}, log: slog.New(slog.DiscardHandler), record: &record{}}
	must(t, endpoint.AskForHostPorts(c.State))
	must(t, os.WriteFile(filepath.Join(c.State, observe.ClusterFile), nil, 0o600))
	must(t, c.removeFiles(t.Context()))
	if left, err := os.ReadDir(c.State); err != nil || len(left) > 0 {
		t.Errorf("left: %v, error %v", left, err)
	}
}

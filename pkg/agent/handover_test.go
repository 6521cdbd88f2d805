package agent

import (
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
)

// What kube-proxy's iptables mode has of one Service, as far as it matters here, and how it goes.
var kubeProxysRules, kubeProxysEnd = []string{
	"-N KUBE-SERVICES",
	"-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp --dport 80 -j DNAT --to-destination 10.244.2.7:8080",
	"-A PREROUTING -j KUBE-SERVICES",
	"-A OUTPUT -j KUBE-SERVICES",
}, []string{"-F", "-X"}

func testAuto(t *testing.T) *loop {
	t.Helper()
	l := testServices(t)
	l.cfg.Services, l.cfg.KubeProxy = ServicesAuto, KubeProxyAuto
	must(t, l.handover.begin())
	l.services.place(here())
	l.services.accept(complete([]string{"10.244.2.7"}))
	ready(t, l)
	return l
}

func nat(t *testing.T, program string, commands []string) {
	t.Helper()
	for _, c := range commands {
		run(t, program+" -t nat "+c)
	}
}

// assertYields checks who serves, as programs and people are told.
func (l *loop) assertYields(t *testing.T, when string, want config.Flags, says string) {
	t.Helper()
	const both = config.YieldsIPv4 | config.YieldsIPv6
	l.judge()
	if flags, _ := l.flags(t); flags&both != want {
		t.Errorf("%s: config has the flags %v, want %v of them", when, flags, want)
	}
	if told := l.readTold(t).Services; !strings.HasPrefix(told, says) {
		t.Errorf("%s: ebpfctl is told %q, want %q", when, told, says)
	}
}

func TestServicesAreLeftToRulesThatStand(t *testing.T) {
	const programs = "served by the programs"
	l := testAuto(t)
	said := logged(l)
	l.assertYields(t, "no rules", 0, programs)
	nat(t, "iptables-nft", kubeProxysRules[:2])
	l.mode.level = netfilter.Translates
	l.inspect(t.Context())
	l.assertYields(t, "rules to which nothing leads", 0, programs)
	l.mode.level = netfilter.Nothing

	nat(t, "iptables-nft", kubeProxysRules[2:])
	l.inspect(t.Context())
	l.assertYields(t, "rules, of which the programs do not know yet", 0, programs)
	if !l.follow(t, time.Now().Add(10*time.Second)) {
		t.Error("the programs do not work beside netfilter")
	}
	l.inspect(t.Context())
	const left = "left to kube-proxy's rules in IPv4 (nftables table ip nat, chain PREROUTING"
	l.assertYields(t, "rules", config.YieldsIPv4, left)
	l.pass(t.Context())
	l.assertYields(t, "rules, after a pass", config.YieldsIPv4, left)
	assertFound(t, l, "10.96.0.1", "10.244.2.7:8080") // for the flows that go on, and for when they go

	next := newHandover(l.node, l.mode, nil)
	t.Cleanup(next.close)
	must(t, next.begin())
	if next.decided[wire.IPv4] == "" || next.decided[wire.IPv6] != "" || !l.status.waits() {
		t.Errorf("another agent begins with %+v", next.decided)
	}

	l.mode.changing = true // to programs that bypass netfilter
	l.inspect(t.Context())
	l.assertYields(t, "rules that have come back meanwhile", 0, programs)
	l.mode.changing = false
	l.inspect(t.Context())
	l.status.set(func(f *figures) { f.served = time.Time{} })

	l.services.told.yields = false
	l.inspect(t.Context())
	if told := <-l.services.around; !told.yields {
		t.Error("the ports of health checks stay open until the next pass")
	}
	nat(t, "iptables-nft", kubeProxysEnd)
	l.inspect(t.Context())
	l.assertYields(t, "rules that have just gone", 0, programs)
	if !l.status.waits() {
		t.Error("kube-proxy's ports are taken at once")
	}
	for _, line := range []string{`Services="` + left, `Services="` + programs} {
		if n := strings.Count(said.String(), line); n != 2 {
			t.Errorf("said %d times: %s\n%s", n, line, said)
		}
	}
}

func TestWhoServesIsGiven(t *testing.T) {
	l := testAuto(t)
	nat(t, "iptables-nft", kubeProxysRules)
	l.mode.level = netfilter.Translates
	for _, c := range []struct {
		services  ServicesMode
		kubeProxy KubeProxyMode
		goes      bool // cleanup is at work
		filled    bool // the maps hold the Services
		want      config.Flags
	}{
		{ServicesOn, KubeProxyAuto, false, true, 0},
		{ServicesOn, KubeProxyOn, false, true, 0},
		{ServicesAuto, KubeProxyAuto, false, true, config.YieldsIPv4},
		{ServicesAuto, KubeProxyAuto, true, true, 0},
		{ServicesAuto, KubeProxyAuto, true, false, config.YieldsIPv4},
		{ServicesAuto, KubeProxyOff, false, true, 0},
		{ServicesAuto, KubeProxyOn, false, true, config.YieldsIPv4 | config.YieldsIPv6},
		{ServicesAuto, KubeProxyOn, true, true, config.YieldsIPv4 | config.YieldsIPv6},
		{ServicesOff, KubeProxyAuto, false, true, 0},
	} {
		l.cfg.Services, l.cfg.KubeProxy = c.services, c.kubeProxy
		l.handover.close()
		l.handover = newHandover(l.node, l.mode, func() bool { return c.filled })
		release := func() {}
		if c.goes {
			lock, err := bpffs.File(t.Context(), filepath.Join(l.cfg.State, kubeProxyLock))
			must(t, err)
			release = lock.Release
		}
		must(t, l.handover.follow(&l.state))
		if got := l.state.yields.flags(); got != c.want {
			t.Errorf("%+v: the flags are %v", c, got)
		}
		release()
	}
}

// An agent that starts on a node where the programs have served opens kube-proxy's ports at once, and one on a node that has just booted does not.
func TestKubeProxysPortsAfterARestart(t *testing.T) {
	l := testAuto(t)
	again := func(kubeProxy KubeProxyMode) bool {
		n := &node{cfg: l.cfg, log: l.log, dp: l.dp, status: newStatus(l.log)}
		n.cfg.KubeProxy = kubeProxy
		next := newHandover(n, l.mode, nil)
		t.Cleanup(next.close)
		must(t, next.begin())
		return n.status.waits()
	}
	if again(KubeProxyAuto) {
		t.Error("the ports that an earlier agent had are left to kube-proxy")
	}
	must(t, l.dp.Maps.Config.Put(config.Key{}, config.Value{}))
	if !again(KubeProxyAuto) {
		t.Error("the ports are taken before anybody knows whether there is a kube-proxy")
	}
	if again(KubeProxyOff) {
		t.Error("the ports are left to a kube-proxy that is not there")
	}
}

// Whoever removes kube-proxy's rules has seen that none runs: its ports are taken at once.
func TestKubeProxysPortsAfterACleanup(t *testing.T) {
	l := testAuto(t)
	nat(t, "iptables-nft", kubeProxysRules)
	l.mode.level = netfilter.Translates
	must(t, l.handover.follow(&l.state))
	lock, err := bpffs.File(t.Context(), filepath.Join(l.cfg.State, kubeProxyLock))
	must(t, err)
	must(t, l.handover.follow(&l.state))
	nat(t, "iptables-nft", kubeProxysEnd)
	lock.Release()
	must(t, l.handover.follow(&l.state))
	if l.state.yields.any() || l.status.waits() {
		t.Errorf("left to %v, ports are: %v", l.state.yields, l.status.waits())
	}
}

// After an error each family goes by what is known of it.
func TestRulesThatCannotBeRead(t *testing.T) {
	l := testAuto(t)
	nat(t, "iptables-nft", kubeProxysRules)
	nat(t, "ip6tables-nft", []string{"-N KUBE-SERVICES", "-A KUBE-SERVICES -j RETURN", "-A OUTPUT -j KUBE-SERVICES"})
	l.mode.level = netfilter.Translates
	must(t, l.handover.follow(&l.state))
	const both = config.YieldsIPv4 | config.YieldsIPv6
	if got := l.state.yields.flags(); got != both {
		t.Fatalf("the flags are %v", got)
	}
	must(t, os.Symlink(kubeProxyLock, filepath.Join(l.cfg.State, kubeProxyLock))) // to itself
	err := l.handover.follow(&l.state)
	if got := l.state.yields.flags(); err == nil || got != both {
		t.Errorf("the flags are %v, error %v", got, err)
	}
}

// As long as an agent has not been able to look, it goes by what an earlier one has found.
func TestRulesThatCannotBeReadYet(t *testing.T) {
	l := testAuto(t)
	l.mode.level = netfilter.Translates
	l.handover.close()
	l.handover = newHandover(l.node, l.mode, nil)
	l.handover.decided = yields{wire.IPv4: "as an earlier agent has found them"}
	var limit unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Max: limit.Max}))
	err := l.handover.follow(&l.state)
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	if got := l.state.yields.flags(); err == nil || got != config.YieldsIPv4 {
		t.Errorf("the flags are %v, error %v", got, err)
	}
	must(t, l.handover.follow(&l.state))
	if l.state.yields.any() {
		t.Errorf("left to %v", l.state.yields)
	}
}

// A list of Services that does not come keeps no pod from being carried whose Services somebody else serves.
func TestNoListOfServicesWhereTheyAreLeft(t *testing.T) {
	l := testServices(t)
	l.cfg.Services, l.cfg.KubeProxy = ServicesAuto, KubeProxyAuto
	ready := func() bool { l.pass(t.Context()); return l.status.isReady() }
	l.accept(list(n1(), n2()))
	if ready() {
		t.Error("ready, and nobody serves Services")
	}
	nat(t, "iptables-nft", kubeProxysRules)
	l.mode.level = netfilter.Translates
	if !ready() {
		t.Errorf("not ready beside kube-proxy: %s", l.status.reason())
	}
}

// kube-proxy has its ports as soon as its rules stand, and for a while after.
func TestKubeProxysPorts(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	at := free.Addr().String()
	must(t, free.Close())
	a, log := serving(t, Config{}) // without listeners
	a.status.set(func(f *figures) { f.served = time.Now() })
	handler := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	go func() { _ = a.serve(t.Context(), server{"kube-proxy's", at, handler, nil, maxRestart}) }()
	isOurs := func() bool { return answers("http://" + at) }
	time.Sleep(3 * inspectInterval)
	if isOurs() {
		t.Error("a port is taken at once")
	}
	a.status.set(func(f *figures) { f.served = time.Now().Add(-settle) })
	eventually(t, "the port is taken", isOurs)
	a.status.set(func(f *figures) { f.yields[wire.IPv6] = "rules" })
	eventually(t, "the port is released", func() bool {
		l, err := net.Listen("tcp", at)
		return err == nil && l.Close() == nil
	})
	if said := log.String(); strings.Contains(said, "WARN") || len(a.complaints.degraded()) > 0 {
		t.Errorf("degraded by %v, logged:\n%s", a.complaints.degraded(), said)
	}
	a.status.set(func(f *figures) { f.yields = yields{} })
	eventually(t, "the port is taken again", isOurs)
}

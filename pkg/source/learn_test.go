package source

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// keeper is what the state directory is to Servers.
type keeper struct {
	mu   sync.Mutex
	have []string
}

func (k *keeper) keep(all []string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.have = all
	return nil
}

func (k *keeper) waitFor(t *testing.T, want ...string) {
	t.Helper()
	slices.Sort(want)
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		k.mu.Lock()
		have := slices.Sorted(slices.Values(k.have))
		k.mu.Unlock()
		if slices.Equal(have, want) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("kept are %v, not %v", have, want)
		}
	}
}

// translation stands for whoever translates the Service's address: there it leads to an API server, if there is one.
func translation(t *testing.T, to string) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", serviceAddress+":0")
	if err != nil {
		t.Fatal(err)
	}
	b := &blackHole{Listener: l, to: to, open: make(chan struct{})}
	close(b.open)
	done := make(chan struct{})
	go func() { defer close(done); b.serve() }()
	t.Cleanup(func() { _ = l.Close(); <-done })
	return l
}

// The whole story: the Service's address works, the addresses behind it are learnt, and a restart does without it. The certificates
// are for the Service's address only.
func TestLearning(t *testing.T) {
	c := newClusterAs(t, serviceAddress, 3)
	service := translation(t, c.fronts[0].address)
	c.config.Host = "https://" + service.Addr().String()
	var k keeper
	f := followServers(t, c.config, ServersOptions{OfService: true, Keep: k.keep})
	c.nodes.change("ADDED", named("n1"))
	f.hears(t, "n1")
	if in := f.State(); in.InUse != c.config.Host || in.Known != 1 {
		t.Errorf("%+v", in)
	}
	c.fronts[2].kill()
	f.Learn([]netip.AddrPort{c.fronts[0].addrPort(), c.fronts[1].addrPort(), c.fronts[2].addrPort()})
	k.waitFor(t, c.fronts[0].url(), c.fronts[1].url())
	used, _ := c.used(t, f)
	if f.State().Failovers != 0 {
		t.Errorf("%+v", f.State())
	}
	time.Sleep(3 * quick.interval) // until nothing goes by the Service any more
	_ = service.Close()
	c.nodes.change("ADDED", named("n2"))
	if err := f.hears(t, "n2").errs; err != nil {
		t.Errorf("errors: %v", err)
	}
	used.kill()
	c.nodes.change("ADDED", named("n3"))
	if err := f.hears(t, "n3").errs; err != nil {
		t.Errorf("errors: %v", err)
	}
	if all := f.Addresses(); len(all) != 4 || !slices.Contains(all, c.fronts[2].addrPort()) {
		t.Errorf("the addresses are %v", all)
	}

	restarted := followServers(t, c.config, ServersOptions{OfService: true, Kept: k.have})
	if err := restarted.hears(t, "n3").errs; err != nil || restarted.State().InUse == c.config.Host {
		t.Errorf("%v, %+v", err, restarted.State())
	}
	f.Learn(nil)
	f.Learn([]netip.AddrPort{c.fronts[2].addrPort()}) // the other ones leave
	c.fronts[2].start()
	f.uses(t, c.fronts[2].url())
	k.waitFor(t, c.fronts[2].url())
	if s := f.State(); s.Known != 2 {
		t.Errorf("%+v", s)
	}
}

// What has a certificate of the cluster's for its own address, as a kubelet has, is no API server, whoever says that it is one.
func TestLearntAddressesNeedTheServicesCertificate(t *testing.T) {
	c := newClusterAs(t, serviceAddress, 1)
	kubelet := newFront(t, c.nodes, c.ca.certify(t, "127.0.0.1"))
	service := translation(t, c.fronts[0].address)
	c.config.Host = "https://" + service.Addr().String()
	f := followServers(t, c.config, ServersOptions{OfService: true})
	c.nodes.change("ADDED", named("n1"))
	f.hears(t, "n1")
	f.Learn([]netip.AddrPort{kubelet.addrPort()})
	time.Sleep(5 * quick.trust) // it is tried
	if in := f.State().InUse; in != c.config.Host || kubelet.checked() > 0 {
		t.Errorf("in use is %s; the kubelet was asked %d times", in, kubelet.checked())
	}
	c.nodes.change("ADDED", named("n2"))
	if err := f.hears(t, "n2").errs; err != nil {
		t.Errorf("errors: %v", err)
	}
}

// What is kept may be anything.
func TestWhatIsKeptMayBeWrong(t *testing.T) {
	c := newClusterAs(t, serviceAddress, 1)
	other := newFront(t, newNodes(), newAuthority(t).certify(t, serviceAddress))
	c.nodes.change("ADDED", named("n1"))
	f := followServers(t, c.config, ServersOptions{OfService: true, Kept: []string{"", "\x00", "http://127.0.0.1:1", "https://a/b", other.url(), c.fronts[0].url(), c.fronts[0].url()}})
	if err := f.hears(t, "n1").errs; err != nil || f.State().Known != 3 || other.asked("secret") > 0 {
		t.Errorf("%v, %+v", err, f.State())
	}
}

// Nobody translates, and nothing is known: that is said in one line, and is over by itself.
func TestServiceThatNobodyTranslates(t *testing.T) {
	c := newClusterAs(t, serviceAddress, 1)
	service := translation(t, c.fronts[0].address)
	address := service.Addr().String()
	_ = service.Close()
	c.config.Host = "https://" + address
	c.nodes.change("ADDED", named("n1"))
	f := followServers(t, c.config, ServersOptions{OfService: true})
	err := f.fails(t).Error()
	if !strings.Contains(err, " Nodes from "+c.config.Host+": --api-server is missing") || strings.Contains(err, "\n") || len(err) > 250 {
		t.Errorf("says %q", err)
	}
	l, listenErr := net.Listen("tcp", address)
	if listenErr != nil {
		t.Fatal(listenErr)
	}
	b := &blackHole{Listener: l, to: c.fronts[0].address, open: make(chan struct{})}
	close(b.open)
	done := make(chan struct{})
	go func() { defer close(done); b.serve() }()
	t.Cleanup(func() { _ = l.Close(); <-done })
	if took := f.hears(t, "n1").took; took > 3*time.Second {
		t.Errorf("after %v", took)
	}
}

// An address that is given, or the configuration's own, is nobody's Service, and nothing is learnt beside it.
func TestNothingIsLearntBesideAddressesOfTheirOwn(t *testing.T) {
	c := newCluster(t, 2)
	for name, options := range map[string]ServersOptions{"given": {Given: c.given()[:1], OfService: true}, "direct": {}} {
		v, err := NewServers(c.config, options)
		if err != nil {
			t.Fatal(err)
		}
		v.Learn([]netip.AddrPort{c.fronts[1].addrPort()})
		if s := v.State(); s.Known != 1 {
			t.Errorf("%s: %+v", name, s)
		}
	}
	var none *Servers
	none.Learn([]netip.AddrPort{c.fronts[1].addrPort()})
}

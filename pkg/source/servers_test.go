package source

import (
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// cluster is one of several API servers.
type cluster struct {
	nodes  *fakeAPI
	ca     *authority
	fronts []*front
	config *rest.Config // names nobody who is there
}

const serviceAddress = "127.7.7.7"

func newCluster(t *testing.T, fronts int) *cluster {
	t.Helper()
	return newClusterAs(t, "127.0.0.1", fronts)
}

// newClusterAs is one whose API servers have a certificate for that address.
func newClusterAs(t *testing.T, address string, fronts int) *cluster {
	t.Helper()
	c := &cluster{nodes: newNodes(), ca: newAuthority(t)}
	for range fronts {
		c.fronts = append(c.fronts, newFront(t, c.nodes, c.ca.certify(t, address)))
	}
	c.config = &rest.Config{Host: "https://" + serviceAddress + ":1", BearerToken: "secret", TLSClientConfig: rest.TLSClientConfig{CAData: c.ca.pem}}
	return c
}

func (c *cluster) given() (all []string) {
	for _, f := range c.fronts {
		all = append(all, f.url())
	}
	return all
}

// used is the API server in use, and the others.
func (c *cluster) used(t *testing.T, f *following) (used *front, others []*front) {
	t.Helper()
	at := f.State().InUse
	for _, one := range c.fronts {
		if one.url() == at {
			used = one
		} else {
			others = append(others, one)
		}
	}
	if used == nil {
		t.Fatalf("in use is %q", at)
	}
	return used, others
}

func TestParseServer(t *testing.T) {
	for text, want := range map[string]string{
		"https://10.0.0.1:6443": "https://10.0.0.1:6443", "https://[2001:db8::1]:6443": "https://[2001:db8::1]:6443", "https://api.example": "https://api.example:443",
		"https://[2001:db8::1]/": "https://[2001:db8::1]:443", "http://127.0.0.1:80": "http://127.0.0.1:80",
	} {
		if got, err := ParseServer(text); err != nil || got != want {
			t.Errorf("%s: %q, %v", text, got, err)
		}
	}
	for _, text := range []string{
		"", "10.0.0.1", "10.0.0.1:6443", "https://", "https://:6443", "ftp://10.0.0.1", "https://10.0.0.1/k8s", "https://me:secret@10.0.0.1", "https://10.0.0.1?a=b",
		"https://10.0.0.1#a", "https://10.0.0.1:0", "https://10.0.0.1:65536", "https://10.0.0.1:x", "https://2001:db8::1:6443", "https://[::1", "https://a b",
	} {
		if got, err := ParseServer(text); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
}

// A watch goes on at another API server, within moments of the end of its own, and nobody hears of an error.
func TestWatchMovesWhenItsServerIsKilled(t *testing.T) {
	c := newCluster(t, 3)
	f := followServers(t, c.config, ServersOptions{Given: c.given()})
	c.nodes.change("ADDED", named("n1"))
	f.hears(t, "n1")
	used, _ := c.used(t, f)
	used.kill()
	c.nodes.change("ADDED", named("n2"))
	if heard := f.hears(t, "n2"); heard.errs != nil || heard.took > 3*time.Second {
		t.Errorf("after %v, errors: %v", heard.took, heard.errs)
	}
	if s := f.State(); s.Failovers != 1 || s.InUse == used.url() || s.Known != 3 {
		t.Errorf("%+v", s)
	}
	if log := f.log.String(); strings.Count(log, "\n") != 2 || !strings.Contains(log, "before="+used.url()) {
		t.Errorf("the log:\n%s", log)
	}
	if used.asked("secret") == 0 {
		t.Error("it was asked without the credentials")
	}
}

// What the API server in use does, and whether another one is taken then.
func TestFailures(t *testing.T) {
	for name, fail := range map[string]func(*front){
		"hangs":     func(f *front) { f.hang(true) },
		"not ready": func(f *front) { f.say(http.StatusServiceUnavailable) },
		"unknown":   func(f *front) { f.say(http.StatusUnauthorized) },
		"killed":    func(f *front) { f.kill() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, 2)
			f := followServers(t, c.config, ServersOptions{Given: c.given()})
			c.nodes.change("ADDED", named("n1"))
			f.hears(t, "n1")
			used, others := c.used(t, f)
			fail(used)
			f.uses(t, others[0].url())
			c.nodes.change("ADDED", named("n2"))
			if err := f.hears(t, "n2").errs; err != nil {
				t.Errorf("errors: %v", err)
			}
			for end := time.Now().Add(5 * time.Second); others[0].asked("secret") == 0; time.Sleep(5 * time.Millisecond) {
				if time.Now().After(end) {
					t.Fatal("the watch has not moved")
				}
			}
			if s := f.State(); s.Failovers != 1 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// A path that swallows everything says nothing of itself.
func TestBlackHole(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	hole := newBlackHole(t, c.fronts[0].address)
	through := "https://" + hole.Addr().String()
	c.fronts[1].kill()
	f := followServers(t, c.config, ServersOptions{Given: []string{through, c.fronts[1].url()}})
	c.nodes.change("ADDED", named("n1"))
	f.hears(t, "n1")
	c.fronts[1].start()
	hole.swallow()
	defer hole.pass()
	f.uses(t, c.fronts[1].url())
	c.nodes.change("ADDED", named("n2"))
	if heard := f.hears(t, "n2"); heard.errs != nil || heard.took > 2*time.Second {
		t.Errorf("after %v, errors: %v", heard.took, heard.errs)
	}
}

// Those that are not fit to be used from the start on: another cluster's, whose certificate says so, and who is not there.
func TestUnfitFromTheStart(t *testing.T) {
	c := newCluster(t, 2)
	other := newFront(t, newNodes(), newAuthority(t).certify(t, "127.0.0.1"))
	c.fronts[1].kill()
	c.nodes.change("ADDED", named("n1"))
	f := followServers(t, c.config, ServersOptions{Given: []string{other.url(), c.fronts[1].url(), c.fronts[0].url()}})
	if err := f.hears(t, "n1").errs; err != nil {
		t.Errorf("errors: %v", err)
	}
	c.fronts[0].kill()
	err := f.fails(t).Error()
	for _, says := range []string{"from any API server: ", other.url() + ": tls: failed to verify certificate", c.fronts[0].url() + ": dial: connect: connection refused", c.fronts[1].url()} {
		if !strings.Contains(err, says) {
			t.Errorf("not said: %s\n%s", says, err)
		}
	}
	if strings.Contains(err, "\n") || other.asked("secret") > 0 || f.State().InUse != "" {
		t.Errorf("%s; another cluster's was asked %d times; %+v", err, other.asked("secret"), f.State())
	}
}

func TestAllAwayForAWhile(t *testing.T) {
	c := newCluster(t, 2)
	f := followServers(t, c.config, ServersOptions{Given: c.given()})
	c.nodes.change("ADDED", named("n1"))
	f.hears(t, "n1")
	for _, one := range c.fronts {
		one.kill()
	}
	_ = f.fails(t)
	time.Sleep(time.Second)
	c.nodes.change("ADDED", named("n2"))
	c.fronts[1].start()
	if took := f.hears(t, "n2").took; took > 3*time.Second {
		t.Errorf("after %v", took)
	}
	f.uses(t, c.fronts[1].url())
	if lines := strings.Count(f.log.String(), "\n"); lines > 2 {
		t.Errorf("the log:\n%s", f.log)
	}
}

// Where all say that they are not ready, one that answers is better than none.
func TestNoneIsReady(t *testing.T) {
	c := newCluster(t, 2)
	f := followServers(t, c.config, ServersOptions{Given: c.given()})
	c.nodes.change("ADDED", named("n1"))
	f.hears(t, "n1")
	used, _ := c.used(t, f)
	for _, one := range c.fronts {
		one.say(http.StatusInternalServerError)
	}
	time.Sleep(10 * quick.interval)
	c.nodes.change("ADDED", named("n2"))
	if err := f.hears(t, "n2").errs; err != nil || f.State().InUse != used.url() || f.State().Failovers > 0 {
		t.Errorf("%v, %+v", err, f.State())
	}
}

// One that fails again and again is left once.
func TestFlapping(t *testing.T) {
	c := newCluster(t, 2)
	f := followServers(t, c.config, ServersOptions{Given: c.given()})
	c.nodes.change("ADDED", named("n1"))
	f.hears(t, "n1")
	used, others := c.used(t, f)
	for range 5 {
		used.say(http.StatusServiceUnavailable)
		time.Sleep(3 * quick.interval)
		used.say(http.StatusOK)
		time.Sleep(3 * quick.interval)
	}
	if s := f.State(); s.InUse != others[0].url() || s.Failovers != 1 {
		t.Errorf("%+v", s)
	}
}

// Those that were away are used again, by one of many agents or the other: each draws anew now and then. Its watch goes on where it
// was, without a new list, and nobody calls that a failure.
func TestOneIsDrawnAnew(t *testing.T) {
	t.Parallel()
	often := quick
	often.spread = 1500 * time.Millisecond // client-go makes a list after a watch of less than a second
	c := newCluster(t, 9)
	for _, one := range c.fronts[1:] {
		one.kill()
	}
	f := followServers(t, c.config, ServersOptions{Given: c.given(), times: often})
	c.nodes.change("ADDED", named("n1"))
	f.hears(t, "n1")
	first, others := c.used(t, f)
	lists := c.nodes.listed()
	for _, one := range others {
		one.start()
	}
	for end := time.Now().Add(15 * time.Second); f.State().InUse == first.url(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the only one that was there at first is still in use")
		}
	}
	second, _ := c.used(t, f)
	for end := time.Now().Add(5 * time.Second); second.asked("secret") == 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the watch has not moved")
		}
	}
	c.nodes.change("ADDED", named("n2"))
	if err := f.hears(t, "n2").errs; err != nil || c.nodes.listed() != lists || f.State().Failovers > 0 {
		t.Errorf("%v; %d lists instead of %d; %+v", err, c.nodes.listed(), lists, f.State())
	}
}

// Of many draws each that is ready has its part; between two of them nothing moves.
func TestDrawsAreEven(t *testing.T) {
	c := newCluster(t, 4)
	v, err := NewServers(c.config, ServersOptions{Given: c.given(), Log: slog.New(slog.DiscardHandler), times: quick})
	if err != nil {
		t.Fatal(err)
	}
	v.all[3].err = errUnready
	chosen := map[string]int{}
	for range 300 {
		v.choose(v.all, nil)
		drawn := v.State().InUse
		chosen[drawn]++
		for range 3 {
			v.choose(v.all, nil)
		}
		if s := v.State(); s.InUse != drawn || s.Failovers > 0 {
			t.Fatalf("%s was drawn; %+v", drawn, s)
		}
		v.draw = time.Now()
	}
	for _, one := range v.all[:3] {
		if n := chosen[one.String()]; n < 60 || n > 140 {
			t.Errorf("drawn were %v", chosen)
		}
	}
}

// While a watch has much to tell, its API server is rarely asked besides; the others never are.
func TestChecksAreFew(t *testing.T) {
	c := newCluster(t, 3)
	f := followServers(t, c.config, ServersOptions{Given: c.given()})
	c.nodes.change("ADDED", named("n1"))
	f.hears(t, "n1")
	used, others := c.used(t, f)
	before := used.checked()
	for n := range 100 {
		c.nodes.change("ADDED", named(fmt.Sprint("m", n)))
		time.Sleep(quick.interval / 5)
	}
	if n := used.checked() - before; n < 2 || n > 6 {
		t.Errorf("%d checks in 5 times %v", n, quick.trust)
	}
	for _, one := range others {
		if one.checked() != 1 {
			t.Errorf("another one was checked %d times", one.checked())
		}
	}
}

// The token of the file is sent to all, and what it has become: client-go reads it once a minute.
func TestTokensRotate(t *testing.T) {
	c := newCluster(t, 2)
	c.config.BearerTokenFile = filepath.Join(t.TempDir(), "token")
	write := func(token string) {
		if err := os.WriteFile(c.config.BearerTokenFile, []byte(token), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("first")
	f := followServers(t, c.config, ServersOptions{Given: c.given()})
	c.nodes.change("ADDED", named("n1"))
	f.hears(t, "n1")
	used, others := c.used(t, f)
	if used.asked("first") == 0 {
		t.Error("the token is not sent")
	}
	write("second")
	if priv.Long() {
		others[0].take("second")
	}
	used.kill()
	c.nodes.change("ADDED", named("n2"))
	f.hears(t, "n2")
	if old, fresh := others[0].asked("first"), others[0].asked("second"); old+fresh == 0 || priv.Long() && fresh == 0 {
		t.Errorf("the other one was asked %d times with the old token, %d times with the new one", old, fresh)
	}
}

// A lone address is reached as if there were no Servers, and never checked.
func TestLoneServer(t *testing.T) {
	c := newCluster(t, 1)
	c.config.Host = c.fronts[0].url()
	f := followServers(t, c.config, ServersOptions{})
	c.nodes.change("ADDED", named("n1"))
	f.hears(t, "n1")
	c.fronts[0].kill()
	if err := f.fails(t).Error(); !strings.Contains(err, " Nodes from "+c.fronts[0].url()+": ") {
		t.Errorf("says %q", err)
	}
	c.nodes.change("ADDED", named("n2"))
	c.fronts[0].start()
	if took := f.hears(t, "n2").took; took > 2*time.Second {
		t.Errorf("after %v", took)
	}
	if n := c.fronts[0].checked(); n > 0 || f.log.String() != "" {
		t.Errorf("%d checks; the log: %s", n, f.log)
	}
}

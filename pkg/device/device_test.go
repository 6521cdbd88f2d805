package device

import (
	"bytes"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

var (
	macA = net.HardwareAddr{0x02, 0xec, 0, 0, 0, 1}
	macB = net.HardwareAddr{0x02, 0xec, 0, 0, 0, 2}
)

func requireRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("REQUIRE_PRIVILEGED") == "1" {
		t.Fatal("this test needs root, and REQUIRE_PRIVILEGED=1")
	}
	t.Skip("needs root")
}

// newNS makes a namespace without a name: it dies with its last user, also when the test is killed.
func newNS(t *testing.T) *NetNS {
	t.Helper()
	requireRoot(t)
	type result struct {
		ns  *NetNS
		err error
	}
	made := make(chan result)
	go func() {
		runtime.LockOSThread() // the thread stays in the new namespace and ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			made <- result{nil, err}
			return
		}
		ns, err := CurrentNetNS()
		made <- result{ns, err}
	}()
	r := <-made
	if r.err != nil {
		t.Fatal(r.err)
	}
	t.Cleanup(func() { r.ns.Close() })
	return r.ns
}

func openIn(t *testing.T, ns *NetNS) *Handle {
	t.Helper()
	h, err := OpenIn(ns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	return h
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// pair is a veth between two fresh namespaces, both ends up.
type pair struct {
	hostNS, podNS *NetNS
	host, pod     *Handle
	link, peer    Link
}

func newPair(t *testing.T) pair {
	t.Helper()
	p := pair{hostNS: newNS(t), podNS: newNS(t)}
	p.host, p.pod = openIn(t, p.hostNS), openIn(t, p.podNS)
	var err error
	p.link, err = p.host.CreateVeth(Veth{
		Name: "eccni0", MAC: macA, PeerName: "eth0", PeerMAC: macB, PeerNS: p.podNS, MTU: 1400,
	})
	must(t, err)
	p.peer, err = p.pod.LinkByName("eth0")
	must(t, err)
	must(t, p.pod.SetUp(p.peer.Index))
	must(t, p.host.SetUp(p.link.Index))
	return p
}

func TestCreateVethGivesBothEndsTheirAttributes(t *testing.T) {
	p := newPair(t)
	for _, l := range []struct {
		link Link
		mac  net.HardwareAddr
	}{{p.link, macA}, {p.peer, macB}} {
		if l.link.MTU != 1400 || !bytes.Equal(l.link.MAC, l.mac) || l.link.Kind != "veth" || l.link.Up() {
			t.Errorf("link %+v, want a veth with mtu 1400, mac %s, created down", l.link, l.mac)
		}
	}
	if p.link.PeerIndex != p.peer.Index {
		t.Errorf("peer index %d, want %d", p.link.PeerIndex, p.peer.Index)
	}
	up, err := p.host.LinkByIndex(p.link.Index)
	must(t, err)
	if !up.Up() {
		t.Error("link is not up after SetUp")
	}
	must(t, p.host.SetDown(p.link.Index))
	if down, err := p.host.LinkByIndex(p.link.Index); err != nil || down.Up() {
		t.Errorf("after SetDown: %+v, %v", down, err)
	}
}

func TestCreateVethReportsATakenName(t *testing.T) {
	p := newPair(t)
	other := Veth{Name: "eccni0", MAC: macA, PeerName: "eth1", PeerMAC: macB, PeerNS: p.podNS, MTU: 1400}
	if _, err := p.host.CreateVeth(other); !errors.Is(err, unix.EEXIST) {
		t.Errorf("name taken in the host: error %v, want EEXIST", err)
	}
	other.Name, other.PeerName = "eccni1", "eth0"
	if _, err := p.host.CreateVeth(other); !errors.Is(err, unix.EEXIST) {
		t.Errorf("name taken in the pod: error %v, want EEXIST", err)
	}
	links, err := p.host.Links()
	must(t, err)
	if len(links) != 2 { // lo and eccni0
		t.Errorf("a refused pair left a link behind: %+v", links)
	}
}

func TestDeleteLinkTwice(t *testing.T) {
	p := newPair(t)
	must(t, p.host.DeleteLink(p.link.Index))
	must(t, p.host.DeleteLink(p.link.Index))
	if _, err := p.host.LinkByName("eccni0"); !errors.Is(err, ErrNotFound) {
		t.Errorf("by name: %v, want ErrNotFound", err)
	}
	if _, err := p.host.LinkByIndex(p.link.Index); !errors.Is(err, ErrNotFound) {
		t.Errorf("by index: %v, want ErrNotFound", err)
	}
	if _, err := p.pod.LinkByName("eth0"); !errors.Is(err, ErrNotFound) {
		t.Errorf("peer: %v, want ErrNotFound", err)
	}
}

func TestAddresses(t *testing.T) {
	p := newPair(t)
	want := []netip.Prefix{netip.MustParsePrefix("10.9.0.7/32"), netip.MustParsePrefix("fd00::7/128")}
	for _, a := range want {
		must(t, p.pod.AddAddress(p.peer.Index, a))
		must(t, p.pod.AddAddress(p.peer.Index, a)) // again: success
	}
	list, err := p.pod.Addresses()
	must(t, err)
	var got []netip.Prefix
	for _, a := range list {
		if a.Index == p.peer.Index && !a.Link {
			got = append(got, a.Prefix)
		}
	}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}
}

func TestIPv6AddressIsUsableAtOnce(t *testing.T) {
	p := newPair(t)
	must(t, p.pod.AddAddress(p.peer.Index, netip.MustParsePrefix("fd00::7/128")))
	must(t, p.podNS.Do(func() error {
		c, err := net.ListenPacket("udp6", "[fd00::7]:0") // a tentative address can't be bound
		if err == nil {
			c.Close()
		}
		return err
	}))
}

func TestRoutes(t *testing.T) {
	p := newPair(t)
	must(t, p.host.AddAddress(p.link.Index, netip.MustParsePrefix("192.0.2.1/24")))
	dst := netip.MustParsePrefix("10.9.0.7/32")
	direct := Route{Dst: dst, Index: p.link.Index, Source: netip.MustParseAddr("192.0.2.1")}
	via := Route{Dst: netip.MustParsePrefix("10.9.1.0/24"), Index: p.link.Index, Gateway: netip.MustParseAddr("192.0.2.9"), MTU: 1300}
	closed := Route{Dst: netip.MustParsePrefix("10.9.0.0/24"), Unreachable: true}
	foreign := Route{Dst: netip.MustParsePrefix("10.8.0.0/24"), Index: p.link.Index, Foreign: true}
	v6 := Route{Dst: netip.MustParsePrefix("fd00::7/128"), Index: p.link.Index, Priority: 1024}
	for range 2 { // writing again changes nothing
		for _, r := range []Route{direct, via, closed, foreign, v6} {
			must(t, p.host.ReplaceRoute(r))
		}
	}
	got, err := p.host.OwnRoutes()
	must(t, err)
	if diff := cmp.Diff(stamped(closed, direct, via, v6), got, cmp.Comparer(sameRoute)); diff != "" {
		t.Errorf("own routes (-want +got):\n%s", diff)
	}
	all, err := p.host.Routes()
	must(t, err)
	if !hasRoute(all, foreign.Dst) {
		t.Errorf("Routes misses the foreign route: %+v", all)
	}

	must(t, p.host.DeleteRoute(foreign)) // not ours: stays
	if all, err = p.host.Routes(); err != nil || !hasRoute(all, foreign.Dst) {
		t.Errorf("DeleteRoute took away a foreign route (%v)", err)
	}
	for range 2 {
		for _, r := range []Route{{Dst: dst}, via, closed, v6} {
			must(t, p.host.DeleteRoute(r))
		}
	}
	if got, err = p.host.OwnRoutes(); err != nil || len(got) != 0 {
		t.Errorf("after deleting: %+v, %v", got, err)
	}
}

func TestDeleteRouteKeepsAnotherLinksRoute(t *testing.T) {
	p := newPair(t)
	r := Route{Dst: netip.MustParsePrefix("10.9.0.7/32"), Index: p.link.Index}
	must(t, p.host.ReplaceRoute(r))
	must(t, p.host.DeleteRoute(Route{Dst: r.Dst, Index: p.link.Index + 1000}))
	if got, err := p.host.OwnRoutes(); err != nil || !hasRoute(got, r.Dst) {
		t.Errorf("the route of link %d is gone: %+v, %v", r.Index, got, err)
	}
}

func stamped(routes ...Route) []Route {
	for i := range routes {
		routes[i].Protocol = Protocol
	}
	return routes
}

func sameRoute(a, b Route) bool {
	return a.Dst == b.Dst && (a.Index == b.Index || a.Unreachable) && a.Gateway == b.Gateway && a.Source == b.Source &&
		a.Protocol == b.Protocol && a.Priority == b.Priority && a.MTU == b.MTU && a.Unreachable == b.Unreachable
}

func hasRoute(routes []Route, dst netip.Prefix) bool {
	for _, r := range routes {
		if r.Dst == dst {
			return true
		}
	}
	return false
}

func TestNeighbours(t *testing.T) {
	p := newPair(t)
	for _, a := range []netip.Addr{netip.MustParseAddr("169.254.1.1"), netip.MustParseAddr("fe80::1")} {
		must(t, p.pod.ReplaceNeighbour(p.peer.Index, a, macB))
		must(t, p.pod.ReplaceNeighbour(p.peer.Index, a, macA))
		if !hasNeighbour(t, p, a) {
			t.Errorf("no permanent neighbour %s", a)
		}
		must(t, p.pod.DeleteNeighbour(p.peer.Index, a))
		must(t, p.pod.DeleteNeighbour(p.peer.Index, a))
		if hasNeighbour(t, p, a) {
			t.Errorf("neighbour %s survived its deletion", a)
		}
	}
}

func hasNeighbour(t *testing.T, p pair, a netip.Addr) bool {
	t.Helper()
	list, err := p.pod.Neighbours(p.peer.Index)
	must(t, err)
	for _, n := range list {
		if n.Is(a, macA) {
			return true
		}
	}
	return false
}

func TestSysctlOfANamespace(t *testing.T) {
	ns := newNS(t)
	must(t, ns.Do(func() error {
		if wrote, err := (Sysctl{}).Set("net/ipv4/conf/lo/rp_filter", "2"); err != nil || !wrote {
			t.Errorf("first Set: wrote %v, %v", wrote, err)
		}
		if wrote, err := (Sysctl{}).Set("net/ipv4/conf/lo/rp_filter", "2"); err != nil || wrote {
			t.Errorf("second Set: wrote %v, %v", wrote, err)
		}
		v, err := Sysctl{}.Get("net/ipv4/conf/lo/rp_filter")
		if v != "2" {
			t.Errorf("value %q, want 2", v)
		}
		return err
	}))
}

func TestSysctlDirectory(t *testing.T) {
	dir := t.TempDir()
	s := Sysctl{Dir: dir}
	if _, err := s.Set("net/x", "1"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a sysctl that does not exist: %v", err)
	}
	must(t, os.Mkdir(filepath.Join(dir, "net"), 0o755))
	must(t, os.WriteFile(filepath.Join(dir, "net/x"), []byte("0\n"), 0o644))
	if wrote, err := s.Set("net/x", "1"); err != nil || !wrote {
		t.Errorf("wrote %v, %v", wrote, err)
	}
	if v, err := s.Get("net/x"); err != nil || v[0] != '1' {
		t.Errorf("value %q, %v", v, err)
	}
}

func TestDoComesBack(t *testing.T) {
	ns := newNS(t)
	home, err := CurrentNetNS()
	must(t, err)
	defer home.Close()
	must(t, ns.Do(func() error {
		inside, err := CurrentNetNS()
		must(t, err)
		defer inside.Close()
		if same, err := ns.Same(inside); err != nil || !same {
			t.Errorf("inside: same %v, %v", same, err)
		}
		return nil
	}))
	if same, err := ns.Same(home); err != nil || same {
		t.Errorf("the caller's thread is inside: %v, %v", same, err)
	}
	wrong := errors.New("wrong")
	if err := ns.Do(func() error { return wrong }); err != wrong {
		t.Errorf("error %v, want the function's own", err)
	}
	if err := ns.Do(func() error { runtime.Goexit(); return nil }); !errors.Is(err, errGoexit) {
		t.Errorf("Goexit: %v", err)
	}
}

func TestDoLeavesNoThreadBehind(t *testing.T) {
	ns := newNS(t)
	home, err := CurrentNetNS()
	must(t, err)
	defer home.Close()
	for range 20 {
		must(t, ns.Do(func() error { return nil }))
	}
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() { // each on a thread of its own, so that none of the runtime's is missed
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			here, err := CurrentNetNS()
			if err != nil {
				t.Error(err)
				return
			}
			defer here.Close()
			if same, err := here.Same(home); err != nil || !same {
				t.Errorf("a thread stayed in the other namespace (%v)", err)
			}
			time.Sleep(time.Millisecond) // keeps the thread while the others look for theirs
		})
	}
	wg.Wait()
}

func TestOpenNetNSRefusesOtherFiles(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	must(t, unix.Mkfifo(fifo, 0o600))
	for _, path := range []string{dir, fifo, "/dev/null", "/proc/self/ns/mnt", "/proc/self/stat"} {
		done := make(chan error, 1)
		go func() { _, err := OpenNetNS(path); done <- err }()
		select {
		case err := <-done:
			if !errors.Is(err, ErrNotNetNS) {
				t.Errorf("%s: error %v, want ErrNotNetNS", path, err)
			}
		case <-time.After(5 * time.Second):
			t.Fatalf("%s: opening it hangs", path)
		}
	}
	if _, err := OpenNetNS(filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
}

func TestDumpRepeatsWhatTheKernelInterrupted(t *testing.T) {
	calls := 0
	got, err := dump(func() ([]int, error) {
		if calls++; calls < 3 {
			return []int{0}, unix.EINTR
		}
		return []int{1, 2}, nil
	})
	if err != nil || calls != 3 || len(got) != 2 {
		t.Errorf("got %v, %v after %d calls", got, err, calls)
	}
	if _, err := dump(func() ([]int, error) { return []int{1}, unix.EINTR }); !errors.Is(err, unix.EINTR) {
		t.Errorf("a dump that never completes: %v, want EINTR and nothing listed", err)
	}
}

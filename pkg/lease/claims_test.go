package lease

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/test/etcd"
)

// leased is a lease of 192.0.2.ADDRESS as it is listed.
func leased(t *testing.T, key string, address byte, lease clientv3.LeaseID, created int64) *entry {
	t.Helper()
	s, ok := parseSubnet(key)
	if !ok {
		t.Fatal(key)
	}
	r := record{PublicIP: netip.AddrFrom4([4]byte{192, 0, 2, address}), BackendType: VXLAN}
	return &entry{key: key, subnet: s, record: r, lease: lease, created: created}
}

func listOf(all ...*entry) *list {
	l := newList()
	for _, e := range all {
		l.entries[e.key] = e
	}
	return l
}

func networkOf(t *testing.T, text string) Network {
	t.Helper()
	n, err := ParseNetwork([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A second lease with a node's public address, which anybody may have written, does not take the first one's subnet away.
func TestWhichOfTwoLeasesCounts(t *testing.T) {
	network := networkOf(t, vxlan)
	for what, c := range map[string]struct{ counts, not *entry }{
		"the older":                         {leased(t, "10.5.2.0-24", 2, 1, 10), leased(t, "10.5.1.0-24", 2, 2, 20)},
		"the one that is renewed":           {leased(t, "10.5.2.0-24", 2, 1, 20), leased(t, "10.5.1.0-24", 2, 0, 10)},
		"the one that the node's agent has": {leased(t, "10.5.2.0-24", 2, 7, 20), leased(t, "10.5.1.0-24", 2, 1, 10)},
		"the one that the network has":      {leased(t, "10.5.2.0-24", 2, 1, 20), leased(t, "10.5.4.0-23", 2, 2, 10)},
	} {
		tb := table{entries: listOf(c.counts, c.not).entries, holders: map[netip.Addr]holding{c.counts.record.PublicIP: {lease: 7}}}
		all, _ := tb.nodes(plan.Node{Name: "n1"}, Subnet{}, netip.MustParseAddr("192.0.2.1"), network)
		if short(all) != "n1= 192.0.2.2=10.5.2.0/24" || len(all[1].Doubts) != 1 || !strings.HasPrefix(all[1].Doubts[0], "lease "+c.not.key) {
			t.Errorf("%s: %s, doubts %q", what, short(all), all[len(all)-1].Doubts)
		}
	}
}

func TestWhichOfTwoLeasesIsOurs(t *testing.T) {
	old, young, pods, written := leased(t, "10.5.1.0-24", 1, 1, 10), leased(t, "10.5.2.0-24", 1, 2, 20), leased(t, "10.5.3.0-24", 1, 3, 30), leased(t, "10.5.4.0-24", 1, 4, 40)
	noted := leased(t, "10.5.5.0-24", 1, 7, 50)
	f := &follower{network: networkOf(t, vxlan), standing: pods.subnet, written: written.subnet}
	f.public[wire.IPv4] = old.record.PublicIP
	l := listOf(young, old, written, noted, pods)
	l.holders[f.public[wire.IPv4]] = holding{lease: 7}
	var got []string
	for _, e := range f.mine(l) {
		got = append(got, e.key)
	}
	if strings.Join(got, " ") != "10.5.5.0-24 10.5.3.0-24 10.5.4.0-24 10.5.1.0-24 10.5.2.0-24" {
		t.Errorf("they are preferred in this order: %s", got)
	}
}

// What leads packets for etcd, or for what is outside the network, to a node is no lease, nor is such a subnet chosen.
func TestStrangeSubnets(t *testing.T) {
	r := &Registry{Options: Options{Endpoints: []string{"https://10.1.0.5:2379", "https://[fc00::5]:2379", "https://etcd:2379"}}}
	f := &follower{Registry: r, network: networkOf(t, `{"Network": "10.0.0.0/8", "SubnetMin": "10.1.0.0", "SubnetMax": "10.1.0.0", "Backend": {"Type": "vxlan"}}`)}
	f.public[wire.IPv4] = netip.MustParseAddr("10.1.7.1")
	f.guarded = f.guards()
	for key, want := range map[string]string{
		"10.1.1.0-24": "", "10.1.1.0-24&2001:db8::-64": "", // which is not used: the network has no IPv6
		"10.1.0.0-24": "10.1.0.5", "10.1.7.0-25": "10.1.7.1", "10.1.1.0-24&fc00::-64": "fc00::5",
		"8.8.8.0-24": "no part", "10.0.0.0-8": "no part", "0.0.0.0-0": "no part",
	} {
		s, ok := parseSubnet(key)
		if err := f.strange(s); !ok || err == nil != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", key, err, want)
		}
	}
	if s, err := f.network.choose(nil, f.takenBy(newList())); !errors.Is(err, errFull) {
		t.Errorf("chosen %s, error %v", s, err)
	}
}

func TestNames(t *testing.T) {
	for name, want := range map[string]bool{"n1": true, "n-1.example": true, "": false, "192.0.2.7": false, "x\x1b[2J\nNo problems.": false, "x\xff": false, strings.Repeat("9", 254): false} {
		if isName(name) != want {
			t.Errorf("%.40q is a name: %v, want %v", name, !want, want)
		}
	}
}

// A node that holds its lease goes on when another holder is noted, and does not list everything again and again.
func TestAnotherHolderIsNoted(t *testing.T) {
	t.Parallel()
	s := etcd.Start(t)
	s.Put(configKey, narrow)
	var heard atomic.Int32
	a := start(t, s.URL, func(_ *Options, self *Self) { self.Heard = func() { heard.Add(1) } })
	a.expect("n1=10.5.9.0/24")
	mine := prefix + "/ebpf-cni/192.0.2.1"
	s.Put(mine, `{"machineID":"m2","node":"n2"}`)
	s.Do(func(ctx context.Context) error { _, err := s.Client.Delete(ctx, subnetKey("10.5.9.0-24")); return err })
	const doubt = "n1: public address 192.0.2.1 is held by node n2"
	a.expectDoubt(doubt)
	before := heard.Load()
	for end := time.Now().Add(4 * listPause); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if !strings.Contains(strings.Join(a.doubts(), "\n"), doubt) {
			t.Fatal("it has another node's address, and no doubt any more")
		}
	}
	if n := heard.Load() - before; n > 5 { // of which a list is one
		t.Errorf("without a change it has asked %d times", n)
	}
	s.Put(subnetKey("10.5.1.0-24"), recordOf("192.0.2.2"))
	a.expect("n1=10.5.9.0/24 192.0.2.2=10.5.1.0/24")
	s.Do(func(ctx context.Context) error { _, err := s.Client.Delete(ctx, mine); return err })
	until(t, "nothing is doubted any more", func() bool { return len(a.doubts()) == 0 })
	expectKey(t, s, mine, `{"machineID":"m1","node":"n1"}`)
	if _, there := s.Get(subnetKey("10.5.9.0-24")); !there {
		t.Error("its lease is not there")
	}
}

// Pauses grow while nothing is had, and nodes that have failed at once don't try again at once.
func TestPause(t *testing.T) {
	for failures, least := range map[int]time.Duration{0: listPause, 1: listPause, 3: 4 * listPause, 1000: longestPause / 2} {
		f := &follower{failures: failures}
		for range 100 {
			if p := f.pause(); p < least || p > 2*least {
				t.Errorf("after %d failures it is %v, want %v to %v", failures, p, least, 2*least)
			}
		}
	}
}

// What all nodes hear leads to so many lists a second as etcd can serve, of small networks soon.
func TestTurns(t *testing.T) {
	f := &follower{table: table{entries: map[string]*entry{}}}
	for leases := range 5000 {
		f.table.entries[fmt.Sprint(leases)] = &entry{}
		w := f.newWatcher(1)
		if most := time.Duration(leases+2) * time.Second / listsPerSecond; w.turn < 0 || w.turn >= most {
			t.Fatalf("of %d leases the turn is after %v, want at most %v", leases+1, w.turn, most)
		}
	}
	late, was := 0, f.newWatcher(1).turn
	for range 1000 {
		w := f.newWatcher(1)
		w.inTurn()
		w.inTurn() // no sooner for hearing more
		if until := time.Until(w.list.at); w.turn == was || until < w.turn-time.Second || until > w.turn+listPause {
			t.Fatalf("the turn is after %v, and the list after %v", w.turn, until)
		}
		if w.turn > 100*time.Second {
			late++
		}
	}
	if late < 400 || late > 600 {
		t.Errorf("of 1000 nodes %d come in the second half of 200 s", late)
	}
}
